"""How much each sequence's tokens weigh in a step's loss: numbers by hand."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.algorithms import ALGORITHMS
from grpo_kit.algorithms.weights import answer_sum, constant, per_answer, per_token

LENGTHS = torch.tensor([2, 0, 6, 8])  # the second one is left out: a truncated completion that is masked


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (per_answer, [1 / 8, 1 / 4, 1 / 24, 1 / 32]),  # 1 / (N·|o|)
        (per_token, [1 / 16] * 4),  # 1 / Σ|o|
        (constant, [1 / 40] * 4),  # 1 / (N·max_completion_length)
        (answer_sum, [1 / 4] * 4),  # 1 / N
    ],
)
def test_weights(weights, expected: list[float]) -> None:
    found = weights(LENGTHS, 10)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_step_without_any_trained_token_has_finite_weights(name: str) -> None:
    assert ALGORITHMS[name].weights(torch.tensor([0, 0]), 10).isfinite().all()
