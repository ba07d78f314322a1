"""LoRA written into vLLM's stacked tensors: each part in its place, at its scale, and nothing beyond its rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kit.model.lora import add_lora, lora_parameters
from grpo_kit.rollout.vllm import adapter
from tests.rollout.native.conftest import tiny
from tests.rollout.vllm.fakes import JOINED, FakeModel

RANK, ALPHA, PADDED = 4, 6, 8
PLACES = [
    ("self_attn.q_proj", "self_attn.qkv_proj", 0),
    ("self_attn.k_proj", "self_attn.qkv_proj", 1),
    ("self_attn.v_proj", "self_attn.qkv_proj", 2),
    ("self_attn.o_proj", "self_attn.o_proj", 0),
    ("mlp.gate_proj", "mlp.gate_up_proj", 0),
    ("mlp.up_proj", "mlp.gate_up_proj", 1),
    ("mlp.down_proj", "mlp.down_proj", 0),
]


def learned(module: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in lora_parameters(module).values():
        weight.data.copy_(torch.randn(weight.shape, generator=generator))


def made() -> tuple[Any, dict[str, Any]]:
    plain = tiny("qwen2")
    model = FakeModel(plain, rank=PADDED)
    stacked = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_a_stacked")}
    return add_lora(plain, RANK, ALPHA, seed=0), stacked


@pytest.mark.parametrize(("ours", "theirs", "part"), PLACES)
def test_each_part_of_the_adapter_is_where_vllm_looks_for_it(ours: str, theirs: str, part: int) -> None:
    module, stacked = made()
    learned(module, seed=1)
    adapter.write(adapter.pairs(module, stacked, JOINED))
    source, layer = module.get_base_model().model.layers[1].get_submodule(ours), stacked[f"model.layers.1.{theirs}"]
    a, b = layer.lora_a_stacked[part][0, 0], layer.lora_b_stacked[part][0, 0]
    torch.testing.assert_close(b @ a, source.get_delta_weight("default"))  # peft's own scale · B·A
    assert torch.count_nonzero(a[RANK:]) == torch.count_nonzero(b[:, RANK:]) == 0


def test_it_is_written_in_place_again_and_again() -> None:
    module, stacked = made()
    pairs = adapter.pairs(module, stacked, JOINED)
    places = [tensor.data_ptr() for layer in stacked.values() for tensor in layer.lora_a_stacked]
    for seed in (1, 2):
        learned(module, seed)
        adapter.write(pairs)
    weight = module.get_base_model().model.layers[0].mlp.up_proj.lora_A["default"].weight
    torch.testing.assert_close(stacked["model.layers.0.mlp.gate_up_proj"].lora_a_stacked[1][0, 0, :RANK], weight)
    assert places == [tensor.data_ptr() for layer in stacked.values() for tensor in layer.lora_a_stacked]
    assert not stacked["model.layers.0.mlp.gate_up_proj"].lora_a_stacked[1].requires_grad


def test_the_scale_is_applied_before_rounding() -> None:
    module, stacked = made()
    for layer in stacked.values():
        layer.lora_a_stacked = tuple(tensor.bfloat16() for tensor in layer.lora_a_stacked)
        layer.lora_b_stacked = tuple(tensor.bfloat16() for tensor in layer.lora_b_stacked)
    learned(module, seed=1)
    adapter.write(adapter.pairs(module, stacked, JOINED))
    weight = module.get_base_model().model.layers[0].mlp.down_proj.lora_B["default"].weight
    written = stacked["model.layers.0.mlp.down_proj"].lora_b_stacked[0][0, 0, :, :RANK]
    assert torch.equal(written, (weight * 1.5).bfloat16())


def test_a_layer_that_vllm_would_sample_without_its_adapter_is_an_error() -> None:
    module, stacked = made()
    del stacked["model.layers.0.mlp.down_proj"]
    with pytest.raises(ValueError, match=r"no LoRA for model\.layers\.0\.mlp\.down_proj"):
        adapter.pairs(module, stacked, JOINED)


def test_a_rank_beyond_the_stack_is_an_error() -> None:
    plain = tiny("llama")
    model = FakeModel(plain, rank=2)
    stacked = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_a_stacked")}
    with pytest.raises(ValueError, match="not rank 4"):
        adapter.pairs(add_lora(plain, RANK, ALPHA, seed=0), stacked, JOINED)


def test_a_disabled_adapter_is_seen() -> None:
    module, _ = made()
    assert adapter.is_on(module)
    with module.disable_adapter():
        assert not adapter.is_on(module)
    assert adapter.is_on(module)
