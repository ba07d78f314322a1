"""The fused token step against transformers' modules, in logits and in the tokens that the engine draws."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from torch import Tensor

from grpo_kit.model.decode_layers import fused_step
from grpo_kit.rollout import NativeEngine, Sampling, TransformersEngine
from grpo_kit.rollout.native.cache import SlotCache
from grpo_kit.rollout.native.fused_step import FusedStep
from grpo_kit.rollout.native.module_step import ModuleStep
from grpo_kit.rollout.native.prefill import prefill
from grpo_kit.rollout.native.support import examine
from tests.rollout.native.conftest import FUSED, assert_released, learn, wide

ROWS = [[5, 60, 200], list(range(30, 70)), [7, 8], [9, 9, 120, 4, 4, 70]]


def made(module: PeftModel, cache: SlotCache) -> FusedStep:
    step = fused_step(module, cache)
    assert step is not None
    return step


def filled(module: PeftModel, columns: int = 128) -> SlotCache:
    """Eight slots; the first four hold ROWS but for their last tokens, and beyond them what must not be seen."""
    cache = SlotCache(examine(module), 8, columns)
    for own in (*cache.keys, *cache.values):
        own.fill_(1e3)
    for slot, row in enumerate(ROWS):
        before = prefill(module, [row[:-1]])[0]
        cache.write(torch.tensor([slot], device=cache.shape.device), before.keys, before.values)
    return cache


def two_steps(step: Any, length: int, device: str = "cpu") -> Tensor:
    """The logits [2, 4, V] after each row's last token and after one more."""
    positions = torch.tensor([len(row) - 1 for row in ROWS], device=device)
    last = torch.tensor([row[-1] for row in ROWS], device=device)
    return torch.stack([step(last, positions, length), step(last + 1, positions + 1, length)])


def assert_close(found: Tensor, expected: Tensor, close: float = 1e-4) -> None:
    assert (found.double() - expected.double()).norm() <= close * expected.double().norm()


@torch.no_grad()
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("architecture", FUSED)
def test_logits_and_cache_are_those_of_the_modules(architecture: str, four_bit: bool) -> None:
    module = wide(architecture, four_bit)
    for length in (64, 128):
        ours, theirs = filled(module), filled(module)
        assert_close(two_steps(made(module, ours), length), two_steps(ModuleStep(module, theirs), length))
        for found, expected in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("with_adapter", [True, False])
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("architecture", FUSED)
def test_logits_are_those_of_a_plain_forward_pass(architecture: str, four_bit: bool, with_adapter: bool) -> None:
    module = wide(architecture, four_bit)
    with nullcontext() if with_adapter else module.disable_adapter():
        steps = [ROWS, [[*row, row[-1] + 1] for row in ROWS]]
        expected = [
            torch.stack([module(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows])
            for rows in steps
        ]
        assert_close(two_steps(made(module, filled(module)), 128), torch.stack(expected), 1e-5)


def assert_as_exact_as_the_modules(architecture: str, four_bit: bool, dtype: torch.dtype, device: str) -> None:
    """Both round to 16 bits at places of their own; what is exact is the same model in float64.

    The adapter is small beside the model, as trained ones are: peft multiplies by it in float32, the step in 16 bits.
    """
    module = wide(architecture, four_bit, dtype=dtype, device=device, learned=0.05)
    exact_module = in_float64(module, wide(architecture, dtype=torch.float64, device=device))
    exact = two_steps(ModuleStep(exact_module, filled(exact_module)), 128, device)
    plain = two_steps(ModuleStep(module, filled(module)), 128, device)
    fused = two_steps(made(module, filled(module)), 128, device)
    assert fused.dtype == plain.dtype == dtype
    rounding = (plain.double() - exact).norm()
    assert rounding <= 10 * torch.finfo(dtype).eps * exact.norm()
    assert (fused.double() - exact).norm() <= 2 * rounding


def in_float64(source: PeftModel, target: PeftModel) -> PeftModel:
    """`target` with the weights of `source`, 4-bit ones as their values times their scales."""
    weights = dict(target.named_parameters())
    for name, weight in source.named_parameters():
        state = getattr(weight, "quant_state", None)
        exact = weight if state is None else dequantize_4bit(weight.data, state_in_float32(state))
        weights[name].copy_(exact)
    return target


def state_in_float32(state: Any) -> Any:
    state = copy(state)
    state.dtype = torch.float32
    return state


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma3", "phi3"])
def test_16_bits_are_as_exact_as_the_modules(architecture: str, four_bit: bool, dtype: torch.dtype) -> None:
    assert_as_exact_as_the_modules(architecture, four_bit, dtype, "cpu")


@torch.no_grad()
@pytest.mark.parametrize("options", [{"double_quant": True}, {"tie_word_embeddings": False}], ids=str)
def test_scales_quantized_too_and_a_head_of_its_own(options: dict[str, Any]) -> None:
    module = wide("llama", True, **options)
    expected = two_steps(ModuleStep(module, filled(module)), 128)
    assert_close(two_steps(made(module, filled(module)), 128), expected)


@torch.no_grad()
@pytest.mark.parametrize("four_bit", [False, True])
def test_a_switched_off_adapter_is_not_seen(four_bit: bool) -> None:
    module = wide("qwen3", four_bit)
    with_adapter = two_steps(made(module, filled(module)), 128)
    with module.disable_adapter():
        expected = two_steps(ModuleStep(module, filled(module)), 128)
        assert_close(two_steps(made(module, filled(module)), 128), expected)
    assert (with_adapter - expected).norm() > 0.1 * expected.norm()


@torch.no_grad()
def test_what_was_trained_is_seen_after_a_refresh_in_the_same_tensors() -> None:
    module = wide("llama", learned=0)
    cache = filled(module)
    step = made(module, cache)
    fresh = two_steps(step, 128)
    groups = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in step.weights.layers]
    held = [tensor for each in groups for group in each for tensor in (group.lora_a, group.lora_b)]
    places = [tensor.data_ptr() for tensor in held if tensor is not None]
    learn(module)
    assert torch.equal(two_steps(step, 128), fresh)
    step.refresh()
    assert [tensor.data_ptr() for tensor in held if tensor is not None] == places and len(places) == 16
    again = filled(module)
    for own, new in zip((*cache.keys, *cache.values), (*again.keys, *again.values), strict=True):
        own.copy_(new)  # the prompts' too
    assert_close(two_steps(step, 128), two_steps(ModuleStep(module, again), 128))


ENDS = tuple(range(0, 250, 25))


def engines(module: PeftModel) -> tuple[NativeEngine, TransformersEngine]:
    options: Any = {"eos_ids": ENDS, "decode": str}
    return NativeEngine(module, fused=partial(fused_step, module), **options), TransformersEngine(module, **options)


def drawn(engine: Any, sampling: Sampling, n: int = 1) -> list[list[int]]:
    return [one.token_ids for group in engine.generate(ROWS, sampling, n) for one in group]


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("architecture", FUSED)
def test_the_engine_draws_what_the_plain_one_draws(architecture: str, four_bit: bool) -> None:
    native, plain = engines(wide(architecture, four_bit))
    greedy, sampled = Sampling(max_tokens=40, temperature=0.0), Sampling(max_tokens=24, seed=3)
    assert drawn(native, greedy) == drawn(plain, greedy)
    assert isinstance(native._idle[0].step, FusedStep)
    assert drawn(native, sampled, 3) == drawn(plain, sampled, 3)


@pytest.mark.parametrize("architecture", FUSED)
def test_greedy_answers_are_those_of_transformers_own_loop(architecture: str) -> None:
    module = wide(architecture)
    native, _ = engines(module)
    found = drawn(native, Sampling(max_tokens=40, temperature=0.0))
    for row, tokens in zip(ROWS, found, strict=True):
        ids = torch.tensor([row])
        whole = module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=list(ENDS),
        )
        assert whole[0, len(row) :].tolist() == tokens


def test_the_engine_samples_with_the_adapter_of_the_moment() -> None:
    module = wide("llama", learned=0)
    native, plain = engines(module)
    greedy = Sampling(max_tokens=24, temperature=0.0)
    fresh = drawn(native, greedy)
    learn(module)
    learned = drawn(native, greedy)
    assert learned == drawn(plain, greedy) != fresh
    with module.disable_adapter():
        assert drawn(native, greedy) == fresh
    assert drawn(native, greedy) == learned
    assert len(native._idle) == 2  # one with the adapter, one without


def test_release_gives_its_tensors_back() -> None:
    native, _ = engines(wide("llama"))
    drawn(native, Sampling(max_tokens=4))
    step = native._idle[0].step
    assert isinstance(step, FusedStep)
    held = [weakref.ref(layer.qkv.lora_a) for layer in step.weights.layers if layer.qkv.lora_a is not None]
    del step
    assert len(held) == 2
    assert_released(native, held)
