"""The pointwise middle of a gated MLP, silu(gate) · up, rounded as transformers rounds.

For backward it keeps its two inputs and nothing of what it computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from grpo_kit.kernels.triton_ready import use_triton


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return round(silu(gate)) · up, [M, I] in the inputs' dtype (Shazeer 2020, arXiv:2002.05202, eq. 6).

    gate and up [M, I]; silu(z) = z·sigmoid(z). Computed in float32; silu is rounded to the dtype before the product, as
    `act_fn(gate) * up` does. Neither input is written to, in backward neither.

    Raises ValueError if the inputs differ in shape or dtype.
    """
    if gate.dim() != 2 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu needs gate and up [M, I] of one dtype; got {tuple(gate.shape)} {gate.dtype} "
            f"and {tuple(up.shape)} {up.dtype}"
        )
    return _Swiglu.apply(gate, up)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """The twin; torch's silu computes 16-bit numbers in float32 and rounds."""
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, over: bool = False) -> tuple[Tensor, Tensor]:
    """The twin: the gradients of gate and up, [M, I] each, rounded once. over: written over gate and up, which must be
    contiguous then.

    d silu(z) / dz = s·(1 + z·(1 − s)) with s = sigmoid(z).
    """
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    s = torch.sigmoid(wide)
    grad_gate = (grad.to(wide.dtype) * up * (s * (1 + wide * (1 - s)))).to(gate.dtype)
    grad_up = grad * F.silu(gate)
    return (gate.copy_(grad_gate), up.copy_(grad_up)) if over else (grad_gate, grad_up)


def swiglu_ways(gate: Tensor) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """Forward and backward as they run where gate is, outside of autograd; called as the twins are."""
    if use_triton(gate):
        from grpo_kit.kernels import swiglu_triton as fused

        return fused.forward, fused.backward
    return swiglu_forward, swiglu_backward


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_ways(gate)[0](gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return swiglu_ways(gate)[1](grad, gate, up)
