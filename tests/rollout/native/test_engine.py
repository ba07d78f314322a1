"""The native engine against the transformers engine, which it must equal token by token, and what is its own."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from peft import PeftModel

from grpo_kit.model.lora import add_lora
from grpo_kit.rollout import Completion, NativeEngine, Sampling, TransformersEngine
from grpo_kit.rollout.native.module_step import ModuleStep
from tests.rollout.native.conftest import VOCABULARY, assert_released, tiny
from tests.tiny import ARCHITECTURES

NEVER = 300  # an end id outside the vocabulary: completions run to max_tokens
ENDS = tuple(range(0, 250, 12))  # about 8 in 100 tokens end an answer
PROMPTS = [[5, 60, 200], list(range(30, 51)), [7], [9, 9, 120, 4, 4, 70]]  # ragged; one is longer than the window of 16

Load = Callable[..., Any]


def spell(ids: list[int]) -> str:
    """One letter a token."""
    return "".join(chr(ord("a") + i % 26) for i in ids)


def both(module: Any, eos_ids: tuple[int, ...] = (NEVER,), ahead: int = 1, slots: int | None = None, columns: int = 64):
    """The native engine, with room for `slots` slots only, and the transformers engine."""
    native = NativeEngine(module, eos_ids=eos_ids, decode=spell)
    native.steps_ahead = ahead
    if slots is not None:
        native.cache_bytes = native.shape.bytes_for(slots * columns)
    return native, TransformersEngine(module, eos_ids=eos_ids, decode=spell)


def tokens_of(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in groups for completion in group]


def assert_same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    assert [len(group) for group in found] == [len(group) for group in expected]
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "smollm3"])
def test_greedy_equals_the_transformers_engine(architecture: str, load: Load) -> None:
    native, plain = both(load(architecture))
    sampling = Sampling(max_tokens=24, temperature=0.0)
    assert_same(native.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"temperature": 1.4, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_seed_draws_the_same_tokens(options: dict[str, Any], ahead: int, load: Load) -> None:
    native, plain = both(load("llama", torch.float64), ENDS, ahead)
    sampling = Sampling(max_tokens=30, seed=3, **options)
    found = native.generate(PROMPTS, sampling, n=3)
    assert_same(found, plain.generate(PROMPTS, sampling, n=3))
    assert tokens_of(found) != tokens_of(native.generate(PROMPTS, Sampling(max_tokens=30, seed=4, **options), n=3)) or (
        options.get("temperature") == 0
    )


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_more_completions_than_slots(architecture: str, ahead: int, slots: int, load: Load) -> None:
    """Groups of 5 in 2 or 4 slots: prompts whose completions start at different times, refills, smaller buckets."""
    module = load(architecture, torch.float64)
    native, plain = both(module, ENDS, ahead, slots)
    sampling = Sampling(max_tokens=30, seed=2, repetition_penalty=1.1)
    prefilled: list[int] = []

    def count(_: Any, args: Any, inputs: dict[str, Any]) -> None:
        if isinstance(inputs.get("attention_mask"), torch.Tensor) and inputs["attention_mask"].dim() == 2:
            prefilled.append(len(inputs["input_ids"]))

    hook = module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        found = native.generate(PROMPTS, sampling, n=5)
    finally:
        hook.remove()
    assert sum(prefilled) == len(PROMPTS)  # each prompt once
    assert native._idle[0].cache.slots == slots
    assert_same(found, plain.generate(PROMPTS, sampling, n=5))


def test_buckets_shrink_as_rows_end(load: Load) -> None:
    native, plain = both(load("qwen3", torch.float64), ENDS)
    buckets: list[int] = []

    class Recorded(ModuleStep):
        def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
            assert positions.max() < length
            buckets.append(len(tokens))
            return super().__call__(tokens, positions, length)

    native.fused = partial(Recorded, native.module)
    sampling = Sampling(max_tokens=60, seed=5)
    assert_same(native.generate(PROMPTS, sampling, n=6), plain.generate(PROMPTS, sampling, n=6))
    assert buckets[0] == 32 and buckets == sorted(buckets, reverse=True) and len(set(buckets)) > 3


def test_long_rows_cross_the_steps_of_length(load: Load) -> None:
    native, plain = both(load("mistral", torch.float64))
    prompts = [[3] * 250, [4, 5]]
    sampling = Sampling(max_tokens=12, seed=1)
    assert_same(native.generate(prompts, sampling, n=2), plain.generate(prompts, sampling, n=2))


def test_a_prompt_that_fills_the_context_but_for_one_token(load: Load) -> None:
    native, plain = both(load("llama", torch.float64))
    prompts = [[(i * 7) % 250 for i in range(511)], [1]]
    sampling = Sampling(max_tokens=1, seed=1)
    assert_same(native.generate(prompts, sampling, n=2), plain.generate(prompts, sampling, n=2))
    exactly = [[(i * 7) % 250 for i in range(504)]]
    sampling = Sampling(max_tokens=8, seed=1)  # 512 = 8 · 64 columns, none to spare
    assert_same(native.generate(exactly, sampling, n=3), plain.generate(exactly, sampling, n=3))


def test_a_prompt_alone_draws_what_it_draws_in_a_batch(load: Load) -> None:
    native, _ = both(load("gemma3", torch.float64))
    sampling = Sampling(max_tokens=20, seed=4)
    together = native.generate(PROMPTS, sampling, n=2)
    assert tokens_of(together[:1]) == tokens_of(native.generate(PROMPTS[:1], sampling, n=2))


def assert_drawn_from(tokens: list[int], expected: torch.Tensor) -> None:
    """Pearson's χ² over the tokens expected at least 5 times; the bound is its mean and five standard deviations."""
    wanted = expected.double() * len(tokens)
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    common = wanted >= 5
    freedom = int(common.sum()) - 1
    assert freedom > 20
    statistic = ((counts[common] - wanted[common]) ** 2 / wanted[common]).sum()
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@torch.no_grad()
def test_frequencies_follow_the_models_probabilities(load: Load) -> None:
    """Of the first token, which comes from the prefill, and of the second, which comes from a token step."""
    module, prompt, temperature = load("llama"), [5, 60, 200], 1.5
    native, _ = both(module)
    drawn = tokens_of(native.generate([prompt], Sampling(max_tokens=2, temperature=temperature, seed=11), n=4000))
    everything = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
    shares = (module(input_ids=everything).logits[:, -2:] / temperature).softmax(-1)  # after the prompt; after a token
    assert_drawn_from([first for first, _ in drawn], shares[0, 0])
    assert_drawn_from([second for _, second in drawn], shares[0, 0] @ shares[:, 1])


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stop_string_ends_an_answer_where_it_is_complete(ahead: int, load: Load) -> None:
    native, plain = both(load("llama", torch.float64), (NEVER,), ahead, slots=4)
    sampling = Sampling(max_tokens=40, seed=3)
    stops = tuple(
        completion.text[place : place + 2]
        for completion in plain.generate(PROMPTS, sampling, n=1)[0]
        for place in (5, 20)
    )
    stopped = Sampling(max_tokens=40, seed=3, stop=(*stops, "x"))
    found = native.generate(PROMPTS, stopped, n=3)
    assert_same(found, plain.generate(PROMPTS, stopped, n=3))
    assert "stop" in {completion.finish_reason for group in found for completion in group}


@pytest.fixture
def adapted() -> PeftModel:
    module = add_lora(tiny("llama", torch.float64), rank=4, alpha=8, seed=0)
    return module


def test_it_samples_with_the_adapter_of_the_moment(adapted: PeftModel) -> None:
    native, plain = both(adapted)
    sampling = Sampling(max_tokens=12, seed=1)
    fresh = native.generate(PROMPTS, sampling, n=2)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    native.adapter_changed()
    learned = native.generate(PROMPTS, sampling, n=2)
    assert_same(learned, plain.generate(PROMPTS, sampling, n=2))
    assert tokens_of(learned) != tokens_of(fresh)
    with adapted.disable_adapter():
        assert tokens_of(native.generate(PROMPTS, sampling, n=2)) == tokens_of(fresh)
    assert tokens_of(native.generate(PROMPTS, sampling, n=2)) == tokens_of(learned)


def test_what_a_graph_captured_with_the_adapter_is_not_replayed_without(adapted: PeftModel) -> None:
    native, _ = both(adapted)
    native.generate(PROMPTS, Sampling(max_tokens=2))
    first = native._idle[0]
    with adapted.disable_adapter():
        native.generate(PROMPTS, Sampling(max_tokens=2))
    native.generate(PROMPTS, Sampling(max_tokens=2))
    assert len(native._idle) == 2 and first in native._idle and native._idle[0].key != native._idle[1].key


class Stopped(Exception):
    """What a run raises between tokens."""


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_exception_between_tokens_passes_through_and_the_engine_works_on(ahead: int, load: Load) -> None:
    native, _ = both(load("mistral"), (NEVER,), ahead, slots=4)
    sampling, calls = Sampling(max_tokens=12, seed=1), []
    expected = native.generate(PROMPTS, sampling, n=2)

    def third_time() -> None:
        calls.append(torch.is_grad_enabled())
        if len(calls) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        native.generate(PROMPTS, sampling, n=2, between_tokens=third_time)
    assert len(calls) == 3
    assert torch.is_grad_enabled()
    assert native.generate(PROMPTS, sampling, n=2) == expected
    assert len(native._idle) == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_between_tokens_is_called_once_a_token_step(ahead: int, load: Load) -> None:
    native, _ = both(load("llama"), (NEVER,), ahead)
    calls: list[int] = []
    native.generate(PROMPTS, Sampling(max_tokens=5), n=3, between_tokens=lambda: calls.append(1))
    assert len(calls) == 4  # nothing comes between the last token and the return
    native.generate(PROMPTS, Sampling(max_tokens=1), n=3, between_tokens=lambda: calls.append(1))
    assert len(calls) == 4


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_question_asked_while_another_call_samples(ahead: int, load: Load) -> None:
    native, _ = both(load("gemma3"), ENDS, ahead)
    outer, inner = Sampling(max_tokens=20, seed=1), Sampling(max_tokens=9, seed=2, temperature=0.5, top_k=9)
    expected, expected_answer = native.generate(PROMPTS, outer, n=3), native.generate([[8, 8, 9]], inner)
    answers = []
    found = native.generate(
        PROMPTS, outer, n=3, between_tokens=lambda: answers.append(native.generate([[8, 8, 9]], inner))
    )
    assert found == expected
    assert answers and all(answer == expected_answer for answer in answers)


def test_a_session_is_used_again_where_it_fits(load: Load) -> None:
    native, _ = both(load("llama"))
    made: list[tuple[int, int]] = []

    def fused(cache: Any) -> None:
        made.append((cache.slots, cache.columns))

    native.fused = fused
    for prompts, tokens in ((PROMPTS, 20), (PROMPTS, 30), (PROMPTS[:1], 5), (PROMPTS, 100), (PROMPTS, 20)):
        native.generate(prompts, Sampling(max_tokens=tokens), n=2)
    assert made == [(8, 64), (8, 128)]
    assert len(native._idle) == 1  # the shorter one was of no more use


@pytest.mark.parametrize("slots", [4, None])
def test_rollouts_and_the_questions_between_their_tokens_each_keep_a_session(slots: int | None, load: Load) -> None:
    """Also where memory holds fewer slots than a rollout asks for."""
    native, _ = both(load("llama"), slots=slots, columns=64)
    made: list[tuple[int, int]] = []

    def fused(cache: Any) -> None:
        made.append((cache.slots, cache.columns))

    native.fused = fused
    if slots:
        native.cache_bytes = native.shape.bytes_for(5 * 64)  # four slots for the rollout, and one
    for _ in range(3):
        asked = iter([True] + [False] * 100)
        native.generate(
            PROMPTS, Sampling(max_tokens=12), n=2,
            between_tokens=lambda asked=asked: next(asked) and native.generate([[8, 9]], Sampling(max_tokens=3)),
        )  # fmt: skip
    assert made == [(slots or 8, 64), (1, 64)]


def test_sessions_of_weights_that_moved_go(load: Load) -> None:
    module = add_lora(tiny("llama"), rank=4, alpha=8, seed=0)
    native, _ = both(module)
    native.generate(PROMPTS, Sampling(max_tokens=4))
    weight = next(weight for name, weight in module.named_parameters() if ".lora_A." in name)
    weight.data = weight.data.clone()
    native.generate(PROMPTS, Sampling(max_tokens=4))
    assert len(native._idle) == 1


def test_a_step_is_refreshed_at_the_start_of_each_call_and_made_anew_without_the_adapter(load: Load) -> None:
    module = add_lora(tiny("llama"), rank=4, alpha=8, seed=0)
    native, _ = both(module)
    happened: list[str] = []

    class Recorded(ModuleStep):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            happened.append("made")

        def refresh(self) -> None:
            happened.append("refreshed")

    native.fused = partial(Recorded, module)
    for _ in range(2):
        native.generate(PROMPTS, Sampling(max_tokens=4))
    with module.disable_adapter():
        native.generate(PROMPTS, Sampling(max_tokens=4))
    native.generate(PROMPTS, Sampling(max_tokens=4))
    assert happened == ["made", "refreshed", "refreshed", "made", "refreshed", "refreshed"]


def test_release_gives_everything_back_and_sampling_works_on(load: Load) -> None:
    native, _ = both(load("llama"))
    sampling = Sampling(max_tokens=6, seed=1)
    native.acquire()
    expected = native.generate(PROMPTS, sampling, n=2)
    held = [weakref.ref(tensor) for tensor in native._idle[0].cache.keys]
    assert all(tensor() is not None for tensor in held)
    assert_released(native, held)
    assert native._idle == [] and native._taken_bytes == 0
    assert native.generate(PROMPTS, sampling, n=2) == expected


def test_memory_for_not_even_one_completion_is_an_error_in_words(load: Load) -> None:
    native, _ = both(load("llama"), slots=1, columns=64)
    native.generate([[5]], Sampling(max_tokens=63))
    with pytest.raises(ValueError, match=r"one completion of up to 128 tokens takes 0\.0 MB.*lower the length"):
        native.generate([[5]], Sampling(max_tokens=64))
    assert len(native.generate([[5]], Sampling(max_tokens=4))[0][0].token_ids) == 4


def test_running_out_of_memory_releases_everything_and_says_so(load: Load) -> None:
    native, plain = both(load("llama"))
    caches: list[Any] = []

    class TooLarge(ModuleStep):
        def __call__(self, *_: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def fused(cache: Any) -> ModuleStep:
        caches.append(weakref.ref(cache))
        return TooLarge(native.module, cache)

    native.fused = fused
    with pytest.raises(torch.OutOfMemoryError, match=r"to sample 8 completions .* need less \(CUDA out of memory"):
        native.generate(PROMPTS, Sampling(max_tokens=6), n=2)
    assert native._idle == [] and native._taken_bytes == 0 and caches[0]() is None
    native.fused = None
    sampling = Sampling(max_tokens=6, seed=1)
    assert_same(native.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling))


def test_no_completions_are_an_error(load: Load) -> None:
    for engine in both(load("llama")):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            engine.generate(PROMPTS, Sampling(max_tokens=5), n=0)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_empty_prompts_are_an_error(prompts: list[list[int]], load: Load) -> None:
    with pytest.raises(ValueError, match="at least one prompt, and every prompt at least one token"):
        both(load("llama"))[0].generate(prompts, Sampling(max_tokens=5))
