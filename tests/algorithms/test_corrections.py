"""Weights on tokens: the gap to the sampler, answers that the policy has left, tokens with nothing to decide. By
hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import high_entropy_mask, off_policy_mask, sampler_correction

NAN = float("nan")
# Two answers of three and two tokens. π_old / π_sampler: 2, 1/4, 1, product 1/2; and 3, 2, product 6. What is behind
# the second one's end counts for nothing.
RATIOS = torch.tensor([[2.0, 0.25, 1.0], [3.0, 2.0, 100.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def corrected(mode: str, clip_max: float, clip_min: float | None) -> list[list[float]]:
    sampled = torch.full((2, 3), -2.0)
    return sampler_correction(sampled + RATIOS.log(), sampled, MASK, mode, clip_max, clip_min).tolist()


BY_HAND = {
    ("token_truncate", 2.5, None): [[2.0, 0.25, 1.0], [2.5, 2.0, 1.0]],
    ("token_truncate", 2.5, 0.5): [[2.0, 0.5, 1.0], [2.5, 2.0, 1.0]],
    ("token_mask", 2.5, None): [[2.0, 0.25, 1.0], [0.0, 2.0, 1.0]],
    ("token_mask", 2.5, 0.5): [[2.0, 0.0, 1.0], [0.0, 2.0, 1.0]],
    ("sequence_truncate", 5.0, None): [[0.5], [5.0]],
    ("sequence_truncate", 5.0, 0.75): [[0.75], [5.0]],
    ("sequence_mask", 5.0, None): [[0.5], [0.0]],
    ("sequence_mask", 7.0, 0.75): [[0.0], [6.0]],
}


@pytest.mark.parametrize(("mode", "clip_max", "clip_min"), BY_HAND)
def test_sampler_correction(mode: str, clip_max: float, clip_min: float | None) -> None:
    for found, expected in zip(corrected(mode, clip_max, clip_min), BY_HAND[mode, clip_max, clip_min], strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_a_logprob_that_the_sampler_did_not_say_counts_as_equal(mode: str) -> None:
    old, sampled = torch.tensor([[-1.0, -2.0]]), torch.tensor([[NAN, -2.0 - math.log(2)]])
    expected = [[1.0, 2.0]] if mode == "token_truncate" else [[2.0]]
    found = sampler_correction(old, sampled, torch.ones(1, 2), mode, 3.0, None)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must be one of token_truncate, token_mask, .*; got 'sequence'"):
        corrected("sequence", 2.0, None)


def kept(advantages: Tensor, gaps: list[list[float]], threshold: float, mask: Tensor | None = None) -> list:
    sampled = torch.tensor(gaps)
    mask = torch.ones_like(sampled) if mask is None else mask
    return off_policy_mask(advantages, torch.zeros_like(sampled), sampled, mask, threshold).tolist()


def test_bad_answers_that_the_policy_has_left_are_dropped() -> None:
    # mean gaps: 0.2, 0.2, 0.4 and 0.4 nats a token; the threshold is 0.3
    gaps = [[0.1, 0.3], [0.1, 0.3], [0.4, 0.4], [0.4, 0.4]]
    assert kept(torch.tensor([1.0, -1.0, 0.0, -1.0]), gaps, 0.3) == [[1.0], [1.0], [1.0], [0.0]]


def test_the_mean_is_over_the_answers_own_tokens() -> None:
    assert kept(torch.tensor([-1.0]), [[0.4, 9.0]], 0.5, torch.tensor([[1.0, 0.0]])) == [[1.0]]
    assert kept(torch.tensor([-1.0]), [[0.4, 0.0]], 0.3, torch.tensor([[1.0, 0.0]])) == [[0.0]]
    assert kept(torch.tensor([-1.0]), [[NAN, 0.4]], 0.3) == [[1.0]]  # what is unknown counts as no gap
    assert kept(torch.tensor([-1.0]), [[5.0, 5.0]], 0.3, torch.zeros(1, 2)) == [[1.0]]


def test_going_surer_of_a_bad_answer_is_not_leaving_it() -> None:
    assert kept(torch.tensor([-1.0]), [[-3.0, -3.0]], 0.1) == [[1.0]]


def test_the_least_sure_tokens() -> None:
    # Of 0.1 0.2 0.3 0.4 0.5 the upper 40 %: numpy's quantile 0.6 is 0.34, so 0.4 and 0.5; 9 is no token.
    entropy = torch.tensor([[0.5, 0.1, 0.4], [0.3, 0.2, 9.0]])
    assert high_entropy_mask(entropy, MASK, 0.4).tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert high_entropy_mask(entropy, MASK, 1.0).tolist() == MASK.tolist()
    assert high_entropy_mask(entropy, torch.zeros(2, 3), 0.4).tolist() == [[0.0] * 3] * 2


def test_the_threshold_is_the_steps_not_the_answers() -> None:
    entropy = torch.tensor([[4.0, 3.0], [2.0, 1.0]])
    assert high_entropy_mask(entropy, torch.ones(2, 2), 0.5).tolist() == [[1.0, 1.0], [0.0, 0.0]]
