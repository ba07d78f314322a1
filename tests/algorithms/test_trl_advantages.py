"""Advantages equal TRL 1.16's, from its reward functions on: its own `_generate_and_score_completions`.

Two deliberate differences, each with a test: a group in which nothing varies gets exactly 0 in ours, where TRL's GDPO
leaves it −mean/std of the step and its others leave the rounding of the mean; and so does RLOO with normalised
advantages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import group_advantages, leave_one_out, normalized_per_reward

# Two reward functions' scores of two groups of four; None means that the function does not apply.
SCORES: dict[str, list[tuple[float | None, float | None]]] = {
    "all scored": [(1, 0), (0, 0.5), (1, 1), (0, 0), (2, 0), (2, 0), (0, 0), (1, 3)],
    "some by one function only": [(1, None), (None, 0.5), (1, 1), (0, 0), (2, 0), (2, 0), (0, None), (1, 3)],
    "one unscored": [(1, 0), (None, None), (1, 1), (0, 0), (2, 0), (2, 0), (0, 0), (1, 3)],
    "a group unscored": [(None, None)] * 4 + [(2, 0), (2, 0), (0, 0), (1, 3)],
    "one of a group scored": [(None, None), (1, 1), (None, None), (None, None), (2, 0), (2, 0), (0, 0), (1, 3)],
    "a dead group": [(1, 1)] * 4 + [(2, 0), (2, 0), (0, 0), (1, 3)],
    "one function never varies": [(1, 0), (0, 0), (1, 0), (0, 0), (2, 0), (2, 0), (0, 0), (1, 0)],
}
NAN = float("nan")


def totals(case: str, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    def total(pair: tuple[float | None, float | None]) -> float:
        known = [weight * value for weight, value in zip(weights, pair, strict=True) if value is not None]
        return sum(known) if known else NAN

    return torch.tensor([total(pair) for pair in SCORES[case]])


def scored(trainer: Any, case: str) -> Tensor:
    trainer.beta, trainer.scores = 0.0, SCORES[case]
    prompts = [{"prompt": "a"}] * 4 + [{"prompt": "b"}] * 4
    return trainer._generate_and_score_completions(prompts)["advantages"]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("case", SCORES)
def test_groups(case: str, scale: str, trl_trainer: Any) -> None:
    trl_trainer.scale_rewards, trl_trainer.multi_objective_aggregation = scale, "sum_then_normalize"
    found = group_advantages(totals(case), 4, scale)
    torch.testing.assert_close(found, scored(trl_trainer, case), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.25, 2.0)])
@pytest.mark.parametrize("case", SCORES)
def test_each_reward_by_itself(case: str, weights: tuple[float, float], trl_trainer: Any) -> None:
    """GDPO. In a group without any variation TRL gives every answer −mean/std of the step's sums: praise or blame for
    what happened to another prompt. Ours gives 0, and what it gives the others is TRL's."""
    trl_trainer.multi_objective_aggregation, trl_trainer.reward_weights = "normalize_then_sum", torch.tensor(weights)
    try:
        theirs = scored(trl_trainer, case)
    finally:
        trl_trainer.reward_weights = torch.ones(2)
    scores = torch.tensor([[NAN if value is None else value for value in pair] for pair in SCORES[case]])
    ours = normalized_per_reward(scores.float(), torch.tensor(weights), 4)
    dead = {"a dead group": range(4), "one of a group scored": [1]}.get(case, [])
    for i in dead:
        assert ours[i] == 0
    theirs[list(dead)] = 0.0
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_each_reward_by_itself_keeps_apart_what_a_sum_confuses(trl_trainer: Any) -> None:
    """In the first group (2, 0) and (1, 1) have the same sum."""
    trl_trainer.multi_objective_aggregation = "normalize_then_sum"
    trl_trainer.scores = [(2, 0), (1, 1), (0, 0), (0, 0), (0, 0), (1, 0), (0, 1), (0, 0)]
    trl_trainer.beta = 0.0
    theirs = trl_trainer._generate_and_score_completions([{"prompt": "a"}] * 8)["advantages"]
    ours = normalized_per_reward(torch.tensor(trl_trainer.scores, dtype=torch.float32), torch.ones(2), 4)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ours[1] > ours[0] + 0.1


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("case", SCORES)
def test_leave_one_out(case: str, normalize: bool, rloo_trainer: Any) -> None:
    rloo_trainer.normalize_advantages = normalize
    found = leave_one_out(totals(case), 4, normalize)
    torch.testing.assert_close(found, scored(rloo_trainer, case), rtol=1e-5, atol=1e-6)
