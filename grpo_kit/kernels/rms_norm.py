"""RMS norm with a frozen weight, rounded as transformers' LlamaRMSNorm rounds.

Serves the norms of whole hidden states (D in the thousands) and those of single heads (D = 64 to 256, M·heads rows).
For backward it keeps its input and one number a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kit.kernels.triton_ready import use_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return round(x / √(mean(x²) + eps)) · weight, [M, D] (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

    x [M, D], weight [D]. Computed in float32; rounded to x's dtype before the product with `weight`, whose result has
    the dtype that torch gives such a product. The gradient reaches `x` alone.

    Raises ValueError if the shapes don't fit together or `weight` requires a gradient.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rms_norm needs x [M, D] and weight [D]; got {tuple(x.shape)} and {tuple(weight.shape)}")
    if weight.requires_grad:
        raise ValueError("rms_norm is for frozen norms: it computes no gradient for a weight that requires one")
    return _RmsNorm.apply(x, weight, eps)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The twin: `(normed [M, D], rstd [M])`; rstd = 1 / √(mean(x²) + eps), in float32 (float64 for float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    return (wide * rstd[:, None]).to(x.dtype) * weight, rstd


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The twin: the gradient of x [M, D] from that of the result, rounded once."""
    normal = x.to(rstd.dtype) * rstd[:, None]
    through = grad.to(rstd.dtype) * weight
    return ((through - normal * (through * normal).mean(-1, keepdim=True)) * rstd[:, None]).to(x.dtype)


def rms_norm_ways(x: Tensor) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Forward and backward as they run where x is, outside of autograd; called as the twins are."""
    if use_triton(x):
        from grpo_kit.kernels import rms_norm_triton as fused

        return fused.forward, fused.backward
    return rms_norm_forward, rms_norm_backward


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, rstd = rms_norm_ways(x)[0](x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors
        return rms_norm_ways(x)[1](grad, x, weight, rstd), None, None
