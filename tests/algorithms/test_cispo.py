"""CISPO: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms.cispo import cispo_loss


def test_value_cap_and_gradient() -> None:
    """Cap 1 + 1 = 2. Ratios 0.1, 1.5, 4: weights 0.1, 1.5, 2. loss = −weight·A·logprob, and its gradient −weight·A: a
    capped token keeps it, and the weight itself has none."""
    ratios = torch.tensor([[0.1, 1.5, 4.0]] * 2)
    old = torch.full((2, 3), -3.0)
    logprobs = (old + ratios.log()).requires_grad_()
    loss, capped = cispo_loss(logprobs, old, torch.tensor([2.0, -1.0]), torch.ones(2, 3), epsilon_high=1.0)
    loss.sum().backward()
    said = [-3 + math.log(ratio) for ratio in (0.1, 1.5, 4.0)]
    weights = [0.1, 1.5, 2.0]
    for row, advantage in enumerate((2.0, -1.0)):
        expected = [-w * advantage * p for w, p in zip(weights, said, strict=True)]
        assert loss[row].tolist() == pytest.approx(expected, rel=1e-5)
        assert logprobs.grad is not None
        assert logprobs.grad[row].tolist() == pytest.approx([-w * advantage for w in weights], rel=1e-5)
    assert capped.tolist() == [[False, False, True]] * 2


def test_advantages_may_differ_from_token_to_token() -> None:
    zeros = torch.zeros(1, 2)
    loss, _ = cispo_loss(zeros - 1, zeros - 1, torch.tensor([[1.0, -2.0]]), torch.ones(1, 2), epsilon_high=1.0)
    assert loss.tolist() == [[1.0, -2.0]]
