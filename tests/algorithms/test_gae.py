"""What PPO learns from: numbers by hand. `test_ppo_reference` compares whole batches with loops in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms import gae, token_rewards, whiten

NAN = float("nan")
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


def test_a_score_at_the_last_token_and_kl_at_each() -> None:
    kl = torch.tensor([[0.5, -1.0, 2.0], [3.0, 9.0, 9.0]])
    found = token_rewards(torch.tensor([1.0, 4.0]), kl, MASK, beta=0.1)
    torch.testing.assert_close(found, torch.tensor([[-0.05, 0.1, 0.8], [3.7, 0.0, 0.0]]))


def test_no_score_no_reward() -> None:
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert token_rewards(torch.tensor([NAN, 5.0]), torch.zeros(2, 2), mask, 0.1).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_gae() -> None:
    # γ = 0.5, λ = 0.5. First answer: r = 0 0 4, V = 1 2 3.
    # δ = 0 + 1 − 1, 0 + 1.5 − 2, 4 + 0 − 3 = 0, −0.5, 1; A = 0 + (−0.25)/4, −0.5 + 1/4, 1 = −0.0625, −0.25, 1.
    # Second: r = 2, V = 0.5: δ = 1.5 = A; the values behind its end count for nothing.
    rewards = torch.tensor([[0.0, 0.0, 4.0], [2.0, 7.0, 7.0]])
    values = torch.tensor([[1.0, 2.0, 3.0], [0.5, 7.0, 7.0]])
    advantages, returns = gae(rewards, values, MASK, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-0.0625, -0.25, 1.0], [1.5, 0.0, 0.0]]
    assert returns.tolist() == [[0.9375, 1.75, 4.0], [2.0, 0.0, 0.0]]


def test_without_a_critic_every_token_gets_what_still_comes() -> None:
    advantages, returns = gae(torch.tensor([[1.0, 2.0, 4.0]]), torch.zeros(1, 3), torch.ones(1, 3), 1.0, 1.0)
    assert advantages.tolist() == returns.tolist() == [[7.0, 6.0, 4.0]]


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten(shift_mean: bool) -> None:
    # 1, 2, 3, 6: mean 3, unbiased variance (4 + 1 + 0 + 9) / 3.
    values = torch.tensor([[1.0, 2.0, 3.0], [6.0, 50.0, 50.0]])
    scale, back = 1 / math.sqrt(14 / 3), 0.0 if shift_mean else 3.0
    expected = [[-2 * scale + back, -scale + back, back], [3 * scale + back, 0.0, 0.0]]
    torch.testing.assert_close(whiten(values, MASK, shift_mean), torch.tensor(expected))


def test_what_can_not_be_whitened_is_left() -> None:
    one = torch.tensor([[1.0, 0.0]])
    assert whiten(torch.tensor([[5.0, 7.0]]), one).tolist() == [[5.0, 0.0]]
    assert whiten(torch.tensor([[5.0, 7.0]]), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    assert whiten(torch.full((1, 3), 4.0), torch.ones(1, 3)).tolist() == [[0.0, 0.0, 0.0]]
