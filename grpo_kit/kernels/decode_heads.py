"""The heads of a token step: what q, k and v left unfinished becomes queries, and new columns of the cache.

Per-head norm where the model has one, rotary embedding, and the writing of k and v. No gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.kernels.decode_parts import Parts
from grpo_kit.kernels.rms_norm import rms_norm_forward
from grpo_kit.kernels.rotary import rotate
from grpo_kit.kernels.triton_ready import use_triton


def finish_heads(
    parts: Parts, cos: Tensor, sin: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float,
    positions: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """The queries, turned, [B, heads, D]; k, turned, and v are written to the cache.

    parts: of the matrices q, k and v, with heads·D, kv_heads·D and kv_heads·D outputs. cos, sin [B, D]: their second
    halves repeat the first and are not read. query_norm, key_norm [D]: weights of the per-head RMS norms, or None.
    keys, values [slots, kv_heads, L, D] in the compute format, slots ≥ B: row b writes to slot b, at column
    positions[b] (int64 [B], below L, which a GPU does not check). Rounds as `rms_norm` and `rotary` do.

    Raises ValueError if the shapes or number formats don't fit together.
    """
    _check(parts, cos, sin, query_norm, key_norm, positions, keys, values)
    if use_triton(parts.sums):
        from grpo_kit.kernels import decode_heads_triton as fused

        return fused.finish_heads(parts, cos, sin, query_norm, key_norm, eps, positions, keys, values)
    return plain_finish_heads(parts, cos, sin, query_norm, key_norm, eps, positions, keys, values)


def plain_finish_heads(
    parts: Parts, cos: Tensor, sin: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float,
    positions: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """The twin."""
    q, k, v = (y.unflatten(1, (-1, keys.shape[3])) for y in parts.finished().split(parts.sizes, 1))
    q, k = rotate(_normed(q, query_norm, eps), _normed(k, key_norm, eps), cos, sin, inverse=False)
    row = torch.arange(parts.rows, device=keys.device)
    keys[row, :, positions], values[row, :, positions] = k, v
    return q


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [B, heads, D], each head normed."""
    return x if weight is None else rms_norm_forward(x.flatten(0, 1), weight, eps)[0].to(x.dtype).view(x.shape)


def _check(
    parts: Parts, cos: Tensor, sin: Tensor, query_norm: Tensor | None, key_norm: Tensor | None,
    positions: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    slots, kv_heads, _, width = keys.shape
    fits = (
        len(parts.sizes) == 3
        and parts.sizes[0] % width == 0
        and parts.sizes[1:] == (kv_heads * width,) * 2
        and parts.rows <= slots
        and values.shape == keys.shape
        and keys.dtype == values.dtype == parts.dtype
        and cos.shape == sin.shape == (parts.rows, width)
        and all(norm is None or norm.shape == (width,) for norm in (query_norm, key_norm))
        and positions.shape == (parts.rows,)
    )
    if not fits:
        raise ValueError(
            "finish_heads needs the parts of q, k and v, cos and sin [B, D], norms [D] or None, positions [B], keys "
            f"and values [slots, kv_heads, L, D] with slots ≥ B; got {parts.sizes} outputs of {parts.rows} rows in "
            f"{parts.dtype}, {_shapes(cos, sin, query_norm, key_norm, positions, keys, values)}, caches in "
            f"{keys.dtype} and {values.dtype}"
        )


def _shapes(*tensors: Tensor | None) -> str:
    return ", ".join("None" if each is None else str(tuple(each.shape)) for each in tensors)
