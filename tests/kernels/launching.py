"""Runs Triton kernels on CPU tensors: on the GPU if there is one, else in Triton's interpreter.

The interpreter gets a process of its own, since TRITON_INTERPRET counts only if it is set before Triton is first
imported, and other tests import Triton. Tensors keep their strides on the way.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

from grpo_kit.kernels.decode_linear import DecodeGroup, Nf4
from grpo_kit.kernels.decode_parts import Parts
from grpo_kit.kernels.int8_tokens import Int8Tokens

OPERATIONS = (
    "rms_norm",
    "swiglu",
    "rotary",
    "linear_logprob",
    "decode_norm",
    "decode_heads",
    "decode_gate",
    "decode_attention",
    "decode_linear",
)
for holder in (Parts, Nf4, DecodeGroup, Int8Tokens):  # their tensors go where the kernels run, too
    register_dataclass(holder)


def launch(launcher: str, *args: Any) -> Any:
    """What a launcher, such as "rms_norm_triton.forward", returns for `args`."""
    return where_kernels_run(_launch, launcher, args)


def differentiate(operation: str, inputs: list[Any], wanted: int, grads: list[Tensor]) -> list[Tensor]:
    """The results of an operation that uses kernels, then the gradients of its first `wanted` inputs."""
    return where_kernels_run(_differentiate, operation, inputs, wanted, grads)


def where_kernels_run(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns for `args`; it, they and the result must pickle. Tensors come and go by copy."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return tree_map_only(Tensor, Tensor.cpu, function(*tree_map_only(Tensor, _to_gpu, args)))
    return pickle.loads(_interpreter().submit(_call_pickled, pickle.dumps((function, args))).result())


def skip_products_in(dtype: torch.dtype) -> None:
    """For kernels with tl.dot: on a GPU they run in any dtype."""
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices")


def _to_gpu(tensor: Tensor) -> Tensor:
    there = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return there.set_(tensor.untyped_storage().cuda(), tensor.storage_offset(), tensor.shape, tensor.stride())


@cache
def _interpreter() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_start)


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    for operation in OPERATIONS:
        import_module(f"grpo_kit.kernels.{operation}").use_triton = lambda _: True


def _call_pickled(call: bytes) -> bytes:
    function, args = pickle.loads(call)
    return pickle.dumps(function(*args))


def _launch(launcher: str, args: tuple[Any, ...]) -> Any:
    module, function = launcher.split(".")
    return getattr(import_module(f"grpo_kit.kernels.{module}"), function)(*args)


def _differentiate(operation: str, inputs: list[Any], wanted: int, grads: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.requires_grad_() for tensor in inputs[:wanted]]
    results = getattr(import_module(f"grpo_kit.kernels.{operation}"), operation)(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    return [*(tensor.detach() for tensor in results), *torch.autograd.grad(results, leaves, grads)]
