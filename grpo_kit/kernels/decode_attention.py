"""Attention of one new token a row over its cached keys and values: what a token step of decoding does in each layer.

Rows stand at different positions. It writes nothing to the cache and computes no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kit.kernels.decode_parts import BLOCK, nibble_order
from grpo_kit.kernels.int8_tokens import Int8Tokens, Tokens
from grpo_kit.kernels.triton_ready import use_triton

LARGEST_GROUP = 16  # heads of queries on one head of keys: the rows of one product on the tensor cores


def decode_attention(
    q: Tensor, keys: Tokens, values: Tokens, positions: Tensor, scale: float, length: int,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return [B, heads·D] in nibble order: row b's attention over the columns 0..positions[b] of its slot of the cache.

    q [B, heads, D]; keys and values [S, kv_heads, L, D] of q's dtype, row b's in slot b, S ≥ B, each token's D numbers
    side by side and any strides else; what they hold in columns not seen is not looked at. positions [B] int64, each
    below `length`, which is at most L. window: a row sees only its last so many columns, positions[b] included (a
    sliding window). softcap: scores become softcap·tanh(score / softcap) (Gemma 2, arXiv:2408.00118, section 2).
    softmax(scale·q·kᵀ)·v is computed in float32 and rounded to q's dtype. Nothing depends on numbers in the tensors
    but the result, so a CUDA graph may hold the call.

    keys and values may be `Int8Tokens`, contiguous, read as they are stored: q has to be turned as the keys are.

    Raises ValueError if the shapes, dtypes or strides don't fit, if more than 16 heads share one of keys, if heads·D
    is not a multiple of 64, or unless window and softcap are above 0. Positions are not checked: that would wait for
    the device.
    """
    _check(q, keys, values, positions, length, window, softcap)
    return _implementation(q)(q, keys, values, positions, scale, length, window, softcap)


def attend(
    q: Tensor, keys: Tokens, values: Tokens, positions: Tensor, scale: float, length: int,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The twin."""
    rows, heads, _ = q.shape
    kv_heads = keys.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    column, last = torch.arange(length, device=q.device), positions[:, None]
    seen = column <= last
    if window is not None:
        seen &= column > last - window
    seen = seen[:, None, None]  # [B, 1, 1, length]
    k, v = (_read(x[:rows, :, :length], dtype) for x in (keys, values))
    grouped = q.to(dtype).unflatten(1, (kv_heads, heads // kv_heads))  # [B, kv_heads, group, D]
    scores = grouped @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    # A weight of 0 would not silence what a column never written to may hold: 0·NaN is NaN.
    v = v.masked_fill(~seen.transpose(-1, -2), 0)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return nibble_order((weights @ v).to(q.dtype).flatten(1))


def _read(x: Tokens, dtype: torch.dtype) -> Tensor:
    return x.stored(dtype) if isinstance(x, Int8Tokens) else x.to(dtype)


def _check(
    q: Tensor, keys: Tokens, values: Tokens, positions: Tensor, length: int, window: int | None, softcap: float | None
) -> None:
    fits = (
        q.dim() == 3
        and len(keys.shape) == 4
        and keys.shape == values.shape
        and positions.shape == q.shape[:1]
        and keys.shape[0] >= q.shape[0]
        and keys.shape[3] == q.shape[2]
        and q.shape[1] % keys.shape[1] == 0
        and 0 < length <= keys.shape[2]
    )
    if not fits:
        raise ValueError(
            "decode_attention needs q [B, heads, D], keys and values [S, kv_heads, L, D] with S ≥ B and heads a "
            f"multiple of kv_heads, positions [B] and a length of 1..L; got {tuple(q.shape)}, {tuple(keys.shape)}, "
            f"{tuple(values.shape)}, {tuple(positions.shape)} and {length}"
        )
    if isinstance(keys, Int8Tokens) or isinstance(values, Int8Tokens):
        if not (type(keys) is type(values) and keys.is_contiguous() and values.is_contiguous()):
            raise ValueError("decode_attention needs both keys and values in 8 bits, and contiguous, or neither")
    elif not q.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"decode_attention needs q, keys and values of one dtype; got {q.dtype}, {keys.dtype} and {values.dtype}"
        )
    elif keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError("decode_attention needs caches whose last dimension is contiguous: allocate them so")
    if q.shape[1] > LARGEST_GROUP * keys.shape[1]:
        raise ValueError(
            f"decode_attention takes at most {LARGEST_GROUP} heads of queries to one of keys; got {q.shape[1]} to "
            f"{keys.shape[1]}"
        )
    if q.shape[1] * q.shape[2] % BLOCK:
        raise ValueError(
            f"nibble order needs heads·D to be a multiple of {BLOCK}; got {q.shape[1]} heads of {q.shape[2]}"
        )
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(
            f"decode_attention needs a window and a softcap above 0, or None for without; got {window} and {softcap}"
        )


def _implementation(q: Tensor) -> Callable[..., Tensor]:
    if use_triton(q):
        from grpo_kit.kernels import decode_attention_triton as fused

        return fused.attend
    return attend
