"""The heads of a token step: what q, k and v left unfinished becomes queries, and new columns of the cache.

Per-head norm where the model has one, rotary embedding, and the writing of k and v. No gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.kernels.decode_norm import plain_norm
from grpo_kit.kernels.decode_parts import Parts
from grpo_kit.kernels.int8_tokens import Int8Tokens, Tokens
from grpo_kit.kernels.rotary import rotate
from grpo_kit.kernels.triton_ready import use_triton


def finish_heads(
    parts: Parts, cos: Tensor, sin: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float,
    positions: Tensor, keys: Tokens, values: Tokens, zero_centered: bool = False,
) -> Tensor:  # fmt: skip
    """The queries, turned, [B, heads, D]; k, turned, and v are written to the cache.

    parts: of the matrices q, k and v, with heads·D, kv_heads·D and kv_heads·D outputs, or of a single one that holds
    all. cos, sin [B, R]: the first R of a head's numbers are turned, an even number of them, 0 to D; their second
    halves repeat the first and are not read. query_norm, key_norm [D]: weights of the per-head RMS norms, or None.
    keys, values [slots, kv_heads, L, D] in the compute format, slots ≥ B: row b writes to slot b, at column
    positions[b] (int64 [B], below L, which a GPU does not check). zero_centered: see `add_norm`, which rounds as the
    norms here; turning rounds as `rotary` does.

    keys and values may be `Int8Tokens` of such numbers, contiguous: they are quantized as they are written, and the
    queries come back multiplied by the keys' Hadamard matrix.

    Raises ValueError if the shapes or number formats don't fit together.
    """
    _check(parts, cos, sin, query_norm, key_norm, positions, keys, values)
    if use_triton(parts.sums):
        from grpo_kit.kernels import decode_heads_triton as fused

        return fused.finish_heads(parts, cos, sin, query_norm, key_norm, eps, positions, keys, values, zero_centered)
    return plain_finish_heads(parts, cos, sin, query_norm, key_norm, eps, positions, keys, values, zero_centered)


def plain_finish_heads(
    parts: Parts, cos: Tensor, sin: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float,
    positions: Tensor, keys: Tokens, values: Tokens, zero_centered: bool,
) -> Tensor:  # fmt: skip
    """The twin."""
    heads = parts.finished().unflatten(1, (-1, keys.shape[3]))
    q, k, v = heads.tensor_split((-2 * keys.shape[1], -keys.shape[1]), 1)
    q, k = _normed(q, query_norm, eps, zero_centered), _normed(k, key_norm, eps, zero_centered)
    turned = cos.shape[1]
    turned_q, turned_k = rotate(q[..., :turned], k[..., :turned], cos, sin, inverse=False)
    q, k = torch.cat([turned_q, q[..., turned:]], -1), torch.cat([turned_k, k[..., turned:]], -1)
    row = torch.arange(parts.rows, device=positions.device)
    keys[row, :, positions], values[row, :, positions] = k, v
    return keys.turned(q) if isinstance(keys, Int8Tokens) else q


def _normed(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """x [B, heads, D], each head normed."""
    return x if weight is None else plain_norm(x.flatten(0, 1), weight, eps, zero_centered).view(x.shape)


def _check(
    parts: Parts, cos: Tensor, sin: Tensor, query_norm: Tensor | None, key_norm: Tensor | None,
    positions: Tensor, keys: Tokens, values: Tokens,
) -> None:  # fmt: skip
    slots, kv_heads, _, width = keys.shape
    cached = kv_heads * width  # outputs of k, and of v
    fits = (
        parts.sizes in ((parts.outputs,), (parts.outputs - 2 * cached, cached, cached))
        and parts.outputs % width == 0
        and parts.outputs > 2 * cached
        and parts.rows <= slots
        and values.shape == keys.shape
        and _held_in(keys) == _held_in(values) in (parts.dtype, torch.int8)
        and cos.shape == sin.shape == (parts.rows, cos.shape[-1])
        and cos.shape[-1] in range(0, width + 1, 2)
        and all(norm is None or norm.shape == (width,) for norm in (query_norm, key_norm))
        and positions.shape == (parts.rows,)
    )
    if not fits:
        raise ValueError(
            "finish_heads needs the parts of q, k and v, cos and sin [B, R] with R even and at most D, norms [D] or "
            "None, positions [B], keys and values [slots, kv_heads, L, D] with slots ≥ B; got "
            f"{parts.sizes} outputs of {parts.rows} rows in {parts.dtype}, "
            f"{_shapes(cos, sin, query_norm, key_norm, positions, keys, values)}, caches in {_held_in(keys)} and "
            f"{_held_in(values)}"
        )


def _held_in(x: Tokens) -> torch.dtype:
    return torch.int8 if isinstance(x, Int8Tokens) else x.dtype


def _shapes(*tensors: Tokens | None) -> str:
    return ", ".join("None" if each is None else str(tuple(each.shape)) for each in tensors)
