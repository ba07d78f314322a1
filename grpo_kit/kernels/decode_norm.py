"""Between two products of a token step: the residual sum and the next norm. Also the first norm alone. No gradients."""

from __future__ import annotations

from torch import Tensor

from grpo_kit.kernels.decode_parts import Parts, nibble_order
from grpo_kit.kernels.rms_norm import rms_norm_forward
from grpo_kit.kernels.triton_ready import use_triton


def add_norm(x: Tensor, parts: Parts | None, weight: Tensor | None, eps: float, ordered: bool) -> tuple[Tensor, Tensor]:
    """`(x + y, h)`, [B, H] each: y finished from `parts` (0 if None: the sum is x itself), h the RMS norm of the sum.

    x [B, H] and the results are in the compute format. weight [H], or None for a norm that has none; h is rounded
    before the product with it, as `rms_norm` does. ordered: h in nibble order, H a multiple of 64.

    Raises ValueError if the shapes or number formats don't fit together.
    """
    if parts is not None and (parts.sizes != x.shape[1:] or parts.rows != len(x) or parts.dtype != x.dtype):
        raise ValueError(
            f"add_norm needs x [B, H] and the parts of one matrix with H outputs in one number format; got "
            f"{tuple(x.shape)} {x.dtype} and {parts.sizes} outputs of {parts.rows} rows in {parts.dtype}"
        )
    if (weight is not None and weight.shape != x.shape[1:]) or (ordered and x.shape[1] % 64):
        raise ValueError(
            f"add_norm needs weight [H], and H a multiple of 64 where h is ordered; got x {tuple(x.shape)}"
            + ("" if weight is None else f" and weight {tuple(weight.shape)}")
        )
    if use_triton(x):
        from grpo_kit.kernels import decode_norm_triton as fused

        return fused.add_norm(x, parts, weight, eps, ordered)
    return plain_add_norm(x, parts, weight, eps, ordered)


def plain_add_norm(
    x: Tensor, parts: Parts | None, weight: Tensor | None, eps: float, ordered: bool
) -> tuple[Tensor, Tensor]:
    """The twin."""
    if parts is not None:
        x = x + parts.finished()
    h = rms_norm_forward(x, x.new_ones(x.shape[1]) if weight is None else weight, eps)[0].to(x.dtype)
    return x, nibble_order(h) if ordered else h
