"""The vLLM engine on a vLLM made by hand: requests, endings, stops and the adapter; its logprobs are -1/temperature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kit.model.lora import add_lora, lora_parameters
from grpo_kit.rollout import Sampling, VllmEngine, stream_seed
from tests.rollout.native.conftest import tiny
from tests.rollout.vllm.fakes import ADAPTER, FakeLlm, FakeModel, Request, fake_vllm

EOS, RANK = 256, 4


def count(request: Request) -> int:
    """1, 2, 3, …; the prompt's first id says when to end."""
    at = len(request.tokens) + 1
    return EOS if at == request.prompt[0] else at


def letters(ids: list[int]) -> str:
    return "".join(chr(96 + token) for token in ids if token != EOS)


def engine(draw: Callable[[Request], int] = count, scale: float = 1.0, longest: int = 64) -> tuple[VllmEngine, FakeLlm]:
    plain = tiny("llama")
    model = FakeModel(plain, rank=RANK, scale=scale)
    vllm, llm = fake_vllm(model, draw, longest)
    return VllmEngine(add_lora(plain, RANK, RANK, seed=0), vllm, eos_ids=[EOS], decode=letters), llm


def test_completions_come_in_order_with_what_ended_them() -> None:
    made, _ = engine()
    groups = made.generate([[3, 0], [9], [60]], Sampling(max_tokens=5), n=2)
    assert [[one.token_ids for one in group] for group in groups] == [
        [[1, 2, EOS]] * 2,
        [[1, 2, 3, 4, 5]] * 2,
        [[1, 2, 3, 4, 5]] * 2,
    ]
    assert [group[0].finish_reason for group in groups] == ["eos", "length", "length"]
    assert groups[0][0].text == "ab"


def test_every_completion_is_a_request_with_a_seed_of_its_own() -> None:
    made, llm = engine()
    made.generate([[9], [8]], Sampling(max_tokens=2, top_p=0.9, top_k=7, min_p=0.1, seed=5), n=2)
    asked = [request.arguments for request in llm.asked]
    assert [one["seed"] for one in asked] == [stream_seed(5, i, j) for i in range(2) for j in range(2)]
    assert all((one["top_p"], one["top_k"], one["min_p"], one["logprobs"]) == (0.9, 7, 0.1, 0) for one in asked)
    assert all(one["stop_token_ids"] == [EOS] and one["ignore_eos"] and not one["detokenize"] for one in asked)


@pytest.mark.parametrize(("temperature", "told", "asked"), [(1.0, -3.0, 1.0), (0.5, -6.0, 1.0), (0.0, -3.0, 0.0)])
def test_logits_are_divided_by_the_temperature_before_vllm_sees_them(
    temperature: float, told: float, asked: float
) -> None:
    """Its raw logprobs are then those before any cut. The model multiplies its logits by 3 anyway."""
    made, llm = engine(scale=3.0)
    (group,) = made.generate([[9]], Sampling(max_tokens=3, temperature=temperature))
    assert group[0].logprobs == [told] * 3
    assert llm.asked[0].arguments["temperature"] == asked
    assert made.vllm.module.logits_processor.scale == 3.0


def test_a_stop_string_ends_a_completion_at_its_token() -> None:
    made, llm = engine()
    (group,) = made.generate([[40]], Sampling(max_tokens=30, stop="cd"))
    assert (group[0].token_ids, group[0].finish_reason, group[0].text) == ([1, 2, 3, 4], "stop", "abcd")
    assert len(group[0].logprobs) == 4
    assert not llm.requests and not llm.launched


def test_the_adapter_is_written_once_for_each_change() -> None:
    made, _ = engine()
    layer = made.vllm.module.get_submodule("model.layers.0.mlp.down_proj")
    weight = next(w for name, w in lora_parameters(made.module).items() if "layers.0.mlp.down_proj.lora_A" in name)
    made.generate([[3]], Sampling(max_tokens=1))
    torch.testing.assert_close(layer.lora_a_stacked[0][0, 0], weight)
    with torch.no_grad():
        weight.mul_(2)
    made.generate([[3]], Sampling(max_tokens=1))
    assert not torch.equal(layer.lora_a_stacked[0][0, 0], weight)
    made.adapter_changed()
    made.generate([[3]], Sampling(max_tokens=1))
    torch.testing.assert_close(layer.lora_a_stacked[0][0, 0], weight)


def test_a_disabled_adapter_is_not_asked_for() -> None:
    made, llm = engine()
    made.generate([[3]], Sampling(max_tokens=1))
    with made.module.disable_adapter():
        made.generate([[3]], Sampling(max_tokens=1))
    assert [request.adapter for request in llm.asked] == [ADAPTER, None]


def test_prompts_of_earlier_calls_are_forgotten() -> None:
    made, llm = engine()
    for _ in range(2):
        made.generate([[3]], Sampling(max_tokens=4))
    assert llm.forgotten == 2


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["between_tokens", "on_tokens"])
def test_what_is_raised_between_tokens_ends_all_and_leaves_the_engine_usable(where: str) -> None:
    made, llm = engine()
    calls = 0

    def raising(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Stop

    with pytest.raises(Stop):
        made.generate([[50], [40]], Sampling(max_tokens=30), 2, **{where: raising})
    assert not llm.requests and not llm.launched
    assert made.vllm.module.logits_processor.scale == 1.0
    (group,) = made.generate([[3]], Sampling(max_tokens=9))
    assert group[0].token_ids == [1, 2, EOS]


def test_tokens_are_told_as_they_come() -> None:
    made, _ = engine()
    seen: list[list[int]] = []
    made.generate([[3], [9]], Sampling(max_tokens=4), on_tokens=lambda rows: seen.append([len(row) for row in rows]))
    assert seen[-1] == [3, 4] and [1, 1] in seen and seen == sorted(seen)


def test_it_pauses_after_every_step() -> None:
    made, llm = engine()
    pauses = 0

    def pause() -> None:
        nonlocal pauses
        pauses += 1

    made.generate([[20]], Sampling(max_tokens=10), between_tokens=pause)
    assert 9 <= pauses <= llm.steps


def test_released_memory_is_taken_again_by_itself() -> None:
    made, _ = engine()
    assert made.holds_memory
    made.release()
    assert not made.holds_memory
    made.generate([[3]], Sampling(max_tokens=1))
    assert made.holds_memory


def test_what_is_longer_than_the_model_is_an_error() -> None:
    made, llm = engine(longest=8)
    made.generate([[3] * 4], Sampling(max_tokens=4))
    with pytest.raises(ValueError, match="may have 8 tokens together, not 9"):
        made.generate([[3] * 4], Sampling(max_tokens=5))
    with pytest.raises(ValueError, match="at least one prompt"):
        made.generate([], Sampling(max_tokens=5))
    assert len(llm.asked) == 1
