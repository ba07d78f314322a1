"""The Triton kernels of `swiglu`: one launch each way, a program for up to 1,024 columns of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.triton_ready import unit_stride

COLUMNS = 1024  # with 4 warps, 8 numbers a thread: one 16-byte load of 16-bit numbers


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """round(silu(gate)) · up, [M, I] contiguous; the inputs may have any row stride."""
    gate, up = unit_stride(gate), unit_stride(up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid, block = _tile(gate)
    _forward[grid](gate, up, out, gate.stride(0), up.stride(0), WIDTH=gate.shape[1], BLOCK=block, num_warps=4)
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor, over: bool = False) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, [M, I] contiguous; all three inputs may have any row stride. over: written over
    gate and up, which must be contiguous then; a program reads its numbers before it writes."""
    assert not over or (gate.is_contiguous() and up.is_contiguous())
    grad, gate, up = unit_stride(grad), unit_stride(gate), unit_stride(up)
    grad_gate = gate if over else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = up if over else torch.empty_like(grad_gate)
    grid, block = _tile(gate)
    _backward[grid](
        grad, gate, up, grad_gate, grad_up, grad.stride(0), gate.stride(0), up.stride(0),
        WIDTH=gate.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip
    return grad_gate, grad_up


def _tile(gate: Tensor) -> tuple[tuple[int], int]:
    """(grid, columns of a program). The grid has one axis, along the rows: only the first may pass 65,535."""
    rows, width = gate.shape
    block = min(COLUMNS, triton.next_power_of_2(width))
    return (rows * triton.cdiv(width, block),), block


@triton.jit
def _forward(gate, up, out, gate_stride, up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, col = _place(WIDTH, BLOCK)
    inside = col < WIDTH
    z = tl.load(gate + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    silu = (z / (1 + tl.exp(-z))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + col, silu * factor, mask=inside)


@triton.jit
def _backward(
    grad, gate, up, grad_gate, grad_up, grad_stride, gate_stride, up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row, col = _place(WIDTH, BLOCK)
    inside = col < WIDTH
    incoming = tl.load(grad + row * grad_stride + col, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-z))
    silu = (z * s).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(grad_gate + row * WIDTH + col, incoming * factor * (s * (1 + z * (1 - s))), mask=inside)
    tl.store(grad_up + row * WIDTH + col, incoming * silu, mask=inside)


@triton.jit
def _place(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The row of this program, int64 since row·width passes 2³¹, and its columns [BLOCK]."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    return (program // blocks).to(tl.int64), (program % blocks) * BLOCK + tl.arange(0, BLOCK)
