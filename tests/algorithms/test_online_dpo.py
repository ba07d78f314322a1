"""Pairs and the two losses on them: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms import rank_pairs
from grpo_kit.algorithms.online_dpo import ipo_loss, sigmoid_loss

NAN = float("nan")

# rewards of two groups, generations, pairs (better, worse), ties
RANKED = {
    "two answers": ([1.0, 0.0, 0.0, 1.0], 2, [(0, 1), (3, 2)], 0),
    "best against worst, and inwards": (
        [0.2, 0.9, 0.4, 0.1, 4.0, 1.0, 3.0, 2.0],
        4,
        [(1, 3), (2, 0), (4, 5), (6, 7)],
        0,
    ),
    "the middle one of an odd group is left": ([0.5, 0.1, 0.9, 3.0, 2.0, 1.0], 3, [(2, 1), (3, 5)], 0),
    "a tie": ([1.0, 1.0, 0.0, 1.0], 2, [(3, 2)], 1),
    "alike but for rounding": ([0.3, 0.1 + 0.2 + 1e-9, 0.0, 1.0], 2, [(3, 2)], 1),
    "a tie among the inner ones": ([0.0, 0.5, 0.5, 1.0], 4, [(3, 0)], 1),
    "unscored ones are left out": ([NAN, 1.0, 0.0, 0.5, NAN, NAN, 2.0, 1.0], 4, [(1, 2), (6, 7)], 0),
    "one scored, none scored": ([NAN, 1.0, NAN, NAN], 2, [], 0),
    "all alike": ([2.0] * 4, 4, [], 2),
}


@pytest.mark.parametrize("case", RANKED)
def test_rank_pairs(case: str) -> None:
    rewards, generations, pairs, ties = RANKED[case]
    assert rank_pairs(torch.tensor(rewards), generations) == (pairs, ties)


def test_ragged_groups_are_an_error() -> None:
    with pytest.raises(ValueError, match="5 rewards can't be split into groups of 2"):
        rank_pairs(torch.zeros(5), 2)


def test_sigmoid_loss() -> None:
    # β·margin = ln 3: −log σ = ln(4/3), and the gradient by the margin is −β·(1 − σ) = −β/4.
    beta = 0.5
    chosen = torch.tensor([1.0 + math.log(3) / beta, -2.0], requires_grad=True)
    rejected = torch.tensor([1.0, -2.0], requires_grad=True)
    loss = sigmoid_loss(chosen, rejected, beta=beta)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([math.log(4 / 3), math.log(2)], rel=1e-6)
    assert chosen.grad is not None and chosen.grad.tolist() == pytest.approx([-beta / 4, -beta / 2], rel=1e-6)
    assert rejected.grad is not None and rejected.grad.tolist() == pytest.approx([beta / 4, beta / 2], rel=1e-6)


def test_ipo_loss() -> None:
    # 1/(2β) = 5. Margins 3, 5 and 7: (−2)², 0, 2², with gradients −4, 0, 4.
    chosen = torch.tensor([2.0, 5.0, 6.0], requires_grad=True)
    loss = ipo_loss(chosen, torch.tensor([-1.0, 0.0, -1.0]), beta=0.1)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([4.0, 0.0, 4.0])
    assert chosen.grad is not None and chosen.grad.tolist() == pytest.approx([-4.0, 0.0, 4.0])
