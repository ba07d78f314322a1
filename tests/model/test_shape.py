"""`read_shape`: against published parameter counts, against the modules themselves, and what it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.functional import quantize_4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

from grpo_kit.model.lora import add_lora, lora_parameters
from grpo_kit.model.shape import FUSED, PLAIN, nf4_bytes, read_shape

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied; and the parameters as published.
REAL: dict[str, tuple[str, tuple[int, int, int, int, int, int, bool], int]] = {
    "Llama-3.1-8B": ("LlamaConfig", (4096, 14336, 32, 32, 8, 128256, False), 8_030_261_248),
    "Llama-3.2-3B": ("LlamaConfig", (3072, 8192, 28, 24, 8, 128256, True), 3_212_749_824),
    "Mistral-7B-v0.1": ("MistralConfig", (4096, 14336, 32, 32, 8, 32000, False), 7_241_732_096),
    "Qwen2.5-0.5B": ("Qwen2Config", (896, 4864, 24, 14, 2, 151936, True), 494_032_768),
    "Qwen2.5-1.5B": ("Qwen2Config", (1536, 8960, 28, 12, 2, 151936, True), 1_543_714_304),
    "Qwen2.5-3B": ("Qwen2Config", (2048, 11008, 36, 16, 2, 151936, True), 3_085_938_688),
    "Qwen2.5-7B": ("Qwen2Config", (3584, 18944, 28, 28, 4, 152064, False), 7_615_616_512),
    "Qwen2.5-14B": ("Qwen2Config", (5120, 13824, 48, 40, 8, 152064, False), 14_770_033_664),
    "Qwen3-8B": ("Qwen3Config", (4096, 12288, 36, 32, 8, 151936, False), 8_190_735_360),
}
CONFIGS = {
    "cohere": "CohereConfig",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "glm4": "Glm4Config",
    "granite": "GraniteConfig",
    "llama": "LlamaConfig",
    "ministral": "MinistralConfig",
    "mistral": "MistralConfig",
    "olmo2": "Olmo2Config",
    "phi3": "Phi3Config",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "smollm3": "SmolLM3Config",
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def real(name: str) -> PreTrainedConfig:
    kind, (hidden, intermediate, layers, heads, kv_heads, vocab, tied), _ = REAL[name]
    config: PreTrainedConfig = getattr(transformers, kind)(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        name_or_path=name,
    )
    return config


def small(family: str, **more: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    other = {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": 64}
    config: PreTrainedConfig = getattr(transformers, CONFIGS[family])(**{**sizes, **other, **IDS, **more})
    return config


def built(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", REAL)
def test_real_models_have_as_many_parameters_as_published(name: str) -> None:
    shape = read_shape(real(name))
    assert shape.layers * shape.linear_weights + shape.other_weights == REAL[name][2]


@pytest.mark.parametrize("family", CONFIGS)
def test_linear_layers_are_those_of_the_module(family: str) -> None:
    assert set(CONFIGS) == set(FUSED + PLAIN)
    config = small(family)
    model, shape = built(config), read_shape(config)
    layer = model.get_decoder().layers[0]
    linear = {name: tuple(m.weight.shape) for name, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    assert shape.linears == linear
    rest = sum(p.numel() for p in model.parameters()) - shape.layers * shape.linear_weights
    assert shape.other_weights == pytest.approx(rest, abs=0 if shape.fused else 200 * shape.layers)


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_lora_tensors_are_those_of_the_adapter(family: str) -> None:
    config = small(family)
    adapted = add_lora(AutoModelForCausalLM.from_config(config), rank=4, alpha=4, seed=0)
    sizes = sorted(parameter.numel() for parameter in lora_parameters(adapted).values())
    assert sorted(read_shape(config).lora_tensors(4)) == sizes


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("size", [(96, 160), (31, 33)])
def test_4_bit_weights_take_what_bitsandbytes_makes_of_them(size: tuple[int, int], double_quant: bool) -> None:
    made = quantize_4bit(torch.ones(size), blocksize=64, quant_type="nf4", compress_statistics=double_quant)
    packed, state = made
    tensors = [packed, state.absmax, *([state.state2.absmax] if double_quant else [])]
    assert nf4_bytes(size[0] * size[1], double_quant) == sum(t.numel() * t.element_size() for t in tensors)


def test_a_model_that_also_sees_has_the_shape_of_its_language_model() -> None:
    text = small("gemma3_text")
    shape = read_shape(transformers.Gemma3Config(text_config=text.to_dict()))
    assert shape == read_shape(text)


def test_a_quantized_checkpoint_says_what_it_left_in_16_bits() -> None:
    config = small("llama")
    assert read_shape(config).in_16_bits is None
    left = ["lm_head", "model.layers.1.self_attn", "mlp.down_proj"]
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=left).to_dict()
    shape = read_shape(config)
    attention, mlp = [64 * 32, 32 * 32, 32 * 32, 64 * 32], [96 * 32] * 2
    down = [32 * 96]
    assert shape.linear_tensors == (attention + mlp + mlp, down + attention + down)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="mixtral is a mixture of experts"):
        read_shape(transformers.MixtralConfig())
    with pytest.raises(ValueError, match="does not know how the family 'gpt2' is built; it knows cohere, gemma"):
        read_shape(transformers.GPT2Config())
    config = small("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ValueError, match="quantized by 'gptq'"):
        read_shape(config)
