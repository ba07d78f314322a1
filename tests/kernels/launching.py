"""Runs the launcher of a Triton kernel on CPU tensors: on the GPU if there is one, else in Triton's interpreter.

The interpreter gets a process of its own, since TRITON_INTERPRET counts only if it is set before Triton is first
imported, and other tests import Triton.
"""

from __future__ import annotations

import importlib
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor


def launch(launcher: str, *args: Any) -> Any:
    """What `launcher`, such as "rms_norm_triton.forward", returns for `args`; tensors keep their strides."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return _to_cpu(_call(launcher, [_to_gpu(arg) if isinstance(arg, Tensor) else arg for arg in args]))
    return pickle.loads(_interpreter().submit(_call_pickled, launcher, pickle.dumps(args)).result())


@cache
def _interpreter() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_start)


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _call_pickled(launcher: str, args: bytes) -> bytes:
    return pickle.dumps(_call(launcher, pickle.loads(args)))


def _call(launcher: str, args: Any) -> Any:
    module, function = launcher.split(".")
    return getattr(importlib.import_module(f"grpo_kit.kernels.{module}"), function)(*args)


def _to_gpu(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage().cuda()
    there = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return there.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _to_cpu(result: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return result.cpu() if isinstance(result, Tensor) else tuple(tensor.cpu() for tensor in result)
