"""The Triton kernel of `finish_heads`: one launch, a program for one head (of q, k or v) of 16 rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.chain import start_next
from grpo_kit.kernels.decode_norm_triton import gained
from grpo_kit.kernels.decode_parts import Parts
from grpo_kit.kernels.decode_parts_triton import ROWS, constants, finish, tensors
from grpo_kit.kernels.int8_tokens import LARGEST, SMALLEST_SCALE, Int8Tokens, Tokens, numbers_and_scales, root
from grpo_kit.kernels.triton_ready import unit_stride

LIMIT, TINY = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
TO_WHOLE = tl.constexpr(1.5 * 2**23)  # float32 numbers near it are whole


def finish_heads(
    parts: Parts, cos: Tensor, sin: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float,
    positions: Tensor, keys: Tokens, values: Tokens, zero_centered: bool,
) -> Tensor:  # fmt: skip
    """The queries [B, heads, D]; writes to keys and values, whose last dimension has to be contiguous."""
    (k, key_scales), (v, value_scales) = numbers_and_scales(keys), numbers_and_scales(values)
    hadamard = keys.hadamard if isinstance(keys, Int8Tokens) else None
    kv_heads, width = k.shape[1], k.shape[3]
    if k.stride(3) != 1 or v.stride() != k.stride():
        raise ValueError(
            f"finish_heads needs keys and values with equal strides, the last one 1; got {k.stride()} and {v.stride()}"
        )
    if isinstance(keys, Int8Tokens) and not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("finish_heads needs keys and values in 8 bits to be contiguous")
    heads = parts.outputs // width - 2 * kv_heads
    q = torch.empty((parts.rows, heads, width), dtype=parts.dtype, device=k.device)
    cos, sin = unit_stride(cos), unit_stride(sin)
    _finish_heads[(heads + 2 * kv_heads, triton.cdiv(parts.rows, ROWS))](
        **tensors(parts), cos=cos, sin=sin, query_norm=query_norm, key_norm=key_norm, positions=positions,
        q=q, keys=k, values=v, key_scales=key_scales, value_scales=value_scales, hadamard=hadamard,
        cos_stride=cos.stride(0), sin_stride=sin.stride(0),
        slot_stride=k.stride(0), head_stride=k.stride(1), place_stride=k.stride(2), eps=eps,
        HEADS=heads, KV_HEADS=kv_heads, HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2),
        ROOT=None if hadamard is None else root(hadamard), TURNED=cos.shape[1] // 2, SINGLE=len(parts.sizes) == 1,
        ZERO_CENTERED=zero_centered,
        **constants(parts), num_warps=4,
    )  # fmt: skip
    return q


# The number of rows changes as sequences end: specialized on, it would be compiled again for 1 and for 16.
@triton.jit(do_not_specialize=["rows"])
def _finish_heads(
    sums, lora_b, bias, rows, part_stride, row_stride, cos, sin, query_norm, key_norm, positions, q, keys, values,
    key_scales, value_scales, hadamard, cos_stride, sin_stride, slot_stride, head_stride, place_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROOT: tl.constexpr, TURNED: tl.constexpr, SINGLE: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    PARTS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """HALF: pairs of numbers in a head; TURNED: how many of them are turned. SINGLE: one matrix holds q, k and v.
    key_scales, value_scales: None, or keys and values are in 8 bits and contiguous; hadamard with ROOT, if so too."""
    head = tl.program_id(0).to(tl.int64)  # int64: places in the cache pass 2³¹
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCK)
    live, real = row < rows, pair < HALF
    inside = live[:, None] & real[None, :]
    d, e = pair, pair + HALF  # where in the head its numbers are
    if TURNED < HALF:  # pairs of what is turned, then of what is not
        d = tl.where(pair < TURNED, pair, pair + TURNED)
        e = d + tl.where(pair < TURNED, TURNED, HALF - TURNED)
    matrix = 0
    if not SINGLE:
        matrix = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
    col = head * (2 * HALF)
    dtype: tl.constexpr = q.dtype.element_ty
    first = finish(
        sums, lora_b, bias, row, col + d, live, real, matrix, part_stride, row_stride, dtype,
        PARTS, N, RANK, RANK_BLOCK, CHAINED,
    )  # fmt: skip
    second = finish(
        sums, lora_b, bias, row, col + e, live, real, matrix, part_stride, row_stride, dtype,
        PARTS, N, RANK, RANK_BLOCK, CHAINED,
    )  # fmt: skip
    turned = live[:, None] & (pair < TURNED)[None, :]
    c = tl.load(cos + row[:, None] * cos_stride + pair[None, :], mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + row[:, None] * sin_stride + pair[None, :], mask=turned, other=0.0).to(tl.float32)
    cached = row.to(tl.int64) * slot_stride + tl.load(positions + row, mask=live, other=0) * place_stride
    start_next(CHAINED)
    if head < HEADS:
        first, second = _turned(first, second, query_norm, c, s, d, e, real, eps, dtype, HALF, ZERO_CENTERED)
        if hadamard is not None:
            first, second = _spread(first, second, hadamard, d, e, real, dtype, HALF, ROOT)
        _store(q + (row * HEADS + head)[:, None] * (2 * HALF), first, second, d, e, inside)
    elif head < HEADS + KV_HEADS:
        first, second = _turned(first, second, key_norm, c, s, d, e, real, eps, dtype, HALF, ZERO_CENTERED)
        if hadamard is not None:
            first, second = _spread(first, second, hadamard, d, e, real, dtype, HALF, ROOT)
        _cache(keys, key_scales, cached + (head - HEADS) * head_stride, first, second, d, e, live, inside, HALF)
    else:
        own = head - HEADS - KV_HEADS
        _cache(values, value_scales, cached + own * head_stride, first, second, d, e, live, inside, HALF)


@triton.jit
def _turned(
    first, second, weight, c, s, d, e, real, eps, dtype: tl.constexpr, HALF: tl.constexpr, ZERO_CENTERED: tl.constexpr
):  # fmt: skip
    """The numbers d and e of a head after its norm, if it has one, and rotary embedding."""
    if weight is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        gain = tl.load(weight + d, mask=real, other=0.0)[None, :]
        first = gained(first * scale, gain, dtype, ZERO_CENTERED).to(dtype).to(tl.float32)
        gain = tl.load(weight + e, mask=real, other=0.0)[None, :]
        second = gained(second * scale, gain, dtype, ZERO_CENTERED).to(dtype).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit
def _store(start, first, second, d, e, inside):
    tl.store(start + d[None, :], first, mask=inside)
    tl.store(start + e[None, :], second, mask=inside)


@triton.jit
def _spread(
    first, second, hadamard, d, e, real, dtype: tl.constexpr, HALF: tl.constexpr, ROOT: tl.constexpr
):  # fmt: skip
    """The numbers d and e of a head times H/√p, in float32."""
    first, second = first.to(dtype), second.to(dtype)
    square = real[:, None] & real[None, :]
    of_d, of_e = hadamard + d[:, None] * (2 * HALF), hadamard + e[:, None] * (2 * HALF)
    spread_d = tl.dot(first, tl.load(of_d + d[None, :], mask=square, other=0.0), input_precision="ieee")
    spread_d = tl.dot(second, tl.load(of_e + d[None, :], mask=square, other=0.0), spread_d, input_precision="ieee")
    spread_e = tl.dot(first, tl.load(of_d + e[None, :], mask=square, other=0.0), input_precision="ieee")
    spread_e = tl.dot(second, tl.load(of_e + e[None, :], mask=square, other=0.0), spread_e, input_precision="ieee")
    return spread_d * ROOT, spread_e * ROOT


@triton.jit
def _cache(x, scales, place, first, second, d, e, live, inside, HALF: tl.constexpr):
    """Write the numbers d and e of a head of each row to x, from `place` [ROWS] on; in 8 bits if there are scales."""
    if scales is not None:
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        scale = tl.maximum(largest / LIMIT, TINY)
        tl.store(scales + place // (2 * HALF), scale, mask=live)
        first, second = _whole(first / scale[:, None]), _whole(second / scale[:, None])
    _store(x + place[:, None], first, second, d, e, inside)


@triton.jit
def _whole(x):
    """x, within ±127, rounded as torch does, a half to the even neighbour."""
    return ((x + TO_WHOLE) - TO_WHOLE).to(tl.int8)
