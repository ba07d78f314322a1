"""Whether a tensor may go to a Triton kernel, and the layout it must have there. What may not goes to the twin."""

from __future__ import annotations

import importlib
import warnings
from functools import cache

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # float64 stays with the twins: kernels compute in float32


def use_triton(tensor: Tensor) -> bool:
    """True if `tensor` is on a CUDA device, of a dtype the kernels take, and Triton can be imported.

    Warns once (RuntimeWarning) if Triton cannot be imported although there is a CUDA tensor.
    """
    return tensor.is_cuda and tensor.dtype in FLOATS and _importable()


def unit_stride(tensor: Tensor) -> Tensor:
    """`tensor`, copied only if its last dimension is not contiguous; kernels respect the other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@cache
def _importable() -> bool:
    try:
        importlib.import_module("triton.language")
    except ImportError as error:
        warnings.warn(
            f"Triton cannot be imported ({error}), so plain torch replaces the fused kernels: the results are the "
            "same, training is slower and needs more memory. `pip install triton` brings it on Linux.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
