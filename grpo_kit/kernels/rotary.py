"""Rotary position embedding of queries and keys, in transformers' half-split layout.

A rotation is undone by the opposite angle, so backward is the same operation and keeps nothing but cos and sin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kit.kernels.triton_ready import use_triton


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k with the pair (x[i], x[i + D/2]) of each head turned by its row's i-th angle
    (Su et al. 2021, arXiv:2104.09864, eq. 34), as new contiguous tensors.

    q [M, heads, D], k [M, kv_heads, D], both maybe views of one larger tensor; cos and sin [M, D], whose second halves
    repeat the first and are not read. No gradient reaches cos and sin.

    Computed in float32 and rounded once. transformers' `apply_rotary_pos_emb` rounds both products and their sum, so
    16-bit results differ from it by its rounding errors.

    Raises ValueError if the shapes don't fit together or D is odd.
    """
    rows, width = cos.shape if cos.dim() == 2 else (-1, 1)
    fits = all(x.dim() == 3 and x.shape[0] == rows and x.shape[2] == width for x in (q, k))
    if not fits or sin.shape != cos.shape or width % 2:
        raise ValueError(
            f"rotary needs q [M, heads, D], k [M, kv_heads, D], cos and sin [M, D] with D even; got {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    return _Rotary.apply(q, k, cos, sin)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """The twin, for both directions: forward turns by the angles, backward by their opposites."""
    return _turn(q, cos, -sin if inverse else sin), _turn(k, cos, -sin if inverse else sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype, half = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2
    first, second = x[..., :half].to(dtype), x[..., half:].to(dtype)  # [M, heads, D/2]
    cos, sin = cos[:, None, :half].to(dtype), sin[:, None, :half].to(dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _implementation(q: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    if use_triton(q):
        from grpo_kit.kernels import rotary_triton as fused

        return fused.rotate
    return rotate


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _implementation(q)(q, k, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        return *_implementation(grad_q)(grad_q, grad_k, *ctx.saved_tensors, inverse=True), None, None
