"""`decode_linear`: the twin, the way over dense weights and the Triton kernel against float64 and bitsandbytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor

from grpo_kit.kernels.decode_linear import DecodeGroup, Nf4, decode_linear, multiply_dense
from grpo_kit.kernels.decode_parts import Parts, nibble_order
from tests.kernels.launching import launch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALONE = ((72,), 192)  # outputs that fill no tile; K an odd number of blocks
SHAPES = [ALONE, ((130, 16, 48), 64), ((64, 65), 320)]  # with a matrix below a tile, and one just above


def quantized(outputs: int, inner: int, seed: int) -> tuple[Nf4, Tensor]:
    """Random weights as bitsandbytes packs them, and what it says they are, [N, K] in float32."""
    weight = torch.randn(outputs, inner, generator=torch.Generator().manual_seed(seed))
    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    nf4 = Nf4(packed.flatten().view(torch.int16).view(outputs, inner // 4), state.absmax.view(outputs, inner // 64))
    return nf4, dequantize_4bit(packed, state)


def given(
    sizes: tuple[int, ...], inner: int, rows: int, rank: int, dtype: torch.dtype
) -> tuple[Tensor, DecodeGroup, Tensor]:
    """x [B, K] and its group, both in nibble order, and the sums [B, N + n·r] in float64 of what they hold."""
    g = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, inner, generator=g) / inner**0.5).to(dtype)
    weights = [quantized(size, inner, seed) for seed, size in enumerate(sizes)]
    lora_a = torch.randn(len(sizes) * rank, inner, generator=g).to(dtype)
    lora_b = torch.randn(sum(sizes), rank, generator=g).to(dtype)
    bias = torch.randn(sum(sizes), generator=g).to(dtype)
    lora = (nibble_order(lora_a), lora_b) if rank else (None, None)
    group = DecodeGroup(tuple(nf4 for nf4, _ in weights), *lora, bias)
    both = torch.cat([*(dense for _, dense in weights), lora_a.float()])
    return nibble_order(x), group, x.double() @ both.double().T


def assert_sums(got: Parts, group: DecodeGroup, exact: Tensor, unit: float) -> None:
    """The sums are of about 1: their error is that of rounding weights or products to a relative `unit`."""
    assert (got.sizes, got.lora_b, got.bias) == (group.sizes, group.lora_b, group.bias)
    torch.testing.assert_close(got.sums.double().sum(0), exact, rtol=unit, atol=unit)
