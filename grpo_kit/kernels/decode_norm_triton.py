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


def add_norm(
    x: Tensor, parts: Parts | None, weight: Tensor | None, eps: float, ordered: bool,
    inner: Tensor | None, zero_centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(x + y, h)`, [B, H] each; x may have any row stride."""
    x, total, y = unit_stride(x), None, None
    if parts is not None and inner is None:
        x = _added(x, parts)
    elif parts is not None:
        y, total = _added(None, parts), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, None if weight is None else weight.contiguous(), h, y, None if inner is None else inner.contiguous(), total,
        x.stride(0), eps, WIDTH=width, BLOCK=block, SPAN=span(width) if ordered else None, ZERO_CENTERED=zero_centered,
        num_warps=min(max(block // 256, 1), 16), **chain(x.device),
    )  # fmt: skip
    return x if total is None else total, h


def _added(x: Tensor | None, parts: Parts) -> Tensor:
    """x + y, or y alone."""
    out = torch.empty(parts.rows, parts.outputs, dtype=parts.dtype, device=parts.sums.device)
    grid = (triton.cdiv(parts.outputs, COLUMNS), triton.cdiv(parts.rows, ROWS))
    _add[grid](
        **tensors(parts), x=x, out=out, x_stride=0 if x is None else x.stride(0), COLUMNS=COLUMNS,
        **constants(parts), num_warps=4,
    )  # fmt: skip
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
    if x is not None:
        y += tl.load(x + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    start_next(CHAINED)
    tl.store(out + row[:, None] * N + col[None, :], y, mask=inside)


@triton.jit
def _norm(
    x, weight, h, y, inner, total, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ZERO_CENTERED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """y, inner, total: None, or what goes through a norm of its own, that norm's weight, and where x and it go."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    real = col < WIDTH
    if weight is not None:
        gain = tl.load(weight + col, mask=real, other=0.0)
    if y is not None:
        inner_gain = tl.load(inner + col, mask=real, other=0.0)
    wait_for_last(CHAINED)
    value = tl.load(x + row * x_stride + col, mask=real, other=0.0).to(tl.float32)  # [BLOCK]
    if y is not None:
        own = tl.load(y + row * WIDTH + col, mask=real, other=0.0).to(tl.float32)
        own *= tl.rsqrt(tl.sum(own * own, 0) / WIDTH + eps)
        own = gained(own, inner_gain, dtype, ZERO_CENTERED)
        value = (value + own.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(total + row * WIDTH + col, value, mask=real)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    if weight is not None:
        normed = gained(normed, gain, dtype, ZERO_CENTERED)
    start_next(CHAINED)
    place = col if SPAN is None else nibble_place(col, SPAN)
    tl.store(h + row * WIDTH + place, normed, mask=real)


@triton.jit
def gained(normal, weight, dtype: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Numbers of mean square 1 times their norm's weight, in float32; what is not ZERO_CENTERED is rounded before."""
    if ZERO_CENTERED:
        return normal * (1 + weight.to(tl.float32))
    return normal.to(dtype).to(tl.float32) * weight.to(tl.float32)
