"""The Triton kernels of `decode_attention`: flash-decoding (Dao et al. 2023, pytorch.org/blog/flash-decoding).

A program takes one row, one head of keys with all the heads of queries on it, and one part of the row's columns; a
second launch adds up the parts, if there are several. Every row is cut by its own length, so short rows too are spread
over the GPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.chain import chain, start_next, wait_for_last
from grpo_kit.kernels.decode_parts import span
from grpo_kit.kernels.decode_parts_triton import nibble_place
from grpo_kit.kernels.int8_tokens import Tokens, numbers_and_scales
from grpo_kit.kernels.triton_ready import unit_stride

LOG2_E = tl.constexpr(math.log2(math.e))
GRAIN = tl.constexpr(32)  # a part's columns are a multiple of this
# Of keys, and again of values, that a program takes at a time, and how many such tiles are on their way or in use: with
# 128 numbers a head 38 KB and under 100 registers a thread, so that five programs fit on a multiprocessor of sm90.
TILE_BYTES, STAGES = 8 * 1024, 3
PROGRAMS_PER_MULTIPROCESSOR = 4
SHORTEST, LONGEST = 64, 1024  # columns of a part: below, its sums cost too much; above, one long row keeps all waiting
MOST_PARTS = 64  # are added up at once
# Where there is no GPU to ask, as one with 132 multiprocessors.
MULTIPROCESSORS, CAPABILITY = 132, (9, 0)


def attend(
    q: Tensor, keys: Tokens, values: Tokens, positions: Tensor, scale: float, length: int,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """[B, heads·D], as `decode_attention` has it."""
    heads, kv_heads = q.shape[1], keys.shape[1]
    multiprocessors, capability = _hardware(q.device)
    seen = length if window is None else min(length, window)
    parts = parts_of_a_row(len(q) * kv_heads, seen, multiprocessors)
    group = padded_group(heads // kv_heads, capability)
    return attend_in_parts(q, keys, values, positions, scale, parts, group, window, softcap)


def attend_in_parts(
    q: Tensor, keys: Tokens, values: Tokens, positions: Tensor, scale: float, parts: int, group: int,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The same with what each row sees cut into `parts`, and a head of keys' queries padded to `group`, a power of
    two."""
    q, positions = unit_stride(q), unit_stride(positions)
    (k, key_scales), (v, value_scales) = numbers_and_scales(keys), numbers_and_scales(values)
    rows, heads, width = q.shape
    kv_heads, padded = k.shape[1], triton.next_power_of_2(width)
    result = torch.empty(rows, heads * width, dtype=q.dtype, device=q.device)
    sums, log_totals = result, None  # of a single part: the kernel writes the result itself
    if parts > 1:
        sums = torch.empty(rows, heads, parts, width, dtype=torch.float32, device=q.device)
        log_totals = torch.empty(rows, heads, parts, dtype=torch.float32, device=q.device)
    _attend[(rows, kv_heads, parts)](
        q, k, v, key_scales, value_scales, positions, sums, log_totals, scale * LOG2_E.value,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        WINDOW=window, CAP=None if softcap is None else softcap * LOG2_E.value,
        HEADS=heads // kv_heads, GROUP=group, WIDTH=width, PADDED=padded, SPAN=span(heads * width), SPLIT=parts > 1,
        TILE=min(64, max(16, TILE_BYTES // (padded * k.element_size()))), num_warps=4, num_stages=STAGES,
        **chain(q.device),
    )  # fmt: skip
    if parts > 1:
        _combine[(rows, heads)](
            sums, log_totals, result, parts,
            WIDTH=width, PADDED=padded, SPAN=span(heads * width), PARTS=triton.next_power_of_2(parts), num_warps=4,
            **chain(q.device),
        )  # fmt: skip
    return result


def parts_of_a_row(programs: int, length: int, multiprocessors: int) -> int:
    """Into how many parts each row that sees up to `length` columns is cut; `programs`: rows × heads of keys."""
    to_fill_all = min(multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // programs, triton.cdiv(length, SHORTEST))
    return min(max(1, to_fill_all, triton.cdiv(length, LONGEST)), MOST_PARTS)


def padded_group(heads: int, capability: tuple[int, int]) -> int:
    """Queries on one head of keys, as many as the product takes: 16 on tensor cores. Triton has none for sm75, where
    each row more costs time and registers."""
    return 16 if capability >= (8, 0) else triton.next_power_of_2(heads)


def _hardware(device: torch.device) -> tuple[int, tuple[int, int]]:
    if device.type != "cuda":
        return MULTIPROCESSORS, CAPABILITY
    has = torch.cuda.get_device_properties(device)
    return has.multi_processor_count, (has.major, has.minor)


@triton.jit
def _attend(
    q, keys, values, key_scales, value_scales, positions, sums, log_totals, scale,
    q_row, q_head, key_row, key_head, key_column, value_row, value_head, value_column,
    WINDOW: tl.constexpr, CAP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """HEADS: of queries on one head of keys; GROUP: the same, padded. scale, CAP: times log₂e. key_scales,
    value_scales: None, or keys and values are in 8 bits and contiguous. Not SPLIT: `sums` is the result, log_totals
    None."""
    wait_for_last(CHAINED)
    row = tl.program_id(0).to(tl.int64)  # int64: row·stride passes 2³¹
    kv_head = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, GROUP)
    d = tl.arange(0, PADDED)
    used = (head < HEADS)[:, None] & (d < WIDTH)[None, :]
    query = tl.load(
        q + row * q_row + (kv_head * HEADS + head)[:, None] * q_head + d[None, :], mask=used, other=0.0
    )  # [GROUP, PADDED]
    end = tl.load(positions + row).to(tl.int32) + 1
    first = 0
    if WINDOW is not None:
        first = tl.maximum(end - WINDOW, 0)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - first, tl.num_programs(2)), GRAIN) * GRAIN
        first += tl.program_id(2) * share
        end = tl.minimum(first + share, end)

    peak = tl.full([GROUP], -float("inf"), tl.float32)  # logarithms are to the base 2
    totals = tl.zeros([GROUP, TILE], tl.float32)  # added up at the end: between warps that takes barriers
    weighted = tl.zeros([GROUP, PADDED], tl.float32)
    key = keys + row * key_row + kv_head * key_head
    value = values + row * value_row + kv_head * value_head
    column = tl.arange(0, TILE)
    if key_scales is not None:
        key_scale = key_scales + (row * key_row + kv_head * key_head) // WIDTH + column
        value_scale = value_scales + (row * value_row + kv_head * value_head) // WIDTH + column
    for start in range(first, end, TILE):
        seen = start + column < end
        some = _cached(key, start, end, key_column, WIDTH, PADDED, TILE).to(query.dtype)
        scores = tl.dot(query, some.T, input_precision="ieee") * scale
        if key_scales is not None:
            scores *= tl.load(key_scale + start, mask=seen, other=0.0)[None, :]
        if CAP is not None:
            scores = _capped(scores, CAP)
        scores = tl.where(seen[None, :], scores, -float("inf"))  # [GROUP, TILE]
        if value_scales is None:
            new_peak = tl.maximum(peak, tl.max(scores, 1))
        else:
            # Of the weights times the scales: these products, the largest of which is then 1, are what is rounded.
            times = tl.load(value_scale + start, mask=seen, other=1.0)[None, :]
            new_peak = tl.maximum(peak, tl.max(scores + tl.log2(times), 1))
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(scores - new_peak[:, None])
        totals = totals * shrink[:, None] + weight
        if value_scales is not None:
            weight *= times
        some = _cached(value, start, end, value_column, WIDTH, PADDED, TILE).to(query.dtype)
        weighted = tl.dot(weight.to(query.dtype), some, weighted * shrink[:, None], input_precision="ieee")
        peak = new_peak

    start_next(CHAINED)
    total = tl.sum(totals, 1)
    heads = tl.num_programs(1) * HEADS
    if SPLIT:
        place = ((row * heads + kv_head * HEADS + head) * tl.num_programs(2)) + tl.program_id(2)
        tl.store(log_totals + place, peak + tl.log2(total), mask=head < HEADS)  # -inf of an empty part
        if first < end:
            tl.store(sums + place[:, None] * WIDTH + d[None, :], weighted / total[:, None], mask=used)
    else:
        place = nibble_place((kv_head * HEADS + head)[:, None] * WIDTH + d[None, :], SPAN)
        tl.store(sums + row * (heads * WIDTH) + place, weighted / total[:, None], mask=used)


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """CAP·tanh(scores / CAP); Triton has no tanh of its own that every version and the interpreter know."""
    return CAP - 2 * CAP / (1 + tl.exp2(scores * (2 * LOG2_E / CAP)))


@triton.jit
def _cached(x, start, end, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """[TILE, PADDED]: columns `start`.. of one head in the cache, zero from `end` on."""
    column = tl.arange(0, TILE)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    place = x + tl.cast(start, tl.int64) * stride + column * stride + d
    return tl.load(place, mask=(column < end - start) & (d < WIDTH), other=0)


# The number of parts changes with length and rows; the kernel differs only by its power of two.
@triton.jit(do_not_specialize=["parts"])
def _combine(
    sums,
    log_totals,
    result,
    parts,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    part = tl.arange(0, PARTS)
    d = tl.arange(0, PADDED)
    place = (row * heads + head) * parts + part
    log_total = tl.load(log_totals + place, mask=part < parts, other=-float("inf"))
    # Loaded with the totals and not after them, though an empty part's were never written.
    some = tl.load(
        sums + place[:, None] * WIDTH + d[None, :], mask=(part < parts)[:, None] & (d < WIDTH)[None, :], other=0.0
    )  # [PARTS, PADDED]
    weight = tl.exp2(log_total - tl.max(log_total, 0))
    mean = tl.sum(tl.where((weight > 0)[:, None], some * weight[:, None], 0.0), 0) / tl.sum(weight, 0)
    start_next(CHAINED)
    tl.store(result + row * (heads * WIDTH) + nibble_place(head * WIDTH + d, SPAN), mean, mask=d < WIDTH)
