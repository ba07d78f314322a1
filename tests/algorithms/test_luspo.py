"""LUSPO is GSPO with each answer weighed by its length."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.algorithms import get_algorithm


def test_a_steps_loss_by_hand() -> None:
    """Answers of one and three tokens, √…-ratios 1.1 and 0.9, A = 1 and −2: (1·(−1.1) + 3·1.8) / 2."""
    algorithm = get_algorithm("luspo")
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    old = torch.full((2, 3), -1.0)
    logprobs = old + torch.tensor([[1.1], [0.9]]).log()
    loss, _ = algorithm.loss(logprobs, old, torch.tensor([1.0, -2.0]), mask, epsilon=0.2, epsilon_high=0.2, delta=None)
    weights = algorithm.weights(torch.tensor([1, 3]), 10)
    assert (weights[:, None] * loss * mask).sum().item() == pytest.approx((-1.1 + 3 * 1.8) / 2, rel=1e-5)
    assert algorithm.loss is get_algorithm("gspo").loss
