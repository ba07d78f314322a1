"""The Triton kernel of `decode_linear`: up to three 4-bit matrices and LoRA's A in one launch.

A program takes a tile of a matrix's outputs, one part of K and up to 128 rows of x. Weights go from memory to where the
tensor cores read them, four to a word, and are looked up there: of the words of a few blocks of 64 inputs, the weights
4j + i for each i are multiplied with the inputs 4j + i, that lie together in nibble order. A weight is rounded to x's
dtype as its value and once more as the product with its block's scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.chain import chain, start_next, wait_for_last
from grpo_kit.kernels.decode_linear import MOST_WEIGHTS, DecodeGroup, Nf4
from grpo_kit.kernels.decode_parts import BLOCK, Parts, span
from grpo_kit.kernels.nf4_lookup import VALUES, byte_tables, ptx


@dataclass(frozen=True)
class Tile:
    """What a program computes, and with how much: rows of x × outputs of a matrix, at most so many blocks at a time,
    and so many times that on the way or in use. parts: of K at least; for few rows adding them up costs less than all
    programs starting and ending together."""

    rows: int
    outputs: int
    blocks: int
    warps: int
    stages: int
    parts: int = 1

    def blocks_of(self, inner: int) -> int:
        """Blocks at a time in a matrix with so many inputs."""
        return min(self.blocks, span(inner) // BLOCK)


TILES = (
    Tile(8, 32, 4, 2, 4, parts=2),
    Tile(16, 64, 4, 2, 3),
    Tile(32, 64, 2, 4, 3),
    Tile(64, 64, 2, 4, 3),
    Tile(128, 64, 2, 4, 3),
)
LOW_OUTPUTS = tl.constexpr(16)  # of LoRA's A, in 16 bits: as many bytes as 64 outputs in 4 bits
WARPS_PER_MULTIPROCESSOR = 7.5  # fewer leave memory idle, more parts cost too much to add up
MOST_PARTS = 16  # that a consumer adds up
MULTIPROCESSORS = 132  # where there is no GPU to ask


def multiply(x: Tensor, group: DecodeGroup) -> Parts:
    """Parts, as `decode_linear` has them; 4-bit weights alone."""
    tile = next((tile for tile in TILES if len(x) <= tile.rows), TILES[-1])
    steps = group.inner // BLOCK // tile.blocks_of(group.inner)
    parts = parts_of_a_product(
        _tiles(group, tile) * triton.cdiv(len(x), tile.rows) * tile.warps, steps, _multiprocessors(x.device)
    )
    return multiply_in_parts(x, group, max(parts, min(tile.parts, steps)), tile)


def multiply_in_parts(x: Tensor, group: DecodeGroup, parts: int, tile: Tile) -> Parts:
    """The same with K cut into `parts`, each of at least as many blocks as the tile takes at a time."""
    weights = [weight for weight in group.weights if isinstance(weight, Nf4)]
    lack = MOST_WEIGHTS - len(weights)
    weights += weights[:1] * lack  # of which the kernel takes no outputs
    width = sum(group.sizes) + len(group.sizes) * group.rank
    sums = torch.empty(parts, len(x), width, dtype=torch.float32, device=x.device)
    blocks = tile.blocks_of(group.inner)
    by_ptx = x.is_cuda and x.dtype != torch.float32
    _multiply[(_tiles(group, tile), parts, triton.cdiv(len(x), tile.rows))](
        x, *(weight.words for weight in weights), *(weight.absmax for weight in weights),
        None if group.lora_a is None else group.lora_a.contiguous(), _table(x.device, x.dtype, by_ptx), sums,
        len(x), *group.sizes, *[0] * lack, width, group.inner // (BLOCK * blocks),
        PTX=ptx(x.dtype) if by_ptx else None, ROWS=tile.rows, OUTPUTS=tile.outputs, BLOCKS=blocks,
        SPAN=span(group.inner), STAGES=tile.stages,
        num_warps=tile.warps, **chain(x.device),
    )  # fmt: skip
    return group.unfinished(sums, x.dtype)


def parts_of_a_product(warps: int, steps: int, multiprocessors: int) -> int:
    """Into how many parts K is cut, that a program takes in so many steps; `warps`: of all the programs of one part.

    As many as give all multiprocessors enough to do; a few more if they are then equal.
    """
    needed = math.ceil(multiprocessors * WARPS_PER_MULTIPROCESSOR / warps)
    most = min(MOST_PARTS, steps)
    equal = [parts for parts in range(needed, min(2 * needed, most) + 1) if steps % parts == 0]
    return equal[0] if equal else min(needed, most)


def _tiles(group: DecodeGroup, tile: Tile) -> int:
    """Programs of one part."""
    low = triton.cdiv(len(group.sizes) * group.rank, LOW_OUTPUTS.value)
    return sum(triton.cdiv(size, tile.outputs) for size in group.sizes) + low


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


@cache
def _table(device: torch.device, dtype: torch.dtype, by_ptx: bool) -> Tensor:
    """[8, 32] int32 of equal columns for the PTX, one for each thread of a warp; otherwise the 16 values in `dtype`.

    Columns, since the compiler copies a register anew for each byte permute if it knows it to be a constant, or the
    same in all threads.
    """
    if by_ptx:
        return byte_tables(dtype)[:, None].expand(-1, 32).contiguous().to(device)
    return torch.tensor(VALUES, dtype=dtype).to(device)


# One compilation for all sizes: row strides are written so that their alignment shows without.
@triton.jit(do_not_specialize=["rows", "size0", "size1", "size2", "width", "steps"])
def _multiply(
    x, words0, words1, words2, absmax0, absmax1, absmax2, lora_a, table, sums,
    rows, size0, size1, size2, width, steps,
    PTX: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """size0..2: outputs of each matrix, 0 if there is none; width: of `sums`; steps: of BLOCKS blocks of 64, through K;
    PTX None: plain loads."""
    tile, part = tl.program_id(0), tl.program_id(1)
    first = part * steps // tl.num_programs(1)
    last = (part + 1) * steps // tl.num_programs(1)
    blocks = steps * BLOCKS
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    # Rows and outputs beyond the last are the last one again: loads need no mask.
    x_row = x + tl.minimum(row, rows - 1)[None, :] * (blocks * 64)  # [1, ROWS]

    start1 = tl.cdiv(size0, OUTPUTS)  # the first tile of each matrix
    start2 = start1 + tl.cdiv(size1, OUTPUTS)
    start_low = start2 + tl.cdiv(size2, OUTPUTS)
    if tile < start_low:
        words, absmax, size, start, column = words0, absmax0, size0, tile * 0, tile * 0
        if tile >= start1:
            words, absmax, size, start, column = words1, absmax1, size1, start1, size0
        if tile >= start2:
            words, absmax, size, start, column = words2, absmax2, size2, start2, size0 + size1
        n = (tile - start) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = tl.minimum(n, size - 1).to(tl.int64)
        product = _nf4_product(
            words + inside[:, None] * (blocks * 16), absmax + inside[:, None] * blocks, x_row, table, first, last,
            PTX, ROWS, OUTPUTS, BLOCKS, SPAN, STAGES, CHAINED,
        )  # fmt: skip
        start_next(CHAINED)
        _store(sums, product, part, row, column + n, rows, n < size, width)
    elif lora_a is not None:
        outputs = size0 + size1 + size2
        low = (tile - start_low) * LOW_OUTPUTS + tl.arange(0, LOW_OUTPUTS)
        low_inside = tl.minimum(low, width - outputs - 1)
        wait_for_last(CHAINED)
        low_rows = lora_a + low_inside[:, None] * (blocks * 64)
        low_product = _dense_product(low_rows, x_row, first * BLOCKS, last * BLOCKS, ROWS, STAGES)
        start_next(CHAINED)
        _store(sums, low_product, part, row, outputs + low, rows, outputs + low < width, width)


@triton.jit
def _nf4_product(
    words, absmax, x, table, first, last,
    PTX: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS, ROWS] of the steps first..last-1, each of BLOCKS blocks. words [OUTPUTS, 1], absmax [OUTPUTS, 1],
    x [1, ROWS]: their rows."""
    dtype: tl.constexpr = x.dtype.element_ty
    WORDS: tl.constexpr = 16 * BLOCKS
    QUARTER: tl.constexpr = SPAN // 4
    if PTX is not None:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        own = table + lane + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
        t0, t1, t2, t3 = tl.load(own), tl.load(own + 32), tl.load(own + 64), tl.load(own + 96)
        t4, t5, t6, t7 = tl.load(own + 128), tl.load(own + 160), tl.load(own + 192), tl.load(own + 224)
    j = tl.arange(0, WORDS)
    words += j[None, :]
    absmax += tl.arange(0, BLOCKS)[None, :]
    x += j[:, None]
    wait_for_last(CHAINED)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):
        word = tl.load(words + i * WORDS)
        scale = tl.load(absmax + i * BLOCKS).to(dtype)[:, :, None]
        scale = tl.reshape(tl.broadcast_to(scale, (OUTPUTS, BLOCKS, 16)), (OUTPUTS, WORDS))
        if PTX is not None:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [word, t0, t1, t2, t3, t4, t5, t6, t7],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
            w0, w1 = w0.to(dtype, bitcast=True), w1.to(dtype, bitcast=True)
            w2, w3 = w2.to(dtype, bitcast=True), w3.to(dtype, bitcast=True)
        else:
            w0, w1 = tl.load(table + (word >> 4 & 15)), tl.load(table + (word & 15))
            w2, w3 = tl.load(table + (word >> 12 & 15)), tl.load(table + (word >> 8 & 15))
        # The compiler does not see by itself that wide copies fit.
        place = tl.multiple_of(i * WORDS // QUARTER * SPAN + i * WORDS % QUARTER, 16)
        total = tl.dot(w0 * scale, tl.load(x + place), total, input_precision="ieee")
        total = tl.dot(w1 * scale, tl.load(x + place + QUARTER), total, input_precision="ieee")
        total = tl.dot(w2 * scale, tl.load(x + place + 2 * QUARTER), total, input_precision="ieee")
        total = tl.dot(w3 * scale, tl.load(x + place + 3 * QUARTER), total, input_precision="ieee")
    return total


@triton.jit
def _dense_product(a, x, first, last, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """[LOW_OUTPUTS, ROWS]: the same with rows a [LOW_OUTPUTS, 1] of x's dtype and order."""
    k = tl.arange(0, 64)
    total = tl.zeros((LOW_OUTPUTS, ROWS), dtype=tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):
        some = tl.load(a + k[None, :] + i * 64)
        total = tl.dot(some, tl.load(x + k[:, None] + i * 64), total, input_precision="ieee")
    return total


@triton.jit
def _store(sums, product, part, row, column, rows, real, width):
    place = sums + (part * rows + row).to(tl.int64)[None, :] * width + column[:, None]
    tl.store(place, product, mask=real[:, None] & (row < rows)[None, :])
