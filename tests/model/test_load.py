"""`load_model`: one model in memory, number formats, checkpoints quantized already, options that can't work."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import bitsandbytes
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PhiConfig

import grpo_kit as gk
from grpo_kit.model import Model
from grpo_kit.model.load import load_model
from grpo_kit.rollout import NativeEngine, examine

Tiny = Callable[..., Path]


def in_4bit(model: Model) -> set[str]:
    """The kinds of layers that hold 4-bit weights: "q_proj", "down_proj", …"""
    return {
        name.removesuffix(".base_layer").split(".")[-1]
        for name, layer in model.causal_lm.named_modules()
        if isinstance(layer, bitsandbytes.nn.Linear4bit)
    }


ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def letter_sum(completion: str) -> float:
    """Differs between any two answers of a random model, so that there is something to learn."""
    return sum(map(ord, completion)) / 1000


def two_steps(model: Model, folder: Path) -> None:
    """Train, and see that it can be: finite numbers, a changed adapter."""
    before = {name: weight.detach().clone() for name, weight in model.trainable().items()}
    run = gk.train(
        model,
        gk.data.arithmetic(2),
        letter_sum,
        run_dir=folder,
        steps=2,
        prompts_per_step=1,
        num_generations=2,
        max_completion_length=8,
        learning_rate=1e-3,
    )
    run.wait(timeout=120)
    assert run.state == "finished", run.error
    assert all(row["sampler_gap"] < 1e-3 for row in run.record.steps())
    assert any(not torch.equal(weight, before[name]) for name, weight in model.trainable().items())


def test_nf4_keeps_embeddings_and_head_and_trains(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    model = load_model(str(tiny_checkpoint(tie=False)), load_in_4bit=True, max_seq_length=96, lora_rank=4)
    assert in_4bit(model) == ALL
    assert model.causal_lm.get_output_embeddings().weight.dtype == torch.float32
    assert model.causal_lm.get_input_embeddings().weight.dtype == torch.float32
    assert ("quantization", "NF4, blocks of 64", "load_in_4bit") in model.notes
    two_steps(model, tmp_path / "run")


@pytest.mark.parametrize("skipped", [None, ["lm_head", "down_proj"]], ids=["all", "some layers kept in 16 bits"])
def test_a_checkpoint_that_is_quantized_already_is_taken_as_it_is(
    skipped: list[str] | None, tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    plan = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,  # the machine it was made on had bf16; this one has not
        llm_int8_skip_modules=skipped,
    )
    source, folder = tiny_checkpoint(tie=False), tmp_path / "quantized"
    quantized = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=plan, dtype=torch.float32, device_map={"": "cpu"}
    )
    quantized.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)

    model = load_model(str(folder), load_in_4bit=True, max_seq_length=96, lora_rank=4)
    assert in_4bit(model) == ALL - set(skipped or [])
    layers = [x for x in model.causal_lm.modules() if isinstance(x, bitsandbytes.nn.Linear4bit)]
    assert {layer.compute_dtype for layer in layers} == {torch.float32}
    assert ("quantization", "as in the checkpoint", "it is quantized already") in model.notes
    two_steps(model, tmp_path / "run")


def stored_bytes(model: Model) -> int:
    """Of the 4-bit layers: packed weights and what is needed to read them."""
    layers = [x.weight for x in model.causal_lm.modules() if isinstance(x, bitsandbytes.nn.Linear4bit)]
    scales = [state for x in layers for state in (x.quant_state, x.quant_state.state2) if state is not None]
    return sum(x.nbytes for x in layers) + sum(state.absmax.nbytes for state in scales)


def test_double_quantization_saves_what_its_note_says_and_trains(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    path = str(tiny_checkpoint(tie=False, **shape))
    plain = stored_bytes(load_model(path, max_seq_length=96, lora_rank=4))
    model = load_model(path, max_seq_length=96, lora_rank=4, double_quant=True)
    saved = plain - stored_bytes(model)
    # a block of 64 weights had a scale of 4 bytes; now of 1, with 4 more for each 256 blocks of a matrix
    blocks = [256, 128, 128, 256, 512, 512, 512]
    assert saved == 2 * sum(3 * n - 4 * -(-n // 256) for n in blocks)
    assert ("double quantization", f"{saved / 1e6:.1f} MB saved", "double_quant") in model.notes
    two_steps(model, tmp_path / "run")


def test_double_quantization_of_a_checkpoint_that_is_quantized_otherwise_is_refused(
    tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    source = tiny_checkpoint()
    for double in (False, True):
        plan = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
        AutoModelForCausalLM.from_pretrained(
            source, quantization_config=plan, dtype=torch.float32, device_map={"": "cpu"}
        ).save_pretrained(tmp_path / str(double))
        AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / str(double))
    with pytest.raises(ValueError, match="quantized already, without double quantization"):
        load_model(str(tmp_path / "False"), max_seq_length=64, double_quant=True)
    loaded = load_model(str(tmp_path / "True"), max_seq_length=64, double_quant=True)
    assert "double quantization" in {what for what, _, _ in loaded.notes}


def test_a_quantized_head_is_refused(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source, folder = tiny_checkpoint(tie=False), tmp_path / "quantized"
    plan = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["q_proj"])
    AutoModelForCausalLM.from_pretrained(
        source, quantization_config=plan, dtype=torch.float32, device_map={"": "cpu"}
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    with pytest.raises(ValueError, match="has a quantized output head"):
        load_model(str(folder), max_seq_length=64)


def test_a_head_with_a_bias_is_refused(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    config = PhiConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_checkpoint()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has a bias in its output head"):
        load_model(str(tmp_path), load_in_4bit=False, max_seq_length=64)


def test_the_same_call_returns_the_same_model_with_what_it_has_learned(
    tiny_checkpoint: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    with torch.no_grad():
        for weight in first.trainable().values():
            weight.fill_(0.5)
    again = load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    assert again is first
    assert all((weight == 0.5).all() for weight in again.trainable().values())
    assert "loaded already" in capsys.readouterr().out


def test_another_call_frees_the_first_model_and_its_object_says_so(tiny_checkpoint: Tiny) -> None:
    first = load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    first.generate("a", max_tokens=2)
    module, weight = weakref.ref(first.causal_lm), weakref.ref(first.causal_lm.get_input_embeddings().weight)
    second = load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=32, lora_rank=4)
    gc.collect()
    assert second is not first
    assert module() is None and weight() is None
    for use in (
        lambda: first.generate("a", max_tokens=2),
        lambda: first.generate("a", max_tokens=2, adapter=False),
        lambda: first.save_adapter("nowhere"),
        lambda: first.reset_adapter(),
        lambda: first.module,
    ):
        with pytest.raises(RuntimeError, match="was unloaded when another one was loaded; use the new one"):
            use()
    assert not Path("nowhere").exists()
    assert repr(first).endswith("unloaded>")
    assert isinstance(second.generate("a", max_tokens=2), str)


def test_a_live_run_is_stopped_before_its_model_is_freed(tiny_checkpoint: Tiny) -> None:
    first = load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    log: list[bool] = []
    first.stop_run = lambda: log.append(first.module is not None)
    load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=32, lora_rank=4)
    assert log == [True]


def test_a_call_that_cannot_work_leaves_the_loaded_model_alone(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    first = load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    with pytest.raises(FileNotFoundError):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"max_seq_length=513 is more than .* was made for \(512 tokens\)"):
        load_model(str(tiny_checkpoint()), max_seq_length=513)
    assert isinstance(first.generate("a", max_tokens=2), str)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("lora_rank", 0, "lora_rank must be a whole number of at least 1, got 0"),
        ("lora_rank", 2.5, "lora_rank must be a whole number"),
        ("lora_alpha", 0, "lora_alpha must be a whole number of at least 1, got 0"),
        ("max_seq_length", -1, "max_seq_length must be a whole number"),
        ("engine", "fastest", "unknown engine 'fastest'"),
        ("dtype", "fp4", "dtype must be one of"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(option: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_model("not/looked-for", **{option: value})


def test_double_quantization_without_4bit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs load_in_4bit=True"):
        load_model("not/looked-for", load_in_4bit=False, double_quant=True)


def test_what_was_derived_is_in_the_notes(tiny_checkpoint: Tiny) -> None:
    model = load_model(str(tiny_checkpoint(chat_template=None)), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    notes = {what: (value, reason) for what, value, reason in model.notes}
    assert notes["precision"][0] == "float32 on cpu"
    assert "no chat template" in notes["prompts"][1]
    assert notes["engine"][0] == "transformers"
    assert notes["adapter"][0].startswith("LoRA rank 4, ")
    for what in notes:
        assert what in repr(model)


def test_the_engine_that_was_asked_for_answers(tiny_checkpoint: Tiny) -> None:
    model = load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=64, lora_rank=4, engine="native")
    assert model.engine.name == "native" and ("engine", "native", "asked for") in model.notes
    assert isinstance(model.generate("a", max_tokens=3), str)
    assert isinstance(model.generate("a", max_tokens=3, adapter=False), str)


def test_a_cache_in_8_bits_is_the_native_engines(tiny_checkpoint: Tiny) -> None:
    own = {"load_in_4bit": False, "max_seq_length": 64, "lora_rank": 4, "kv_cache_dtype": "int8"}
    model = load_model(str(tiny_checkpoint()), **own)
    assert isinstance(model.engine, NativeEngine) and model.engine.shape.int8
    assert ("KV cache", "int8", "kv_cache_dtype") in model.notes
    assert isinstance(model.generate("a", max_tokens=3), str)
    assert model.memory_plan("T4", max_completion_length=32).options.kv_cache_dtype == "int8"
    model.use_engine("transformers", "to see")
    assert model.memory_plan("T4", max_completion_length=32).options.kv_cache_dtype is None
    model.use_engine("native", "again")
    assert isinstance(model.engine, NativeEngine) and model.engine.shape.int8
    with pytest.raises(ValueError, match="option of the native engine, and engine='transformers' was asked for"):
        load_model(str(tiny_checkpoint()), engine="transformers", **own)


def test_the_native_engine_tries_the_model_once(tiny_checkpoint: Tiny) -> None:
    passes: list[str] = []
    hook = register_module_forward_pre_hook(lambda module, _: passes.append(type(module).__name__))
    try:
        model = load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=48, lora_rank=4, engine="native")
        while_loading, passes[:] = passes.count("LlamaForCausalLM"), []
        examine(model.module)
    finally:
        hook.remove()
    assert while_loading == passes.count("LlamaForCausalLM") > 0


def test_bfloat16_on_request_has_a_float32_adapter(tiny_checkpoint: Tiny) -> None:
    model = load_model(
        str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=96, lora_rank=4, dtype="bfloat16", lora_alpha=8
    )
    assert model.causal_lm.get_input_embeddings().weight.dtype == torch.bfloat16
    assert {weight.dtype for weight in model.trainable().values()} == {torch.float32}
    assert model.module.peft_config["default"].lora_alpha == 8


def test_dropout_is_off_and_said_so(tiny_checkpoint: Tiny) -> None:
    model = load_model(str(tiny_checkpoint("llama", attention_dropout=0.25)), False, max_seq_length=64, lora_rank=4)
    assert model.causal_lm.config.attention_dropout == 0
    assert all(layer.self_attn.attention_dropout == 0 for layer in model.trunk.layers)
    assert [reason for what, _, reason in model.notes if what == "dropout"] != []
