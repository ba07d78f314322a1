"""The Triton kernels of `sample`: one launch reads the logits a block at a time, one picks the block and the token.

Weights are float32 and are added up in float64, as the twin does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.chain import chain, start_next, wait_for_last
from grpo_kit.kernels.triton_ready import unit_stride

BLOCK = 4096  # tokens: 32 programs a row for a vocabulary of 128 thousand


def sample(logits: Tensor, uniform: Tensor, temperature: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """Tokens [B] and logprobs [B], as `decode_sample.sample` has them."""
    logits, uniform = unit_stride(logits), unit_stride(uniform)
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    peaks = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    chained = chain(logits.device)
    _measure[(rows, blocks)](
        logits, temperature, peaks, sums, logits.stride(0), VOCAB=vocab, BLOCK=BLOCK, num_warps=8, **chained
    )
    _pick[(rows,)](
        logits, temperature, peaks, sums, uniform, tokens, logprobs, logits.stride(0),
        VOCAB=vocab, BLOCK=BLOCK, BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), GREEDY=greedy,
        num_warps=8, **chained,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _measure(
    logits, temperature, peaks, sums, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """Of each block of a row its largest scaled logit, and Σ exp(scaled logit − that)."""
    wait_for_last(CHAINED)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = _scaled(logits + row * row_stride, temperature, block, VOCAB, BLOCK)
    peak = tl.max(x, 0)
    weight = tl.exp(x - _finite(peak))
    start_next(CHAINED)
    place = row * tl.num_programs(1) + block
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def _pick(
    logits, temperature, peaks, sums, uniform, tokens, logprobs, row_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, GREEDY: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    wait_for_last(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, PADDED)
    peak = tl.load(peaks + row * BLOCKS + one, mask=one < BLOCKS, other=-float("inf"))
    top = tl.max(peak, 0)
    weight = tl.load(sums + row * BLOCKS + one, mask=one < BLOCKS, other=0.0)
    weight *= tl.exp(peak - _finite(top)).to(tl.float64)
    total = tl.sum(weight, 0)
    target = tl.load(uniform + row) * total
    block = tl.argmax(peak, 0) if GREEDY else _first_above(tl.cumsum(weight, 0), target, weight, one)
    x = _scaled(logits + row * row_stride, temperature, block, VOCAB, BLOCK)
    j = tl.arange(0, BLOCK)
    if GREEDY:
        inside = tl.argmax(x, 0)
    else:
        before = tl.sum(tl.where(one < block, weight, 0.0), 0)
        own = tl.exp(x - _finite(top)).to(tl.float64)
        inside = _first_above(tl.cumsum(own, 0) + before, target, own, j)
    start_next(CHAINED)
    chosen = tl.sum(tl.where(j == inside, x, 0.0), 0)
    tl.store(tokens + row, (block * BLOCK + inside).to(tl.int64))
    tl.store(logprobs + row, chosen - top - tl.log(total).to(tl.float32))


@triton.jit
def _scaled(row, temperature, block, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] float32; −inf beyond the vocabulary."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32) / tl.load(temperature)


@triton.jit
def _finite(peak):
    """What can be subtracted: a block without a single possible token has a peak of −inf."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def _first_above(cumulative, target, weight, place):
    """The first place whose cumulative weight exceeds the target; if rounding leaves none, the last with a weight."""
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    return tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), last)
