"""The memory plan: each part against what is really allocated or a count by hand, and the search for settings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import bitsandbytes
import pandas
import pytest
import torch
from transformers import BitsAndBytesConfig, DynamicCache, Gemma3Config

import grpo_kit as gk
from grpo_kit.kernels.linear_logprob import CHUNK_BYTES
from grpo_kit.model import load_model
from grpo_kit.model import memory_plan as memory_plan_function
from grpo_kit.model.gpus import GPUS, Gpu, find_gpu
from grpo_kit.model.memory_parts import (
    CUDA_CONTEXT,
    MLP_TILE,
    OPTIMIZERS,
    MicroBatch,
    PlanOptions,
    attention_backward,
    head_backward,
    held_by_sampler,
    kv_cache,
    last_token,
    layer_backward,
    lora,
    micro_batch,
    mlp_backward,
    optimizer_state,
    prefill,
    rollout_parts,
    saved_on_gpu,
    update_parts,
    weights,
)
from grpo_kit.model.memory_plan import MemoryPlan, best_token_budget, memory_plan, offload_pays
from grpo_kit.model.memory_search import BUDGETS
from grpo_kit.model.shape import Shape, read_shape
from grpo_kit.training import optimizers
from grpo_kit.training.options import TrainOptions
from tests.model.test_shape import real, small

Tiny = Callable[..., Path]
HAND = Shape("llama", 5, 10, 30, heads=4, kv_heads=2, head_dim=3, vocab=100, tied=True, qkv_bias=False)
QWEN = real("Qwen2.5-7B")


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- parts that can be allocated here ----


@pytest.mark.parametrize("double_quant", [False, True])
def test_weights_and_adapter_take_what_a_loaded_model_holds(tiny_checkpoint: Tiny, double_quant: bool) -> None:
    folder = str(tiny_checkpoint(tie=False))
    model = load_model(folder, lora_rank=4, max_seq_length=96, double_quant=double_quant)
    options = PlanOptions(lora_rank=4, dtype="float32", double_quant=double_quant)
    linear, others = [], []
    for name, parameter in model.causal_lm.named_parameters():
        if isinstance(parameter, bitsandbytes.nn.Params4bit):
            state = parameter.quant_state
            linear += [parameter, state.absmax, *([state.state2.absmax] if double_quant else [])]
        elif ".lora_" not in name:
            others.append(parameter)
    shape = read_shape(model.causal_lm.config)
    assert weights(shape, options) == {
        "linear layers": bytes_of(linear),
        "embeddings, head, norms": bytes_of(others),
    }
    assert lora(shape, options) == bytes_of(list(model.trainable().values()))


def test_weights_that_are_not_4_bit_take_two_bytes_each() -> None:
    shape = read_shape(QWEN)
    assert sum(weights(shape, PlanOptions(load_in_4bit=False)).values()) == 2 * 7_615_616_512


def test_modules_that_a_checkpoint_left_in_16_bits_are_counted_so() -> None:
    shape = replace(HAND, in_16_bits=("mlp.down_proj",))
    more = weights(shape, PlanOptions())["linear layers"] - weights(HAND, PlanOptions())["linear layers"]
    assert more == 5 * (2 * 300 - (150 + 4 * 5)), "5 layers of 300 weights: 150 bytes and 5 scales in 4 bits"


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_the_optimizers_state_is_what_a_step_makes(optim: str) -> None:
    shape = read_shape(small("llama", hidden_size=300, intermediate_size=601))
    options = PlanOptions(optim=optim, lora_rank=8)
    tensors = {str(i): torch.nn.Parameter(torch.ones(n)) for i, n in enumerate(shape.lora_tensors(8))}
    optimizer = optimizers.make_optimizer(optim, tensors, 1e-3, 0.0)
    for tensor in tensors.values():
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    kept = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
    state = [value for of in optimizer.state.values() for key, value in of.items() if key in kept]
    assert optimizer_state(shape, options) == (bytes_of(state), 0)


def test_paged_optimizers_keep_large_tensors_with_the_host() -> None:
    """Of rank 32 in Qwen2.5-7B, all but B of k and v (512 × 32) and A where a layer is narrow have 100,000 elements."""
    shape, options = read_shape(QWEN), PlanOptions(optim="paged_adamw_32bit")
    sizes = shape.lora_tensors(32)
    on_gpu = 8 * sum(size for size in sizes if size < 100_000)
    assert on_gpu == 8 * 28 * 2 * 512 * 32
    assert optimizer_state(shape, options) == (on_gpu, 8 * sum(sizes) - on_gpu)


def test_the_cache_takes_what_transformers_makes(tiny_checkpoint: Tiny) -> None:
    model = load_model(str(tiny_checkpoint("qwen3")), load_in_4bit=False, max_seq_length=96).causal_lm
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.ones(3, 7, dtype=torch.int64), past_key_values=cache, use_cache=True)
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert kv_cache(read_shape(model.config), PlanOptions(dtype="float32"), 3, 7) == bytes_of(held)


def test_a_token_of_llama_8b_takes_128_kib_of_cache() -> None:
    assert kv_cache(read_shape(real("Llama-3.1-8B")), PlanOptions(), 1, 1) == 128 * 1024


# ---- parts that only a GPU makes: by hand ----
# HAND: H = 10, I = 30, Q = 12, K = 6, 5 layers; 16-bit numbers


def options(**more: Any) -> PlanOptions:
    """2 prompts of 20 tokens with 3 answers of 8: 88 tokens a step, 50 at once."""
    own = {"prompts_per_step": 2, "num_generations": 3, "max_seq_length": 28, "max_completion_length": 8}
    return PlanOptions(**{**own, "tokens_per_micro_batch": 50, "lora_rank": 2, **more})


def test_one_layers_backward_by_hand() -> None:
    alone = options(tokens_per_micro_batch=28)
    assert attention_backward(HAND, alone) == 28 * (2 * (50 + 36 + 24) + 4 * 12)
    # one group's 3 answers are 84 long with a prompt each; short answers to the other prompt fill the batch up to 50
    assert attention_backward(HAND, options()) == 50 * (2 * (50 + 24 + 12) + 4 * 12) + 84 * (2 * (48 + 24) + 4 * 12)
    assert mlp_backward(HAND, options()) == 2 * (50 * (40 + 24 + 12) + 50 * (10 + 90) + 300)
    assert mlp_backward(HAND, options(load_in_4bit=False)) == 2 * (50 * 76 + 50 * 100)
    many = options(tokens_per_micro_batch=9000, max_seq_length=2000, prompts_per_step=5)
    assert mlp_backward(HAND, many) == 2 * (8064 * 76 + MLP_TILE * 100 + 900), "a fifth prompt would be beyond 9,000"


def test_the_head_by_hand() -> None:
    tile = CHUNK_BYTES * 3 // 2  # float32 logits and their 16-bit gradient
    assert head_backward(HAND, options()) == tile + 4 * 24 * 10 + 2 * 2 * 50 * 10 + 2 * 2 * 24 * 10
    assert head_backward(HAND, options(algorithm="ppo")) - head_backward(HAND, options()) == 4 * 24 * 10


def test_the_rollouts_work_by_hand() -> None:
    assert prefill(HAND, options()) == 40 * (12 * 30 + 10 * 10) + 2 * 300 + 40 * 20 * 3
    draw, attention, weight = 6 * 100 * 26, 2 * 12 * 2 * 6 * 28, 2 * 10 * 30
    assert last_token(HAND, options()) == max(draw, attention, weight) == draw
    assert last_token(replace(HAND, vocab=10), options()) == attention
    one_head_each = replace(HAND, vocab=10, kv_heads=4)
    assert last_token(one_head_each, options()) == 12 * 2 * 6 * 28, "half of a layer's cache"


def test_layer_inputs_stay_or_wait_with_the_host() -> None:
    assert saved_on_gpu(HAND, options()) == 5 * 50 * 10 * 2
    assert saved_on_gpu(HAND, options(activation_offloading=True)) == 4 * 50 * 10 * 2
    plan = memory_plan(QWEN, "T4", activation_offloading=True, tokens_per_micro_batch=4096)
    assert plan.offloaded == 28 * 4096 * 3584 * 2
    assert memory_plan(QWEN, "T4", activation_offloading=False).offloaded == 0


def test_tokens_of_a_micro_batch() -> None:
    assert options().step_tokens == 88
    assert options(max_prompt_length=4).sequence == 12
    assert micro_batch(HAND, options()) == MicroBatch(50, 84, 24)
    assert micro_batch(HAND, options(tokens_per_micro_batch=1000)) == MicroBatch(88, 6 * 28, 48), "a step has no more"
    assert micro_batch(HAND, options(tokens_per_micro_batch=5)) == MicroBatch(28, 28, 8), "a sequence is not cut"


def test_answers_shorter_than_they_may_be_fill_a_micro_batch_up() -> None:
    """Two of 768 behind a prompt of 512 make 2,048 tokens, though only one of 1,024 would fit."""
    own: dict[str, Any] = {"max_seq_length": 1536, "max_completion_length": 1024, "tokens_per_micro_batch": 2048}
    assert micro_batch(HAND, PlanOptions(**own)) == MicroBatch(2048, 2048 + 512, 1536)


def test_a_padded_micro_batch_has_a_prompt_for_each_sequence() -> None:
    own: dict[str, Any] = {"max_seq_length": 1000, "max_completion_length": 100, "prompts_per_step": 1}
    padded = replace(HAND, family="gemma2")
    assert micro_batch(padded, PlanOptions(tokens_per_micro_batch=8192, **own)) == MicroBatch(8000, 8000, 800)
    assert micro_batch(padded, PlanOptions(tokens_per_micro_batch=10, **own)) == MicroBatch(1000, 1000, 100)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_pair_is_never_parted(family: str) -> None:
    own: dict[str, Any] = {"max_seq_length": 1280, "max_completion_length": 1024, "tokens_per_micro_batch": 1024}
    pair = micro_batch(replace(HAND, family=family), PlanOptions(algorithm="online_dpo", **own))
    assert pair == (MicroBatch(256 + 2048, 2560, 2048) if family == "llama" else MicroBatch(2560, 2560, 2048))
    assert memory_plan(QWEN, 8, algorithm="online_dpo", **own).suggestions[0].changes.keys() != {
        "tokens_per_micro_batch"
    }, "smaller micro-batches would not be smaller"


def test_a_phase_has_the_parts_of_its_fullest_moment() -> None:
    adapter = lora(HAND, options())
    head = head_backward(HAND, options())
    assert update_parts(HAND, options()) == {"gradients": adapter, "layer inputs": 5000, "the head": head}
    at_once = update_parts(HAND, options(tokens_per_micro_batch=88))
    assert at_once["gradients"] == 0, "the first micro-batch has none yet"
    wide = read_shape(QWEN)
    ranked = PlanOptions(tokens_per_micro_batch=16384, activation_offloading=True, lora_rank=256)
    late = update_parts(wide, ranked)
    assert micro_batch(wide, ranked).tokens == ranked.step_tokens and "layer inputs" not in late
    assert late["gradients"] == lora(wide, ranked), "its own at the end"
    reading = options(prompts_per_step=50, max_prompt_length=19, max_completion_length=1, num_generations=2)
    assert set(rollout_parts(HAND, reading)) == {"KV cache", "reading the prompts"}
    assert rollout_parts(HAND, reading)["KV cache"] == kv_cache(HAND, reading, 50, 19)


def test_what_the_native_sampler_holds_by_hand() -> None:
    """6 sequences of 28 tokens take 8 slots of 64 columns; 6 numbers a layer for keys and for values."""
    slot = 2 * 5 * 6 * 2 * 64
    held = held_by_sampler(HAND, options(), 2 * 8 * slot)
    assert held == {
        "KV cache": 8 * slot,
        "LoRA to sample with": lora(HAND, options()) // 2,
        "a token step": 8 * 100 * (2 + 16) + 2 * 300,
    }
    assert held_by_sampler(HAND, options(), 2 * 8 * slot - 2)["KV cache"] == 4 * slot, "as many as find room"
    plan = memory_plan(QWEN, "T4")
    assert "KV cache" in plan.phases["rollout"] and "KV cache" not in plan.phases["update"]
    assert "goes if that needs the room" in repr(plan)
    assert plan.phases["update"] == memory_plan(QWEN, "T4", engine="transformers").phases["update"]


def test_a_cache_in_8_bits_is_half_as_large_or_has_twice_the_slots() -> None:
    """6 numbers of a byte and 2 scales of 4 bytes, for keys and for values of each layer."""
    assert kv_cache(HAND, options(kv_cache_dtype="int8"), 3, 7) == 2 * 5 * (6 + 2 * 4) * 3 * 7
    plans = [memory_plan(QWEN, 17, kv_cache_dtype=asked, prompts_per_step=64) for asked in (None, "int8")]
    plain, int8 = (plan.phases["rollout"]["KV cache"] for plan in plans)
    per_slot = 2 * 28 * 512 * 2 * 1024
    assert int8 // (per_slot * 66 // 128) == 2 * (plain // per_slot) > 2
    assert "native, its KV cache in int8" in repr(plans[1]) and "int8" not in repr(plans[0])
    with pytest.raises(ValueError, match="option of the native engine"):
        memory_plan(QWEN, "T4", kv_cache_dtype="int8", engine="transformers")


# ---- the card ----


def test_cards_by_name_by_size_and_at_hand() -> None:
    assert find_gpu("T4") == Gpu("T4", round(14.56 * 2**30))
    assert find_gpu("NVIDIA A100-80GB").name == find_gpu("a100 80").name == "A100 80GB"
    assert find_gpu("A100").name == "A100 40GB"
    assert find_gpu("rtx4090").name == "RTX 4090"
    assert {find_gpu(name).name for name in GPUS} == set(GPUS)
    assert find_gpu(16).total == 16_000_000_000
    with pytest.raises(ValueError, match="unknown gpu 'T5'; there are T4, P100"):
        find_gpu("T5")
    for wrong in (0, -1, True):
        with pytest.raises(ValueError, match="gigabytes above 0"):
            find_gpu(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_card_one_must_be_named() -> None:
    with pytest.raises(ValueError, match="no GPU here, and a memory plan is for one: name it by gpu="):
        memory_plan(QWEN)


def test_the_token_budget_is_the_largest_that_leaves_a_tenth() -> None:
    shape = read_shape(QWEN)
    own: dict[str, Any] = {"max_seq_length": 1000, "max_completion_length": 100, "prompts_per_step": 50}
    for size in (10, 12, 16):
        gpu = find_gpu(size)
        sums = {}
        for budget in BUDGETS:
            plan = memory_plan(QWEN, size, activation_offloading=False, tokens_per_micro_batch=budget, **own)
            sums[budget] = sum(plan.phases["update"].values())
        fitting = [budget for budget in BUDGETS if sums[budget] <= 0.9 * gpu.total]
        assert 0 < len(fitting) < len(BUDGETS)
        assert best_token_budget(shape, gpu, PlanOptions(activation_offloading=False, **own)) == max(fitting)
    assert best_token_budget(shape, find_gpu(5), PlanOptions(**own)) == BUDGETS[0]


def test_layer_inputs_go_to_the_host_when_the_update_would_fill_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, options = read_shape(QWEN), PlanOptions(tokens_per_micro_batch=8192)
    update = sum(
        memory_plan(QWEN, 80, tokens_per_micro_batch=8192, activation_offloading=False).phases["update"].values()
    )
    assert offload_pays(shape, Gpu("wide", int(update / 0.59)), options) is False
    narrow = Gpu("narrow", int(update / 0.61))
    assert offload_pays(shape, narrow, options) is True
    inputs = 28 * 8192 * 3584 * 2
    module = importlib.import_module("grpo_kit.model.memory_plan")  # the package has the function by this name
    for free, pays in ((2 * inputs + 2, True), (2 * inputs - 2, False)):
        monkeypatch.setattr(module, "_host_memory", lambda free=free: free)
        assert offload_pays(shape, replace(narrow, at_hand=True), options) is pays


def test_what_was_left_open_is_derived_and_what_was_set_is_kept() -> None:
    plan = memory_plan(QWEN, "T4")
    assert plan.options.tokens_per_micro_batch == best_token_budget(plan.shape, plan.gpu, PlanOptions())
    assert plan.options.activation_offloading is offload_pays(plan.shape, plan.gpu, plan.options)
    kept = memory_plan(QWEN, "T4", tokens_per_micro_batch=1234, activation_offloading=False)
    assert (kept.options.tokens_per_micro_batch, kept.options.activation_offloading) == (1234, False)


# ---- the plan ----


def test_defaults_are_those_of_load_model_and_train() -> None:
    load = {name: parameter.default for name, parameter in inspect.signature(load_model).parameters.items()}
    train = {field.name: field.default for field in fields(TrainOptions)}
    own = {field.name: field.default for field in fields(PlanOptions)}
    theirs = {**load, **train}
    assert {name: theirs[name] for name in own if name in theirs} == {n: v for n, v in own.items() if n in theirs}
    assert set(own) - set(theirs) <= {"max_prompt_length", "activation_offloading"}
    assert set(OPTIMIZERS) == set(optimizers.OPTIMIZERS)


def test_frame_total_and_free_add_up() -> None:
    plan = memory_plan(QWEN, "T4")
    sums = plan.frame().groupby("phase")["gigabytes"].sum()
    assert list(plan.frame().columns) == ["phase", "part", "gigabytes"]
    assert set(sums.index) == {"rollout", "update"}
    assert sums.max() * 1e9 == pytest.approx(plan.total)
    assert plan.free == plan.gpu.total - plan.total
    assert plan.fits
    assert plan.suggestions == []
    assert all(parts["CUDA context"] == CUDA_CONTEXT for parts in plan.phases.values())


def test_a_plan_is_compared_without_what_torch_does_not_see() -> None:
    plan = memory_plan(QWEN, "T4")
    rollout = sum(plan.phases["rollout"].values()) - CUDA_CONTEXT
    frame = plan.compare({"rollout": rollout / 2, "update": None}).set_index("phase")
    assert frame.loc["rollout", "ratio"] == pytest.approx(2)
    assert frame.loc["rollout", "planned"] == pytest.approx(rollout / 1e9)
    assert pandas.isna(frame.loc["update", "measured"])


LARGE: dict[str, Any] = {"tokens_per_micro_batch": 32_768, "activation_offloading": False}
GROWING: dict[str, Any] = {"engine": "transformers"}  # its cache is as large as the answers are; native's as may be
SIXTEEN: dict[str, Any] = {"load_in_4bit": False}
TOO_MUCH: dict[str, tuple[float, dict[str, Any]]] = {
    "rollout": (15.6, {"max_seq_length": 8192, "max_completion_length": 2048, **GROWING}),
    "update": (12, {"max_seq_length": 2048, "max_completion_length": 1792, "prompts_per_step": 2, **LARGE}),
    "16 bits": (15.6, SIXTEEN),
    "both": (15.6, {**GROWING, "max_seq_length": 16_384, "max_completion_length": 8192, "lora_rank": 256, **SIXTEEN}),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_suggestions_fit_and_none_of_them_is_needless(case: str) -> None:
    size, asked = TOO_MUCH[case]
    plan = memory_plan(QWEN, size, **asked)
    assert not plan.fits
    settings: dict[str, Any] = {}
    for suggestion in plan.suggestions:
        settings |= suggestion.changes
        again = memory_plan(QWEN, size, **{**asked, **settings})
        assert (suggestion.settings, suggestion.total, suggestion.fits) == (settings, again.total, again.fits)
    assert [suggestion.fits for suggestion in plan.suggestions] == [False] * (len(plan.suggestions) - 1) + [True]
    for left_out in plan.suggestions:
        others = {n: v for s in plan.suggestions if s is not left_out for n, v in s.changes.items()}
        if "load_in_4bit" not in left_out.changes:
            assert not memory_plan(QWEN, size, **{**asked, **others}).fits


def test_the_mildest_change_that_is_enough_is_taken() -> None:
    def changed(case: str) -> list[str]:
        size, asked = TOO_MUCH[case]
        return [name for suggestion in memory_plan(QWEN, size, **asked).suggestions for name in suggestion.changes]

    assert changed("rollout") == ["prompts_per_step"]
    assert changed("update") == ["tokens_per_micro_batch"]
    assert changed("16 bits") == ["load_in_4bit"]
    almost = memory_plan(QWEN, 9.4, tokens_per_micro_batch=2048)
    assert [suggestion.changes for suggestion in almost.suggestions] == [{"optim": "adamw_8bit"}]


def test_shorter_answers_keep_prompts_as_long() -> None:
    own: dict[str, Any] = {"prompts_per_step": 1, "num_generations": 2, "optim": "adamw_8bit", "double_quant": True}
    plan = memory_plan(QWEN, 10, max_seq_length=40_000, max_completion_length=32_000, **GROWING, **own)
    last = plan.suggestions[-1]
    assert last.fits
    assert last.changes["max_seq_length"] - last.changes["max_completion_length"] == 8000


def test_a_card_that_is_too_small_is_told() -> None:
    plan = memory_plan(QWEN, 4)
    assert not plan.suggestions[-1].fits
    assert "This card is too small for the model." in repr(plan)


def test_a_quantized_checkpoint_is_taken_as_it_is() -> None:
    config = real("Qwen2.5-7B")
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True).to_dict()
    plan = memory_plan(config, 8, load_in_4bit=False)
    assert plan.phases == memory_plan(QWEN, 8, double_quant=True).phases
    assert ("quantization", "as in the checkpoint", "it is quantized already") in plan.notes
    config.quantization_config["bnb_4bit_use_double_quant"] = False
    with pytest.raises(ValueError, match="quantized already, without double quantization"):
        memory_plan(config, 8, double_quant=True)
    assert all("double_quant" not in s.changes for s in memory_plan(config, 6).suggestions)


def test_options_that_cannot_work_are_refused() -> None:
    for wrong, words in (
        ({"optim": "sgd"}, "optim must be one of adamw_torch"),
        ({"dtype": "float8"}, "dtype must be one of None, float32"),
        ({"lora_rank": 0}, "lora_rank must be a whole number of at least 1, got 0"),
        ({"max_completion_length": 1024}, "max_seq_length=1024 does not hold a prompt of 1 and a completion of 1024"),
        ({"max_prompt_length": 900}, "does not hold a prompt of 900 and a completion of 256"),
        ({"double_quant": True, "load_in_4bit": False}, "needs load_in_4bit=True"),
        ({"max_completion_lenght": 9}, "did you mean 'max_completion_length'?"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            memory_plan(QWEN, "T4", **wrong)


def test_a_folder_is_read_without_loading_it(tmp_path: Path) -> None:
    QWEN.save_pretrained(tmp_path)
    plan = gk.memory_plan(str(tmp_path), gpu="L4", num_generations=4)
    assert isinstance(plan, MemoryPlan)
    assert plan.phases == memory_plan(QWEN, gpu="L4", num_generations=4).phases
    assert gk.memory_plan is memory_plan_function


def test_the_text_says_whether_it_fits_and_for_what() -> None:
    text = repr(memory_plan(QWEN, "T4"))
    assert re.match(r"Memory plan for Qwen2.5-7B on T4 \(15.6 GB\): fits, \d+\.\d GB to spare\n", text)
    assert re.search(r"\nembeddings, head, norms +2\.18 +2\.18\n", text)
    assert "4 prompts × 8 answers  (of up to 768 and 256 tokens: 11,264 together)" in text
    assert re.search(r"activation_offloading +on  \(2\.3 GB of layer inputs wait in the host's memory\)", text)
    assert "rough" not in text
    assert re.search(
        r"optimizer +paged  \(0\.6 GB of its state", repr(memory_plan(QWEN, "T4", optim="paged_adamw_32bit"))
    )
    sees = Gemma3Config(text_config=small("gemma3_text").to_dict())
    assert "weights                 language model only" in repr(memory_plan(sees, "T4"))
    too_much = repr(memory_plan(QWEN, "T4", **TOO_MUCH["rollout"][1]))
    assert re.search(r"does not fit, \d+\.\d GB too much", too_much)
    assert re.search(r"\d+\.\d GB  prompts_per_step=\d  \(fits\)$", too_much)
    assert "rough  (this family trains through transformers' own layers" in repr(memory_plan(small("phi3"), "T4"))


def test_capped_attention_scores_are_held_whole() -> None:
    """Gemma 2's, which the fused attention can't cap: for every token and head, one of 4 bytes and four of 2 each."""
    options = PlanOptions(max_seq_length=512, tokens_per_micro_batch=1024)
    capped, free = (read_shape(small("gemma2", attn_logit_softcapping=cap)) for cap in (50.0, None))
    assert layer_backward(capped, options) - layer_backward(free, options) == 1024 * 512 * 4 * 12
