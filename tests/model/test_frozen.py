"""A 4-bit weight as it is read for training, against bitsandbytes' own function."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit

from grpo_kit.model.frozen import dense_weight


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_4_bit_weight_is_the_one_that_bitsandbytes_has(dtype: torch.dtype, kind: str, double_quant: bool) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    layer = Linear4bit(128, 96, bias=False, compute_dtype=torch.float32)
    layer.weight = Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=double_quant).to("cpu")
    state = layer.weight.quant_state
    assert state.nested is double_quant
    before = state.absmax.clone()
    dense = dense_weight(layer)
    assert dense.dtype == torch.float32 and torch.equal(dense, dequantize_4bit(layer.weight.data, state).float())
    assert torch.equal(state.absmax, before)
    assert (dense - weight).norm() < 0.2 * weight.norm()
