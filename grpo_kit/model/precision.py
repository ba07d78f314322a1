"""Which device and which number format, decided by what the hardware has units for, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """device and dtype of the weights and activations; LoRA weights and the loss are float32 everywhere."""

    device: torch.device
    dtype: torch.dtype
    reason: str


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_precision(dtype: str | None = None) -> Precision:
    """For the hardware at hand, unless `dtype` ("float32", "float16", "bfloat16") names the format.

    `torch.cuda.is_bf16_supported()` is not asked: it is true where bf16 is only emulated. Raises ValueError for a name
    that is none of the three.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, or None to choose by the hardware; got {dtype!r}")
    chosen = _for_this_hardware()
    return chosen if dtype is None else Precision(chosen.device, DTYPES[dtype], "asked for")


def _for_this_hardware() -> Precision:
    if not torch.cuda.is_available():
        return Precision(
            torch.device("cpu"), torch.float32, "no CUDA device: float32 is the fastest format that a CPU trains in"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    dtype, reason = dtype_for_capability(*torch.cuda.get_device_capability(device))
    return Precision(device, dtype, f"{torch.cuda.get_device_name(device)}: {reason}")


def dtype_for_capability(major: int, minor: int) -> tuple[torch.dtype, str]:
    """bfloat16 from compute capability 8.0 on (Ampere), float16 with a gradient scaler below."""
    if major >= 8:
        return torch.bfloat16, f"compute capability {major}.{minor} has bfloat16 units"
    return torch.float16, f"compute capability {major}.{minor} has no bfloat16 units: float16 with a gradient scaler"
