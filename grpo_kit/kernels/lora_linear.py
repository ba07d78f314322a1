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
    the adapter is off. factors: these as the products take them, once `rounded`."""

    layers: tuple[Frozen, ...]
    lora: tuple[Tensor, ...]
    factors: Factors | None = None

    def held(self) -> Group:
        """The same with the dense weights at hand, for several products in a row."""

        def keep(weight: Tensor) -> Callable[[], Tensor]:
            return lambda: weight

        return replace(self, layers=tuple(replace(layer, dense=keep(layer.dense())) for layer in self.layers))

    def rounded(self, dtype: torch.dtype) -> Group:
        """The same with LoRA's factors at hand, for several products in a row. Not differentiable."""
        if not self.lora or self.factors is not None:
            return self
        with torch.no_grad():
            every_a, every_b = self.lora[0::2], self.lora[1::2]
            a = (torch.cat(every_a) if len(every_a) > 1 else every_a[0]).to(dtype)
            b = tuple(_scaled(b, layer.scaling, dtype) for layer, b in zip(self.layers, every_b, strict=True))
        return replace(self, factors=Factors(a.detach(), b))


@dataclass(frozen=True)
class Factors:
    """a [n·r, K]: A of all layers, so that one product with x serves all. b: s·B of each, [N, r]."""

    a: Tensor
    b: tuple[Tensor, ...]


def _scaled(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """s·b, computed as wide as b is and rounded, in one launch."""
    return torch.mul(b, scaling, out=torch.empty(b.shape, dtype=dtype, device=b.device))


def project(x: Tensor, group: Group) -> tuple[Tensor, ...]:
    """x [M, K] → [M, N] of each layer of the group. Differentiable in x and in LoRA's weights."""
    return _Project.apply(x, group, *group.lora)


def project_forward(x: Tensor, group: Group) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """[M, N] of each layer, and `lower(x, group)`. Not differentiable, as all that follows; the group is `rounded`."""
    low = lower(x, group)
    outs = tuple(linear(x, layer.dense(), layer.bias) for layer in group.layers)
    if low is not None and group.factors is not None:
        for out, mine, b in zip(outs, _parts(low, group), group.factors.b, strict=True):
            out.addmm_(mine, b.T)
    return outs, low


def project_backward(
    x: Tensor, low: Tensor | None, grads: tuple[Tensor, ...], group: Group, grad_x: Tensor | None
) -> list[Tensor]:
    """From the gradients [M, N] of a group's outputs those of LoRA's weights, in float32, and, written to grad_x [M, K]
    if there is one, that of x. low: as `lower` gives it. grad_x may be x itself, which is not needed any more then."""
    grad_lora, grad_low = [], None
    if low is not None and group.factors is not None:
        grad_low = torch.empty_like(low)
        grad_bs = []
        for layer, grad, b, mine, grad_mine in zip(
            group.layers, grads, group.factors.b, _parts(low, group), _parts(grad_low, group), strict=True
        ):
            torch.mm(grad, b, out=grad_mine)
            grad_bs.append(mm_float32(grad.T, mine).mul_(layer.scaling))
        grad_as = mm_float32(grad_low.T, x).split(len(group.lora[0]))
        grad_lora = [each for pair in zip(grad_as, grad_bs, strict=True) for each in pair]
    if grad_x is not None:
        torch.mm(grads[0], group.layers[0].dense(), out=grad_x)
        for layer, grad in zip(group.layers[1:], grads[1:], strict=True):
            grad_x.addmm_(grad, layer.dense())
        if grad_low is not None and group.factors is not None:
            grad_x.addmm_(grad_low, group.factors.a)
    return grad_lora


def lower(x: Tensor, group: Group) -> Tensor | None:
    """x·Aᵀ of all layers, [M, n·r]; None where the adapter is off."""
    return None if group.factors is None else x @ group.factors.a.T


def _parts(low: Tensor, group: Group) -> tuple[Tensor, ...]:
    """Each layer's columns, [M, r]."""
    return low.split(len(group.lora[0]), 1) if len(group.layers) > 1 else (low,)


def mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """a·b, summed and given in float32 (or in float64 for such)."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *lora: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group.rounded(x.dtype)
        outs, low = project_forward(x, ctx.group)
        ctx.save_for_backward(x, *(() if low is None else (low,)))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *low = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        return grad_x, None, *project_backward(x, low[0] if low else None, grads, ctx.group, grad_x)
