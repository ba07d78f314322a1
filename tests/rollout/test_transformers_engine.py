"""The transformers engine on tiny models: what it samples, and what it says about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_kit.rollout import Completion, Sampling, TransformersEngine
from tests.tiny import ARCHITECTURES, tiny_tokenizer

NEVER = 300  # an end id outside the vocabulary: completions run to max_tokens
PROMPTS = [[5, 60, 200], list(range(30, 51)), [7], [9, 9, 120, 4, 4, 70]]  # ragged; one is longer than the window of 16
TOKENIZER = tiny_tokenizer()

Load = Callable[..., Any]


@pytest.fixture(scope="module")
def load(tiny_checkpoint: Callable[..., Path]) -> Load:
    """`load("llama")` → the model in float32, `load("llama", torch.float64)`; each loaded once."""
    loaded: dict[Any, Any] = {}

    def get(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
        if (architecture, dtype) not in loaded:
            extra = {"attn_implementation": "eager"} if architecture == "gemma2" else {}
            loaded[architecture, dtype] = AutoModelForCausalLM.from_pretrained(
                tiny_checkpoint(architecture), dtype=dtype, **extra
            ).eval()
        return loaded[architecture, dtype]

    return get


def engine_of(module: Any, eos_ids: tuple[int, ...] = (NEVER,), decode: Any = None) -> TransformersEngine:
    def plain(ids: list[int]) -> str:
        return str(TOKENIZER.decode(ids, skip_special_tokens=True))

    return TransformersEngine(module, eos_ids=eos_ids, decode=decode or plain)


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def tokens_of(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for completion in flat(groups)]


@torch.no_grad()
def teacher_forced(module: Any, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """Logprobs [T] of one sequence alone, without padding or cache."""
    logits = module(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0].float() / temperature
    chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return chosen[torch.arange(len(completion)), completion]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers_generate(architecture: str, load: Load) -> None:
    module = load(architecture)
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    expected = module.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=NEVER, pad_token_id=0
    )
    found = engine_of(module).generate(PROMPTS, Sampling(max_tokens=24, temperature=0.0))
    assert tokens_of(found) == expected[:, longest:].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_a_plain_forward_pass(architecture: str, temperature: float, load: Load) -> None:
    module = load(architecture)
    sampling = Sampling(max_tokens=20, temperature=temperature, top_p=0.9)
    for prompt, group in zip(PROMPTS, engine_of(module).generate(PROMPTS, sampling, n=2), strict=True):
        for completion in group:
            expected = teacher_forced(module, prompt, completion.token_ids, temperature)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


def test_the_same_seed_gives_the_same_completions_and_another_one_others(load: Load) -> None:
    engine = engine_of(load("llama"))
    first = engine.generate(PROMPTS, Sampling(max_tokens=10, seed=1), n=3)
    torch.rand(5)
    assert engine.generate(PROMPTS, Sampling(max_tokens=10, seed=1), n=3) == first
    assert tokens_of(engine.generate(PROMPTS, Sampling(max_tokens=10, seed=2), n=3)) != tokens_of(first)
    assert [len(group) for group in first] == [3] * len(PROMPTS)
    assert len({tuple(ids) for ids in tokens_of(first)}) == 3 * len(PROMPTS)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_prompt_alone_draws_what_it_draws_in_a_batch(architecture: str, penalty: float, load: Load) -> None:
    """The first prompt, since the stream is named by the prompt's place; in float64, so that no rounding decides."""
    engine = engine_of(load(architecture, torch.float64))
    sampling = Sampling(max_tokens=20, seed=4, repetition_penalty=penalty)
    together = engine.generate(PROMPTS, sampling, n=2)
    assert tokens_of(together[:1]) == tokens_of(engine.generate(PROMPTS[:1], sampling, n=2))


def test_rows_that_end_early_do_not_disturb_the_others(load: Load) -> None:
    module = load("gemma3", torch.float64)
    sampling = Sampling(max_tokens=30, seed=2)
    endless = tokens_of(engine_of(module).generate(PROMPTS, sampling, n=4))
    ends = tuple(range(0, 250, 12))  # 8 in 100 tokens end an answer
    found = flat(engine_of(module, ends).generate(PROMPTS, sampling, n=4))
    lengths = set()
    for completion, whole in zip(found, endless, strict=True):
        cut = next((i for i, token in enumerate(whole) if token in ends), None)
        assert completion.token_ids == (whole if cut is None else whole[: cut + 1])
        assert completion.finish_reason == ("length" if cut is None else "eos")
        lengths.add(len(completion.token_ids))
    assert len(lengths) > 3


def test_the_last_allowed_token_may_be_the_end(load: Load) -> None:
    module = load("llama")
    greedy = tokens_of(engine_of(module).generate(PROMPTS[:1], Sampling(max_tokens=3, temperature=0.0)))[0]
    last = engine_of(module, (greedy[-1],)).generate(PROMPTS[:1], Sampling(max_tokens=3, temperature=0.0))[0][0]
    assert last.finish_reason == "eos"


def test_special_tokens_are_not_in_the_text(load: Load) -> None:
    def decode(ids: list[int]) -> str:
        return f"<{len(ids)} ids>"

    found = engine_of(load("llama"), decode=decode).generate(PROMPTS[:1], Sampling(max_tokens=4))[0][0]
    assert found.text == "<4 ids>"


class Spelled:
    """A decode of one letter a token, `a` to `z`, with something that a chat template had opened in front."""

    def __init__(self, prefill: str = ""):
        self.prefill = prefill

    def __call__(self, ids: list[int]) -> str:
        return self.prefill + "".join(chr(ord("a") + i % 26) for i in ids)


def test_a_stop_string_ends_an_answer_where_it_is_complete(load: Load) -> None:
    engine = engine_of(load("llama"), decode=Spelled())
    whole = engine.generate(PROMPTS[:1], Sampling(max_tokens=40, seed=3))[0][0]
    assert whole.finish_reason == "length"
    stop = whole.text[5:8]
    found = engine.generate(PROMPTS[:1], Sampling(max_tokens=40, seed=3, stop=("@", stop)))[0][0]
    assert found.finish_reason == "stop"
    assert found.text == whole.text[: whole.text.index(stop) + 3]


def test_a_stop_string_longer_than_the_usual_tail_is_found(load: Load) -> None:
    engine = engine_of(load("llama"), decode=Spelled())
    whole = engine.generate(PROMPTS[:1], Sampling(max_tokens=40, seed=3))[0][0]
    found = engine.generate(PROMPTS[:1], Sampling(max_tokens=40, seed=3, stop=(whole.text[2:32],)))[0][0]
    assert (found.finish_reason, found.text) == ("stop", whole.text[:32])


def test_what_the_template_opened_stops_nothing(load: Load) -> None:
    engine = engine_of(load("llama"), decode=Spelled(prefill="<think>\n"))
    found = engine.generate(PROMPTS[:1], Sampling(max_tokens=6, stop=("<think>", "\n")))[0][0]
    assert found.finish_reason == "length"
    assert found.text.startswith("<think>\n") and len(found.token_ids) == 6


class Stopped(Exception):
    """What a run raises between tokens."""


def test_an_exception_between_tokens_passes_through_and_the_engine_works_on(load: Load) -> None:
    engine, calls = engine_of(load("mistral")), []
    expected = engine.generate(PROMPTS, Sampling(max_tokens=12, seed=1), n=2)

    def third_time() -> None:
        calls.append(torch.is_grad_enabled())
        if len(calls) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        engine.generate(PROMPTS, Sampling(max_tokens=12, seed=1), n=2, between_tokens=third_time)
    assert len(calls) == 3
    assert torch.is_grad_enabled()
    assert engine.generate(PROMPTS, Sampling(max_tokens=12, seed=1), n=2) == expected


def test_between_tokens_is_called_once_a_token_step(load: Load) -> None:
    calls: list[int] = []
    engine_of(load("llama")).generate(PROMPTS, Sampling(max_tokens=5), n=3, between_tokens=lambda: calls.append(1))
    assert len(calls) == 4  # nothing comes between the last token and the return


def test_the_global_random_state_is_untouched(load: Load) -> None:
    before = torch.get_rng_state()
    engine_of(load("llama")).generate(PROMPTS, Sampling(max_tokens=5), n=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_empty_prompts_are_an_error(prompts: list[list[int]], load: Load) -> None:
    with pytest.raises(ValueError, match="at least one prompt, and every prompt at least one token"):
        engine_of(load("llama")).generate(prompts, Sampling(max_tokens=5))


def test_tokens_are_told_as_they_come(load: Load) -> None:
    """Rows end at different times, and stay in what is told."""
    engine = engine_of(load("llama"), tuple(range(0, 250, 12)))
    sampling = Sampling(max_tokens=15, seed=2)
    expected = tokens_of(engine.generate(PROMPTS, sampling, n=3))
    seen: list[list[list[int]]] = []
    found = engine.generate(PROMPTS, sampling, n=3, on_tokens=lambda rows: seen.append([list(row) for row in rows]))
    assert tokens_of(found) == expected
    assert len({len(ids) for ids in expected}) > 2
    assert seen == [[ids[: step + 1] for ids in expected] for step in range(max(map(len, expected)))]


def test_what_is_raised_on_tokens_passes_through(load: Load) -> None:
    engine, calls = engine_of(load("llama")), []

    def second_time(rows: list[list[int]]) -> None:
        calls.append(len(rows[0]))
        if len(calls) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        engine.generate(PROMPTS, Sampling(max_tokens=12, seed=1), on_tokens=second_time)
    assert calls == [1, 2]
    assert len(flat(engine.generate(PROMPTS, Sampling(max_tokens=3, seed=1)))) == len(PROMPTS)
