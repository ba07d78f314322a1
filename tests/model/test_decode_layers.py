"""What the fused token step is handed: weights where they lie, LoRA in the compute format; and what it can't run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_kit.kernels.decode_linear import Nf4
from grpo_kit.model import load
from grpo_kit.model.decode_layers import fused_step, read_decoder, step_for, why_not_fused_step
from grpo_kit.model.frozen import dense_weight
from grpo_kit.model.precision import Precision
from grpo_kit.rollout.native.cache import SlotCache
from grpo_kit.rollout.native.support import examine
from tests.kernels.unfinished import nibbles_by_hand
from tests.rollout.native.conftest import WIDE, in_nf4, learn, tiny, wide
from tests.tiny import SHAPE

ON_GPU = Precision(torch.device("cuda"), torch.float16, "as if")
GROUPS = ("qkv", "out", "gate_up", "down")


def layers_of(module: Any) -> Any:
    return module.get_base_model().model.layers


@pytest.mark.parametrize("four_bit", [False, True])
def test_frozen_weights_are_not_copied(four_bit: bool) -> None:
    module = wide("llama", four_bit)
    weights = read_decoder(module)
    for layer, source in zip(weights.layers, layers_of(module), strict=True):
        attention, mlp = source.self_attn, source.mlp
        sources = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        sources += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        found = [weight for name in GROUPS for weight in getattr(layer, name).weights]
        for weight, linear in zip(found, (each.get_base_layer() for each in sources), strict=True):
            if not four_bit:
                assert weight.data_ptr() == linear.weight.data_ptr()
                continue
            assert isinstance(weight, Nf4)
            assert weight.words.data_ptr() == linear.weight.data_ptr()
            assert weight.absmax.data_ptr() == linear.weight.quant_state.absmax.data_ptr()
            assert torch.equal(weight.dense(), dense_weight(linear))
    base = module.get_base_model()
    assert weights.embedding.data_ptr() == weights.head.data_ptr() == base.lm_head.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in (weights.embedding, weights.head, weights.norm))


def test_layers_that_phi_has_as_one_are_one_with_one_adapter() -> None:
    module = wide("phi3", True)
    layer, source = read_decoder(module).layers[0], layers_of(module)[0]
    for group, linear in ((layer.qkv, source.self_attn.qkv_proj), (layer.gate_up, source.mlp.gate_up_proj)):
        (weight,) = group.weights
        assert isinstance(weight, Nf4) and weight.words.data_ptr() == linear.get_base_layer().weight.data_ptr()
        assert group.lora_a is not None and torch.equal(
            group.lora_a, nibbles_by_hand(linear.lora_A["default"].weight.detach())
        )
    assert layer.qkv.sizes == (64 + 32 + 32,) and layer.gate_up.sizes == (2 * 192,)


def test_what_gemma_adds() -> None:
    weights = read_decoder(tiny("gemma2", torch.float16, **WIDE))
    source = tiny("gemma2", torch.float16, **WIDE).model
    assert weights.zero_centered and weights.softcap == 50.0 and weights.logit_softcap == 30.0
    assert weights.activation == "gelu_tanh" and weights.scale == 8**-0.5  # its query_pre_attn_scalar is 8
    assert weights.embedding_scale is not None and weights.embedding_scale == torch.tensor(128**0.5).half()
    assert torch.equal(weights.embedding[7] * weights.embedding_scale, source.embed_tokens(torch.tensor(7)))
    third = read_decoder(tiny("gemma3", attn_logit_softcapping=50.0, **WIDE))
    assert third.softcap is None  # its modules make no use of it
    plain = read_decoder(tiny("llama", **WIDE))
    assert not plain.zero_centered and plain.softcap is plain.logit_softcap is plain.embedding_scale is None


def test_layers_turn_their_heads_by_their_own_angles() -> None:
    x, positions = torch.zeros(2, 128), torch.tensor([3, 40])
    gemma = read_decoder(tiny("gemma3", **WIDE, layer_types=["full_attention", "sliding_attention"]))
    angles = gemma.angles(x, positions)
    for layer, theta in zip(gemma.layers, (1e6, 1e4), strict=True):
        by = positions[:, None] / theta ** (torch.arange(0, 16, 2) / 16)
        cos, sin = angles[layer.turn]
        torch.testing.assert_close(cos[:, :8], by.cos(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sin[:, :8], by.sin(), rtol=1e-4, atol=1e-5)
    smol = read_decoder(tiny("smollm3", **WIDE))  # every second layer has none
    angles = smol.angles(x, positions)
    assert [angles[layer.turn][0].shape for layer in smol.layers] == [(2, 16), (2, 0)]


@torch.no_grad()
def test_gemma_3_inside_the_model_that_sees() -> None:
    """Its logits are not capped, whatever its text model's config says."""
    text = {**SHAPE, **WIDE, "query_pre_attn_scalar": 8, "vocab_size": 259, "final_logit_softcapping": 5.0}
    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config={**eye, "image_size": 28, "patch_size": 14})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert type(module).__name__ == "Gemma3ForConditionalGeneration"
    cache = SlotCache(examine(module), 1, 64)
    step = fused_step(module, cache)
    assert step is not None
    ids = torch.tensor([[5, 60, 200]])
    found = torch.stack([step(ids[:, k], torch.tensor([k]), 64)[0] for k in range(3)])
    torch.testing.assert_close(found, module(input_ids=ids).logits[0], rtol=1e-4, atol=1e-5)


def test_scales_that_are_quantized_too_are_made_dense() -> None:
    module = wide("llama", True, double_quant=True)
    down = layers_of(module)[1].mlp.down_proj.get_base_layer()
    assert down.weight.quant_state.nested
    found = read_decoder(module).layers[1].down.weights[0]
    assert isinstance(found, Nf4) and torch.equal(found.dense(), dense_weight(down))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lora_is_rounded_once_in_the_order_of_the_products(dtype: torch.dtype) -> None:
    module = wide("llama", dtype=dtype)
    weights = read_decoder(module)
    for _ in range(2):
        attention = layers_of(module)[0].self_attn
        sources = (attention.q_proj, attention.k_proj, attention.v_proj)
        a = torch.cat([each.lora_A["default"].weight.detach() for each in sources])
        b = torch.cat([each.lora_B["default"].weight.detach() for each in sources])
        assert a.dtype == torch.float32
        found = weights.layers[0].qkv
        assert found.lora_a is not None and found.lora_b is not None
        assert torch.equal(found.lora_a, nibbles_by_hand(a).to(dtype))
        assert torch.equal(found.lora_b, (b * 1.5).to(dtype))  # alpha 6 by rank 4
        with torch.no_grad():
            for weight in (each.lora_A["default"].weight for each in sources):
                weight.mul_(-0.7)
            learn(module)
        weights.refresh()


def test_a_bias_of_some_layers_is_zero_for_the_others() -> None:
    module = wide("llama")
    attention = layers_of(module)[0].self_attn
    attention.k_proj.get_base_layer().bias = None
    bias = read_decoder(module).layers[0].qkv.bias
    assert bias is not None
    q, k, v = bias.split((64, 32, 32))
    assert torch.equal(q, attention.q_proj.bias) and torch.equal(v, attention.v_proj.bias) and not k.any()


def test_without_an_adapter() -> None:
    layer = read_decoder(tiny("qwen3", **WIDE)).layers[0]
    assert all(getattr(layer, name).lora_a is getattr(layer, name).lora_b is None for name in GROUPS)
    assert layer.query_norm is not None and layer.qkv.bias is None


def fp4(module: Any) -> None:
    mlp = layers_of(module)[1].mlp
    mlp.up_proj.base_layer = in_nf4(torch.nn.Linear(128, 192, bias=False), kind="fp4")


def repacked(module: Any) -> None:
    layer = in_nf4(torch.nn.Linear(128, 192, bias=False))
    layer.weight.quant_state.packing_format_for_cpu = True
    layers_of(module)[1].mlp.up_proj.base_layer = layer


def other_ranks(module: Any) -> None:
    layers_of(module)[0].mlp.up_proj.lora_A["default"] = torch.nn.Linear(128, 8, bias=False)


def head_with_bias(module: Any) -> None:
    module.get_base_model().lm_head.bias = torch.nn.Parameter(torch.zeros(259))


def wide_norm(module: Any) -> None:
    layers_of(module)[0].input_layernorm.double()


def wide_weight(module: Any) -> None:
    layers_of(module)[0].mlp.down_proj.base_layer.double()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (fp4, "fp4 with blocks of 64, not in nf4"),
        (repacked, "repacked its weights for this CPU"),
        (other_ranks, "ranks differ"),
        (head_with_bias, "its output head is more than a matrix"),
        (wide_norm, r"mixes torch\.float32 with torch\.float64"),
        (wide_weight, r"mixes torch\.float32 with torch\.float64"),
    ],
)
def test_what_it_cannot_run_it_says(change: Callable[[Any], None], words: str) -> None:
    module = wide("llama")
    cache = SlotCache(examine(module), 2, 64)
    assert why_not_fused_step(module) is None and fused_step(module, cache) is not None
    change(module)
    found = why_not_fused_step(module)
    assert found is not None and re.search(words, found)
    assert fused_step(module, cache) is None


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        ("llama", {"hidden_size": 96}, "96 inputs, not a multiple of 64"),
        ("llama", {"intermediate_size": 96}, "96 inputs"),
        ("qwen3", {"num_attention_heads": 34}, "more than 16 of its heads share one of keys"),
        ("llama", {"head_dim": 12}, "heads of width 12"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu, not silu or"),
        ("gemma3", {"hidden_activation": "relu"}, "its activation is relu"),
    ],
)
def test_shapes_it_cannot_run(architecture: str, config: dict[str, Any], words: str) -> None:
    found = why_not_fused_step(tiny(architecture, **{**WIDE, **config}))
    assert found is not None and re.search(words, found)


def test_another_family_is_left_to_the_modules() -> None:
    config = transformers.Olmo2Config(**SHAPE, vocab_size=99)
    found = why_not_fused_step(transformers.AutoModelForCausalLM.from_config(config))
    assert found == "Olmo2DecoderLayer is run as transformers has it"


def test_float64_is_left_to_the_modules() -> None:
    assert why_not_fused_step(wide("llama", dtype=torch.float64)) == "it computes in torch.float64"


def test_on_a_gpu_the_native_engine_has_it_and_says_so() -> None:
    notes: list[tuple[str, str, str]] = []
    module = wide("mistral", dtype=torch.float16)
    make = step_for("native", module, ON_GPU, notes)
    assert make is not None and make(SlotCache(examine(module), 2, 128)) is not None
    assert step_for("transformers", module, ON_GPU, notes) is None
    head_with_bias(module)
    assert step_for("native", module, ON_GPU, notes) is None
    assert [note[:2] for note in notes] == [("token step", "fused"), ("token step", "by transformers' modules")]
    assert "its output head is more than a matrix" in notes[1][2]


def test_a_loaded_model_has_a_note_of_it(tiny_checkpoint: Callable[..., Path]) -> None:
    model = load.load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=32, lora_rank=4, engine="native")
    note = ("token step", "by transformers' modules", "the fused one is for a GPU")
    assert note in model.notes and model.engine.fused is None  # type: ignore[attr-defined]
    before = len(model.notes)
    model.use_engine("transformers", "to see")
    model.use_engine("native", "again")
    assert [new[0] for new in model.notes[before:]] == ["engine now", "engine now", "token step"]
