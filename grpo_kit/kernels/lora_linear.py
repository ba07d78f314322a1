"""Frozen linear layers with LoRA: y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ, for all layers that share an input at once.

The frozen weight may be stored in 4 bits: it is asked for when needed, one at a time, and not kept. LoRA's weights are
float32 and are rounded to x's format for the products; their gradients are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class Frozen:
    """One frozen layer. dense() gives its weight [N, K] in the compute format. bias [N] or None. scaling: LoRA's s."""

    dense: Callable[[], Tensor]
    bias: Tensor | None
    scaling: float


@dataclass(frozen=True)
class Group:
    """Layers that share their input, and LoRA's weights for them: A₁ [r, K], B₁ [N₁, r], A₂, B₂, …; none of them where
    the adapter is off."""

    layers: tuple[Frozen, ...]
    lora: tuple[Tensor, ...]

    def held(self) -> Group:
        """The same with the dense weights at hand, for several products in a row."""

        def keep(weight: Tensor) -> Callable[[], Tensor]:
            return lambda: weight

        return replace(self, layers=tuple(replace(layer, dense=keep(layer.dense())) for layer in self.layers))

    def stacked_a(self, dtype: torch.dtype) -> Tensor:
        """[n·r, K]: one product with x serves all."""
        return torch.cat([a.detach() for a in self.lora[0::2]]).to(dtype)

    def scaled_b(self, dtype: torch.dtype) -> list[Tensor]:
        """s·B of each, [N, r]."""
        return [(layer.scaling * b.detach()).to(dtype) for layer, b in zip(self.layers, self.lora[1::2], strict=True)]


def project(x: Tensor, group: Group) -> tuple[Tensor, ...]:
    """x [M, K] → [M, N] of each layer of the group. Differentiable in x and in LoRA's weights."""
    return _Project.apply(x, group, *group.lora)


def project_backward(
    x: Tensor, low: Tensor | None, grads: tuple[Tensor, ...], group: Group, needs_x: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """From the gradients [M, N] of a group's outputs to that of x [M, K] (None unless needed) and, in float32, those of
    LoRA's weights. low: x·Aᵀ [M, n·r] as `lower` gives it."""
    grad_x = None
    if needs_x:
        for layer, grad in zip(group.layers, grads, strict=True):
            grad_x = grad @ layer.dense() if grad_x is None else grad_x.addmm_(grad, layer.dense())
    if low is None:
        return grad_x, []
    rank = group.lora[0].shape[0]
    grad_low = torch.empty_like(low)
    grad_bs = []
    for i, (grad, b) in enumerate(zip(grads, group.scaled_b(x.dtype), strict=True)):
        mine = slice(i * rank, (i + 1) * rank)
        grad_low[:, mine] = grad @ b
        grad_bs.append(group.layers[i].scaling * mm_float32(grad.T, low[:, mine]))
    grad_as = mm_float32(grad_low.T, x).split(rank)
    if grad_x is not None:
        grad_x.addmm_(grad_low, group.stacked_a(x.dtype))
    return grad_x, [each for pair in zip(grad_as, grad_bs, strict=True) for each in pair]


def lower(x: Tensor, group: Group) -> Tensor | None:
    """x·Aᵀ of all layers, [M, n·r]; None where the adapter is off."""
    return x @ group.stacked_a(x.dtype).T if group.lora else None


def mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """a·b, summed and given in float32 (or in float64 for such)."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *lora: Tensor) -> tuple[Tensor, ...]:
        low = lower(x, group)
        outs = tuple(linear(x, layer.dense(), layer.bias) for layer in group.layers)
        if low is not None:
            rank = lora[0].shape[0]
            for i, (out, b) in enumerate(zip(outs, group.scaled_b(x.dtype), strict=True)):
                out.addmm_(low[:, i * rank : (i + 1) * rank], b.T)
        ctx.save_for_backward(x, *(() if low is None else (low,)))
        ctx.group = group
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *low = ctx.saved_tensors
        grad_x, grad_lora = project_backward(
            x, low[0] if low else None, grads, ctx.group, needs_x=ctx.needs_input_grad[0]
        )
        return grad_x, None, *grad_lora
