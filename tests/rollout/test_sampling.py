"""Drawing the next token: distribution, cuts, logprobs, and one random stream a row."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.rollout import Sampling, stream_seed
from grpo_kit.rollout.sampling import next_tokens, random_streams, warpers

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.0, 0.15])
LOGITS = PROBABILITIES.log()  # token 4 has −inf: it can't be drawn
DRAWS = 20_000


def draw(sampling: Sampling, count: int = DRAWS, context: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logprobs of `count` independent rows with the same logits."""
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ids = torch.tensor([context or [0]]).expand(count, -1)
    return next_tokens(LOGITS.expand(count, -1), sampling, warpers(sampling), ids, uniform)


def assert_drawn_from(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's χ² with k−1 degrees of freedom; the bound is its mean and five standard deviations."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = expected[possible].double() * len(tokens)
    freedom = int(possible.sum()) - 1
    assert ((counts[possible] - wanted) ** 2 / wanted).sum() < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    tokens, logprobs = draw(Sampling(max_tokens=1, temperature=temperature))
    assert_drawn_from(tokens, expected)
    torch.testing.assert_close(logprobs, expected.log()[tokens], rtol=1e-5, atol=1e-6)


CUTS = {
    "top_k": ({"top_k": 2}, [1, 3]),
    "top_p": ({"top_p": 0.8}, [1, 3, 5]),  # 0.4 + 0.3 = 0.7 does not reach 0.8, so 0.15 comes along
    "min_p": ({"min_p": 0.3}, [1, 3, 5]),  # 0.3 · 0.4 = 0.12
    "top_k then top_p": ({"top_k": 3, "top_p": 0.6}, [1, 3]),
}


@pytest.mark.parametrize("cut", CUTS)
def test_what_is_cut_is_never_drawn_and_logprobs_are_those_of_the_uncut(cut: str) -> None:
    options, kept = CUTS[cut]
    expected = torch.zeros_like(PROBABILITIES)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    tokens, logprobs = draw(Sampling(max_tokens=1, **options))
    assert_drawn_from(tokens, expected)
    torch.testing.assert_close(logprobs, LOGITS[tokens], rtol=1e-5, atol=1e-6)


def test_temperature_comes_before_top_p() -> None:
    # At temperature 0.5 the shares are squared: .16 and .09 of .285 reach 0.8 (0.877) by themselves.
    tokens, _ = draw(Sampling(max_tokens=1, temperature=0.5, top_p=0.8))
    assert set(tokens.tolist()) == {1, 3}


def test_greedy_takes_the_likeliest_with_its_logprob_at_temperature_one() -> None:
    tokens, logprobs = draw(Sampling(max_tokens=1, temperature=0.0), count=5)
    assert tokens.tolist() == [1] * 5
    assert logprobs.tolist() == pytest.approx([math.log(0.4)] * 5, rel=1e-5)


def test_repetition_penalty_is_on_what_was_said() -> None:
    # ln 0.4 = −0.916 times 1.5 is ln 0.253: below the untouched 0.3.
    greedy = Sampling(max_tokens=1, temperature=0.0, repetition_penalty=1.5)
    assert draw(greedy, 1, context=[1, 2])[0].item() == 3
    assert draw(greedy, 1, context=[0, 2])[0].item() == 1


@pytest.mark.parametrize("uniform", [0.0, 0.05, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    sampling = Sampling(max_tokens=1)
    number = torch.tensor([uniform], dtype=torch.float64)
    tokens, _ = next_tokens(logits, sampling, warpers(sampling), torch.tensor([[0]]), number)
    assert tokens.item() == (3 if uniform > 0.5 else 1)


def test_a_rows_stream_does_not_depend_on_the_batch() -> None:
    many = random_streams(3, 2, Sampling(max_tokens=50, seed=7))
    assert many.shape == (6, 50) and many.dtype == torch.float64
    assert torch.equal(random_streams(1, 2, Sampling(max_tokens=50, seed=7)), many[:2])
    assert torch.equal(random_streams(3, 2, Sampling(max_tokens=8, seed=7)), many[:, :8])
    assert len({row[0].item() for row in many}) == 6
    assert not torch.equal(random_streams(3, 2, Sampling(max_tokens=50, seed=8)), many)


def test_seeds_are_the_same_in_every_process() -> None:
    assert stream_seed(0, "step", 1) == stream_seed(0, "step", 1)
    assert stream_seed(1, 23) != stream_seed(12, 3)
    assert stream_seed(0, 1, 2) == 5458876493991123480
    assert 0 <= stream_seed("x") < 2**63


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.0),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_options_that_cannot_work_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*got {value}"):
        Sampling(**{"max_tokens": 5, name: value})


def test_one_stop_string_is_a_string_and_not_its_letters() -> None:
    assert Sampling(max_tokens=1, stop="###").stop == Sampling(max_tokens=1, stop=["###"]).stop == ("###",)
    with pytest.raises(ValueError, match="an empty stop string would end"):
        Sampling(max_tokens=1, stop=("",))
