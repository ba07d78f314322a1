"""The device's sampler draws what `next_tokens` draws from the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kit.rollout import Sampling
from grpo_kit.rollout.native.sampler import Cuts, choose, invert
from grpo_kit.rollout.sampling import next_tokens, warpers

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.02},
    {"repetition_penalty": 1.4},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.8},
]


def numbers(count: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_draws_what_next_tokens_draws(options: dict[str, Any], vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(2000, vocabulary, generator=generator) * 3
    context = torch.randint(0, vocabulary, (2000, 6), generator=generator)
    sampling = Sampling(max_tokens=1, **options)
    expected, expected_logprobs = next_tokens(logits, sampling, warpers(sampling), context, numbers(2000))
    temperature = torch.tensor(sampling.temperature or 1.0)
    tokens, logprobs = choose(logits, numbers(2000), temperature, Cuts.of(sampling), context)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)


def test_16_bit_logits_are_sampled_in_32() -> None:
    logits = (torch.randn(500, 300, generator=torch.Generator().manual_seed(2)) * 3).to(torch.bfloat16)
    sampling = Sampling(max_tokens=1)
    expected, _ = next_tokens(logits, sampling, warpers(sampling), torch.zeros(500, 1), numbers(500))
    tokens, logprobs = choose(logits, numbers(500), torch.tensor(1.0), Cuts.of(sampling), None)
    assert torch.equal(tokens, expected) and logprobs.dtype == torch.float32


@pytest.mark.parametrize("place", [0, 255, 256, 600, 999])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_the_only_possible_token_is_drawn_whatever_the_number(place: int, uniform: float) -> None:
    weights = torch.zeros(1, 1000)
    weights[0, place] = 0.3
    assert invert(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [place]


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 300), (0.24999, 300), (0.25, 310), (0.5, 700), (1 - 2**-53, 701)])
def test_the_borders_between_tokens_and_blocks(uniform: float, token: int) -> None:
    weights = torch.zeros(1, 1000)
    weights[0, [300, 310, 700, 701]] = 0.25
    assert invert(weights, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_tokens_without_weight_are_never_drawn() -> None:
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(4000, 1003, generator=generator) * (torch.rand(4000, 1003, generator=generator) < 0.01)
    drawn = invert(weights, numbers(4000))
    assert (weights.gather(-1, drawn[:, None]) > 0).all()
