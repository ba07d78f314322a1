"""The Triton kernel of `gate`: one launch, a program for 64 columns of 16 rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.chain import start_next
from grpo_kit.kernels.decode_parts import Parts, span
from grpo_kit.kernels.decode_parts_triton import ROWS, constants, finish, store_in_nibble_order, tensors

COLUMNS = 64  # of gate and as many of up: about 200 programs for 16 rows of an 8B model


def gate(parts: Parts, activation: str) -> Tensor:
    """round(act(g)) · u, [B, I] in nibble order."""
    width = parts.outputs // 2
    out = torch.empty((parts.rows, width), dtype=parts.dtype, device=parts.sums.device)
    grid = (triton.cdiv(width, COLUMNS), triton.cdiv(parts.rows, ROWS))
    _gate[grid](
        **tensors(parts), out=out, WIDTH=width, SPAN=span(width), COLUMNS=COLUMNS, UP=len(parts.sizes) - 1,
        ACTIVATION=activation, **constants(parts), num_warps=4,
    )  # fmt: skip
    return out


# The number of rows changes as sequences end: specialized on, it would be compiled again for 1 and for 16.
@triton.jit(do_not_specialize=["rows"])
def _gate(
    sums, lora_b, bias, rows, part_stride, row_stride, out, WIDTH: tl.constexpr, SPAN: tl.constexpr,
    COLUMNS: tl.constexpr, UP: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """UP: the number of the matrix that holds up; gate is in the first."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live, real = row < rows, col < WIDTH
    z = finish(
        sums, lora_b, bias, row, col, live, real, 0, part_stride, row_stride, dtype,
        PARTS, N, RANK, RANK_BLOCK, CHAINED,
    )  # fmt: skip
    factor = finish(
        sums, lora_b, bias, row, WIDTH + col, live, real, UP, part_stride, row_stride, dtype,
        PARTS, N, RANK, RANK_BLOCK, CHAINED,
    )  # fmt: skip
    if ACTIVATION == "silu":
        active = z / (1 + tl.exp(-z))
    else:  # (1 + tanh(a)) / 2 is sigmoid(2·a); 1.5957… is 2·√(2/π)
        active = z / (1 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    start_next(CHAINED)
    y = active.to(dtype).to(tl.float32) * factor
    store_in_nibble_order(out + row * WIDTH, tl.program_id(0) * COLUMNS, y, live, SPAN)
