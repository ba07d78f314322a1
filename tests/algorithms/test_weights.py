"""How much each sequence's tokens weigh in a step's loss, and the table of algorithms."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.algorithms import ALGORITHMS, get_algorithm, register

LENGTHS = torch.tensor([2, 0, 6, 8])  # the second one is left out: a truncated completion that is masked


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1 / 8, 1 / 4, 1 / 24, 1 / 32]),  # 1 / (N·|o|)
        ("bnpo", [1 / 16] * 4),  # 1 / Σ|o|
        ("dapo", [1 / 16] * 4),
        ("dr_grpo", [1 / 40] * 4),  # 1 / (N·max_completion_length)
    ],
)
def test_weights(name: str, expected: list[float]) -> None:
    weights = get_algorithm(name).weights(LENGTHS, 10)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_step_without_any_trained_token_has_finite_weights(name: str) -> None:
    assert get_algorithm(name).weights(torch.tensor([0, 0]), 10).isfinite().all()


def test_the_options_that_come_with_each() -> None:
    assert {name: a.scale_rewards for name, a in ALGORITHMS.items() if a.scale_rewards != "group"} == {
        "dr_grpo": "none"
    }
    assert {name: a.epsilon_high for name, a in ALGORITHMS.items() if a.epsilon_high is not None} == {"dapo": 0.28}
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.name == name and "arxiv.org" in algorithm.source and algorithm.summary


def test_an_unknown_name_is_answered_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'dr-grpo'; there are .*dr_grpo.*did you mean 'dr_grpo'\?"):
        get_algorithm("dr-grpo")
    with pytest.raises(ValueError, match=r"there are (\w+, )+\w+$"):
        get_algorithm("zzzz")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register(get_algorithm("grpo"))
    assert ALGORITHMS["grpo"] is get_algorithm("grpo")
