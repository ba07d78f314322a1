"""Causal attention over packed sequences against the formula in float64, sequence by sequence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from grpo_kit.kernels import choose_attention, pack
from grpo_kit.kernels.attention import causal_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8
CPU = choose_attention(None, torch.float64)
CASES = {
    "ragged, two buckets": [([1, 2], [3, 4, 5]), ([6], [7]), ([8, 9, 1], [2, 3])],
    "a shared prompt": [([1, 2, 3], [4, 5]), ([1, 2, 3], [6]), ([1, 2, 3], [7, 8, 9])],
    "a block": [([1, 2], [3]), ([4], [5, 6])],
    "one": [([1, 2, 3], [4, 5, 6, 7])],
}


def by_formula(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One sequence: q [S, heads, D], k and v [S, kv_heads, D]."""
    length, heads, _ = q.shape
    out = torch.zeros_like(q)
    for head in range(heads):
        group = head // (heads // k.shape[1])
        scores = q[:, head] @ k[:, group].T * scale
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        out[:, head] = scores.softmax(-1) @ v[:, group]
    return out


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    packed = pack(CASES[name])
    g = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(len(packed), heads, WIDTH, generator=g, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    upstream = torch.randn(len(packed), HEADS, WIDTH, generator=g, dtype=torch.float64)
    out = causal_attention(*inputs, packed, 0.3, CPU)
    expected = torch.zeros_like(out)
    for row, mask in zip(packed.rows.flip(0), packed.mask.flip(0), strict=True):
        tokens = row[mask.bool()]
        expected = expected.index_put((tokens,), by_formula(*(x[tokens] for x in inputs), 0.3))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12)
    ours = torch.autograd.grad(out, inputs, upstream)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_what_the_hardware_has() -> None:
    """float16 on a T4 has neither flash nor cuDNN's attention, and no kernel that holds all scores is ever chosen."""
    assert choose_attention((7, 5), torch.float16).backends == (SDPBackend.EFFICIENT_ATTENTION,)
    assert choose_attention((8, 0), torch.bfloat16).backends == (SDPBackend.FLASH_ATTENTION,)
    assert choose_attention((9, 0), torch.bfloat16).backends[0] == SDPBackend.CUDNN_ATTENTION
    assert not choose_attention((9, 0), torch.float32).grouped
    assert choose_attention(None, torch.float32).backends == ()
