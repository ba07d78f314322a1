"""What the kernels that finish `Parts` share: a tile of y in registers, and the place of a column in nibble order.

A program finishes ROWS rows at once, so that LoRA's B is read once for all of them and goes through the tensor cores
where Triton uses them (from sm80 on), whose smallest product has 16 rows and an inner dimension of 16. Rows that lack
are masked and cost no traffic.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from grpo_kit.kernels.chain import chain, wait_for_last
from grpo_kit.kernels.decode_parts import Parts
from grpo_kit.kernels.triton_ready import unit_stride

ROWS = 16


def tensors(parts: Parts) -> dict[str, Any]:
    """The tensors among the arguments that every finishing kernel takes, and their strides."""
    sums = unit_stride(parts.sums)
    lora_b = None if parts.lora_b is None else parts.lora_b.contiguous()
    bias = None if parts.bias is None else parts.bias.contiguous()
    return {
        "sums": sums, "lora_b": lora_b, "bias": bias,
        "rows": parts.rows, "part_stride": sums.stride(0), "row_stride": sums.stride(1),
    }  # fmt: skip


def constants(parts: Parts) -> dict[str, Any]:
    """The compile-time arguments that every finishing kernel takes, and the options of its launch."""
    return {
        "PARTS": len(parts.sums), "N": parts.outputs, "RANK": parts.rank,
        "RANK_BLOCK": max(16, triton.next_power_of_2(parts.rank)), "ROWS": ROWS,
        **chain(parts.sums.device),
    }  # fmt: skip


@triton.jit
def finish(
    sums, lora_b, bias, row, col, live, real, matrix, part_stride, row_stride, dtype: tl.constexpr,
    PARTS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """y [ROWS, COLUMNS] in float32, rounded to `dtype`: rows `row` where `live`, columns `col` of the N where `real`.

    All of the columns belong to the matrix with the number `matrix`; those that are not real are 0. Waits for the
    kernel before, once it has what does not depend on that.
    """
    here = sums + row[:, None] * row_stride
    if RANK:
        j = tl.arange(0, RANK_BLOCK)
        used = j < RANK
        b = tl.load(lora_b + col[:, None] * RANK + j[None, :], mask=real[:, None] & used[None, :], other=0.0)
    if bias is not None:
        offset = tl.load(bias + col, mask=real, other=0.0).to(tl.float32)[None, :]
    wait_for_last(CHAINED)
    y = _added_up(here + col[None, :], live[:, None] & real[None, :], part_stride, PARTS)
    if bias is not None:
        y += offset
    if RANK:
        low = _added_up(here + (N + matrix * RANK + j)[None, :], live[:, None] & used[None, :], part_stride, PARTS)
        y += tl.dot(low.to(dtype), tl.trans(b), input_precision="ieee")
    return y.to(dtype).to(tl.float32)


@triton.jit
def _added_up(first, inside, part_stride, PARTS: tl.constexpr):
    """Σ over the parts of the numbers at the addresses `first`. One tile of all parts, so that no load waits for
    another, and that what is rearranged for a product on the tensor cores is the sum."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))[:, None, None]
    some = tl.load(first[None] + part * part_stride, mask=inside[None] & (part < PARTS), other=0.0)
    return tl.sum(some, 0)


@triton.jit
def nibble_place(col, SPAN: tl.constexpr):
    """Where `nibble_order` puts column `col` of a dimension with this `span`."""
    return col // SPAN * SPAN + col % 4 * (SPAN // 4) + col % SPAN // 4


@triton.jit
def store_in_nibble_order(start, first_col, y, live, SPAN: tl.constexpr):
    """Store y [ROWS, COLUMNS], the columns from `first_col` on of the rows at `start` [ROWS], of which some are `live`.

    COLUMNS divides SPAN. Rearranged first: as they lie, each number would go to a sector of memory of its own.
    """
    QUARTER: tl.constexpr = y.shape[1] // 4
    y = tl.permute(tl.reshape(y, (y.shape[0], QUARTER, 4)), (0, 2, 1))  # [ROWS, 4, COLUMNS / 4]
    place = tl.arange(0, 4)[:, None] * (SPAN // 4) + tl.arange(0, QUARTER)[None, :]
    place += first_col // SPAN * SPAN + tl.multiple_of(first_col % SPAN // 4, QUARTER)
    tl.store(start[:, None, None] + place[None], y, mask=live[:, None, None])
