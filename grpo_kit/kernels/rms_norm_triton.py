"""The Triton kernels of `rms_norm`: one launch each way, x and the gradient read once.

A program takes about 2,048 numbers: one row of a hidden state, or several rows of heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.triton_ready import unit_stride

ELEMENTS = 2048  # of a program


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(normed [M, D], rstd [M] float32)`; x may have any row stride."""
    x, weight = unit_stride(x), unit_stride(weight)
    normed = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
    rows, block, warps = _tile(x.shape[1])
    _forward[(triton.cdiv(len(x), rows),)](
        x, weight, normed, rstd, len(x), x.stride(0), eps, WIDTH=x.shape[1], ROWS=rows, BLOCK=block, num_warps=warps
    )
    return normed, rstd


def backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of x [M, D], contiguous; grad and x may have any row stride."""
    grad, x, weight = unit_stride(grad), unit_stride(x), unit_stride(weight)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, block, warps = _tile(x.shape[1])
    _backward[(triton.cdiv(len(x), rows),)](
        grad, x, weight, rstd, grad_x, len(x), grad.stride(0), x.stride(0),
        WIDTH=x.shape[1], ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return grad_x


def _tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program: 16 numbers a thread, 32 from 16,384 columns on."""
    block = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // block)
    return rows, block, min(rows * block // 512, 16)


# The number of rows changes with every batch: specialized on, it would be compiled again now and then.
@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, weight, normed, rstd, rows, x_stride, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: row·width passes 2³¹
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (col < WIDTH)
    value = tl.load(x + row[:, None] * x_stride + col, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    tl.store(rstd + row, scale, mask=row < rows)
    rounded = (value * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    tl.store(normed + row[:, None] * WIDTH + col, rounded * gain, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad, x, weight, rstd, grad_x, rows, grad_stride, x_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (col < WIDTH)
    scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
    normal = tl.load(x + row[:, None] * x_stride + col, mask=inside, other=0.0).to(tl.float32) * scale
    gain = tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    through = tl.load(grad + row[:, None] * grad_stride + col, mask=inside, other=0.0).to(tl.float32) * gain
    along = tl.sum(through * normal, 1)[:, None] / WIDTH
    tl.store(grad_x + row[:, None] * WIDTH + col, (through - normal * along) * scale, mask=inside)
