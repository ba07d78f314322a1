"""Programmatic dependent launch: a kernel that starts while the one before it in the stream still runs.

A token step is hundreds of kernels of a few microseconds, each of which uses what the one before it made. Where the
hardware can (from sm90 on), each is launched as soon as all programs of the one before have started, does what needs
no result of it, and waits for its end in `wait_for_last` (CUDA programming guide, programmatic dependent launch). Every
program of a chained kernel has to wait, before it reads or writes what others use: then all earlier ones have ended.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@cache
def chain(device: torch.device) -> dict[str, Any]:
    """The options of a chained kernel's launch; CHAINED is its compile-time argument."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"CHAINED": True, "launch_pdl": True} if able else {"CHAINED": False}


@triton.jit
def start_next(CHAINED: tl.constexpr):
    """Let the next kernel start once all programs of this one have come here."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """Wait until the kernel before this one has ended and what it wrote can be read."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
