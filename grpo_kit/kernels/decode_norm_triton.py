"""The Triton kernels of `add_norm`: one launch for the sum, one for the norm.

They are two because a program that had whole rows to itself would read all of LoRA's B for each of them: 256 KB at
H = 4,096 and rank 32, which takes one multiprocessor longer than a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.chain import chain, start_next, wait_for_last
from grpo_kit.kernels.decode_parts import Parts, span
from grpo_kit.kernels.decode_parts_triton import ROWS, constants, finish, nibble_place, tensors
from grpo_kit.kernels.triton_ready import unit_stride

COLUMNS = 32  # of the sum: 128 programs for 16 rows of H = 4,096


def add_norm(x: Tensor, parts: Parts | None, weight: Tensor | None, eps: float, ordered: bool) -> tuple[Tensor, Tensor]:
    """`(x + y, h)`, [B, H] each; x may have any row stride."""
    x = unit_stride(x)
    if parts is not None:
        x = _added(x, parts)
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, None if weight is None else weight.contiguous(), h, x.stride(0), eps,
        WIDTH=width, BLOCK=block, SPAN=span(width) if ordered else None, num_warps=min(max(block // 256, 1), 16),
        **chain(x.device),
    )  # fmt: skip
    return x, h


def _added(x: Tensor, parts: Parts) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = x.shape
    grid = (triton.cdiv(width, COLUMNS), triton.cdiv(rows, ROWS))
    _add[grid](**tensors(parts), x=x, out=out, x_stride=x.stride(0), COLUMNS=COLUMNS, **constants(parts), num_warps=4)
    return out


# The number of rows changes as sequences end: specialized on, it would be compiled again for 1 and for 16.
@triton.jit(do_not_specialize=["rows"])
def _add(
    sums, lora_b, bias, rows, part_stride, row_stride, x, out, x_stride, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live, real = row < rows, col < N
    inside = live[:, None] & real[None, :]
    y = finish(
        sums, lora_b, bias, row, col, live, real, 0, part_stride, row_stride, out.dtype.element_ty,
        PARTS, N, RANK, RANK_BLOCK, CHAINED,
    )  # fmt: skip
    before = tl.load(x + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    start_next(CHAINED)
    tl.store(out + row[:, None] * N + col[None, :], before + y, mask=inside)


@triton.jit
def _norm(
    x, weight, h, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, CHAINED: tl.constexpr
):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    real = col < WIDTH
    if weight is not None:
        gain = tl.load(weight + col, mask=real, other=0.0).to(tl.float32)
    wait_for_last(CHAINED)
    value = tl.load(x + row * x_stride + col, mask=real, other=0.0).to(tl.float32)  # [BLOCK]
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = (value * scale).to(x.dtype.element_ty).to(tl.float32)
    if weight is not None:
        normed *= gain
    start_next(CHAINED)
    place = col if SPAN is None else nibble_place(col, SPAN)
    tl.store(h + row * WIDTH + place, normed, mask=real)
