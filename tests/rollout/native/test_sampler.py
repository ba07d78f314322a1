"""The device's sampler draws what `next_tokens` draws from the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kit.rollout import Sampling
from grpo_kit.rollout.native.sampler import Cuts, choose
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
