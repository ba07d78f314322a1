"""The Triton kernel of `rotary`: one launch for q and k, a program for all the heads of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.triton_ready import unit_stride

PAIRS = 2048  # turned at a time: with 4 warps, 16 a thread


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """q [M, heads, D] and k [M, kv_heads, D] turned by the angles of cos and sin [M, D], or by their opposites.

    New contiguous tensors; only the last dimension of the inputs needs to be contiguous.
    """
    q, k, cos, sin = (unit_stride(x) for x in (q, k, cos, sin))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    half = q.shape[2] // 2
    block = triton.next_power_of_2(half)
    _rotate[(len(q),)](
        q, k, cos, sin, q_out, k_out, *q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0),
        SIGN=-1.0 if inverse else 1.0, HALF=half, BLOCK=block,
        HEADS=q.shape[1], TILE=_heads_at_once(q.shape[1], block),
        KV_HEADS=k.shape[1], KV_TILE=_heads_at_once(k.shape[1], block), num_warps=4,
    )  # fmt: skip
    return q_out, k_out


def _heads_at_once(heads: int, block: int) -> int:
    return min(triton.next_power_of_2(heads), max(1, PAIRS // block))


@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out, q_row, q_head, k_row, k_head, cos_row, sin_row,
    SIGN: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row·stride passes 2³¹
    col = tl.arange(0, BLOCK)[None, :]
    c = tl.load(cos + row * cos_row + col, mask=col < HALF, other=0.0).to(tl.float32)  # [1, BLOCK]
    s = tl.load(sin + row * sin_row + col, mask=col < HALF, other=0.0).to(tl.float32) * SIGN
    _turn(q + row * q_row, q_out + row * (HEADS * HALF * 2), q_head, c, s, HEADS, HALF, TILE, BLOCK)
    _turn(k + row * k_row, k_out + row * (KV_HEADS * HALF * 2), k_head, c, s, KV_HEADS, HALF, KV_TILE, BLOCK)


@triton.jit
def _turn(x, out, stride, c, s, HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The heads of one row, TILE at a time; `stride` is from head to head in x."""
    col = tl.arange(0, BLOCK)[None, :]
    for start in range(0, HEADS, TILE):
        head = (start + tl.arange(0, TILE)).to(tl.int64)[:, None]  # a gradient's heads may be whole sequences apart
        inside = (head < HEADS) & (col < HALF)
        first = tl.load(x + head * stride + col, mask=inside, other=0.0).to(tl.float32)  # [TILE, BLOCK]
        second = tl.load(x + head * stride + col + HALF, mask=inside, other=0.0).to(tl.float32)
        place = out + head * (HALF * 2) + col
        tl.store(place, first * c - second * s, mask=inside)
        tl.store(place + HALF, second * c + first * s, mask=inside)
