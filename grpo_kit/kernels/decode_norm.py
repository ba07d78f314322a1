"""Between two products of a token step: the residual sum and the next norm. Also the first norm alone. No gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.kernels.decode_parts import Parts, nibble_order
from grpo_kit.kernels.rms_norm import rms_norm_forward
from grpo_kit.kernels.triton_ready import use_triton


def add_norm(
    x: Tensor, parts: Parts | None, weight: Tensor | None, eps: float, ordered: bool,
    inner: Tensor | None = None, zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(x + y, h)`, [B, H] each: y finished from `parts` (0 if None: the sum is x itself), h the RMS norm of the sum.

    x [B, H] and the results are in the compute format. weight [H], or None for a norm that has none; h is rounded
    before the product with it, as `rms_norm` does. ordered: h in nibble order, H a multiple of 64. inner [H]: the
    weight of another norm, which y goes through before the sum. zero_centered: the norms' products are with 1 + weight,
    in float32, and rounded only after it, as Gemma's are.

    Raises ValueError if the shapes or number formats don't fit together.
    """
    if parts is not None and (parts.sizes != x.shape[1:] or parts.rows != len(x) or parts.dtype != x.dtype):
        raise ValueError(
            f"add_norm needs x [B, H] and the parts of one matrix with H outputs in one number format; got "
            f"{tuple(x.shape)} {x.dtype} and {parts.sizes} outputs of {parts.rows} rows in {parts.dtype}"
        )
    shapes = [tuple(norm.shape) for norm in (weight, inner) if norm is not None]
    if any(shape != x.shape[1:] for shape in shapes) or (ordered and x.shape[1] % 64):
        raise ValueError(
            "add_norm needs weights [H] of norms, and H a multiple of 64 where h is ordered; got "
            f"x {tuple(x.shape)} and weights {shapes}"
        )
    if use_triton(x):
        from grpo_kit.kernels import decode_norm_triton as fused

        return fused.add_norm(x, parts, weight, eps, ordered, inner, zero_centered)
    return plain_add_norm(x, parts, weight, eps, ordered, inner, zero_centered)


def plain_add_norm(
    x: Tensor, parts: Parts | None, weight: Tensor | None, eps: float, ordered: bool,
    inner: Tensor | None, zero_centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The twin."""
    if parts is not None:
        y = parts.finished()
        x = x + (y if inner is None else plain_norm(y, inner, eps, zero_centered))
    h = plain_norm(x, weight, eps, zero_centered)
    return x, nibble_order(h) if ordered else h


def plain_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """One norm of `add_norm`, in x's dtype."""
    if weight is None:
        weight = x.new_ones(x.shape[1])
    elif zero_centered:
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm_forward(x.to(wide), 1 + weight.to(wide), eps)[0].to(x.dtype)
    return rms_norm_forward(x, weight, eps)[0].to(x.dtype)
