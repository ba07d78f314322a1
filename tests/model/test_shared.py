"""The trainer's model on vLLM's weights: the same storage, and the numbers of the checkpoint quantized by itself."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from grpo_kit.model.frozen import dense_weight
from grpo_kit.model.lora import add_lora, lora_parameters
from grpo_kit.model.precision import Precision
from grpo_kit.model.shared import build_on
from grpo_kit.model.trunk import why_not_fused
from grpo_kit.model.with_vllm import FAMILIES
from grpo_kit.rollout.vllm import SharedWeights
from tests.rollout.native.conftest import FUSED, WIDE, tiny
from tests.rollout.vllm.fakes import JOINED, FakeModel

CPU = Precision(torch.device("cpu"), torch.float32, "for a test")
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = [(family, tied) for family in FAMILIES for tied in (True, False)]


def source(family: str, tied: bool = True, **config: Any) -> Any:
    """A model whose norms and biases are not those of a fresh one."""
    made = tiny(family, **{**WIDE, **FUSED[family], "tie_word_embeddings": tied, **config})
    generator = torch.Generator().manual_seed(1)
    for name, weight in made.named_parameters():
        if name.endswith(("norm.weight", ".bias")):
            weight.data.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    return made


def as_quantized(made: Any) -> Any:
    """A copy whose linear layers went through 4 bits, one by one."""
    dense = copy.deepcopy(made)
    for name, module in dense.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = bnb.dequantize_4bit(*bnb.quantize_4bit(module.weight.data, quant_type="nf4"))
    return dense


def shared(made: Any, four_bit: bool = True) -> tuple[Any, FakeModel]:
    theirs = FakeModel(made, four_bit=four_bit, rank=8)
    ours = build_on(SharedWeights(theirs, JOINED), made.config, CPU).eval()
    for layer in ours.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
    return ours, theirs


def storages(*tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def quantization_states(model: nn.Module) -> list[Any]:
    return [s for w in model.parameters() for s in getattr(w, "bnb_quant_state", {}).values()]


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_the_weights_are_those_of_the_checkpoint_and_exist_once(family: str, tied: bool) -> None:
    made = source(family, tied)
    ours, theirs = shared(made)
    expected = dict(as_quantized(made).named_modules())
    linears = {name: module for name, module in ours.named_modules() if isinstance(module, Linear4bit)}
    assert len(linears) == 7 * made.config.num_hidden_layers
    for name, module in linears.items():
        assert torch.equal(dense_weight(module), expected[name].weight), name
    scales = storages(*(module.weight.quant_state.absmax for module in linears.values()))
    assert scales == storages(*(state.absmax for state in quantization_states(theirs)))
    assert storages(*ours.parameters()) <= storages(*theirs.parameters())
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is tied


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_it_computes_what_the_checkpoint_computes(family: str, tied: bool) -> None:
    made = source(family, tied)
    ours, _ = shared(made)
    ids = torch.tensor([[7, 1, 250, 33, 9]])
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, as_quantized(made)(input_ids=ids).logits)


def test_16_bit_weights_are_views_by_rows() -> None:
    made = source("qwen2")
    ours, theirs = shared(made, four_bit=False)
    ids = torch.tensor([[7, 1, 250, 33, 9]])
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, made(input_ids=ids).logits)
    assert type(ours.model.layers[0].self_attn.k_proj) is nn.Linear
    assert storages(*ours.parameters()) <= storages(*theirs.parameters())


def test_scaled_rotary_frequencies_are_computed() -> None:
    made = source("llama", rope_scaling={**ROPE, "original_max_position_embeddings": 64, "rope_theta": 10000.0})
    ours, _ = shared(made)
    assert torch.equal(ours.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)
    assert torch.equal(ours.model.rotary_emb.original_inv_freq, made.model.rotary_emb.original_inv_freq)


def test_the_trainers_own_layers_take_it_and_only_the_adapter_learns() -> None:
    ours, _ = shared(source("qwen2"))
    assert why_not_fused(ours.model, 64) is None
    adapted = add_lora(ours, 4, 4, seed=0)
    assert type(ours.model.layers[0].mlp.up_proj).__module__.endswith("lora.bnb")  # peft saw that it is quantized
    ids = torch.tensor([[7, 1, 250, 33, 9]])
    adapted(input_ids=ids, labels=ids).loss.backward()
    learning = {name for name, weight in adapted.named_parameters() if weight.grad is not None}
    assert learning == lora_parameters(adapted).keys()
    assert any(weight.grad.count_nonzero() for weight in lora_parameters(adapted).values() if weight.grad is not None)


def test_a_layout_that_is_not_known_is_an_error() -> None:
    made = source("llama")
    theirs = FakeModel(made)
    del theirs.model.norm  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"vLLM has no model\.norm\.weight.*engine='native'"):
        build_on(SharedWeights(theirs, JOINED), made.config, CPU)


def test_a_weight_of_another_shape_is_an_error() -> None:
    made = source("llama")
    theirs = FakeModel(made)
    norm: Any = theirs.get_submodule("model.norm")
    norm.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"is \(3,\) in torch.float32, transformers' \(128,\)"):
        build_on(SharedWeights(theirs, JOINED), made.config, CPU)


def test_a_packed_weight_of_another_shape_is_an_error() -> None:
    made = source("llama")
    theirs = FakeModel(made)
    weight: Any = theirs.get_parameter("model.layers.0.mlp.down_proj.weight")
    weight.bnb_quant_state[0].shape = torch.Size([3, 4])
    with pytest.raises(ValueError, match=r"the 4-bit weight of model\.layers\.0\.mlp\.down_proj is \(3, 4\)"):
        build_on(SharedWeights(theirs, JOINED), made.config, CPU)
