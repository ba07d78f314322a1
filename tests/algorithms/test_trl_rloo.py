"""RLOO equals TRL 1.16's RLOOTrainer: its own `_generate_and_score_completions` (rewards, KL in them, leave-one-out)
and its own `compute_loss`, against our measurement, credit and passes.

One deliberate difference: TRL counts a masked answer's constant −A/N in the loss it shows, ours counts nothing. It has
no gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import get_algorithm
from grpo_kit.model import Model
from grpo_kit.rewards import Score, ScoreTable
from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit, Estimates, give_credit
from grpo_kit.training.update import Updater
from tests.algorithms.parity import (
    ADVANTAGES,
    TOKEN_BUDGETS,
    N,
    assert_same_pass,
    backward,
    credit_of,
    from_before,
    moved,
    our_updater,
    sequences,
    trl_inputs,
)

SCORES: dict[str, list[tuple[float | None, float | None]]] = {
    "all scored": [(1, 0), (0, 0.5), (1, 1), (0, 0), (2, 0), (2, 0), (0, 0), (1, 3)],
    "some not": [(1, 0), (None, None), (1, 1), (None, 0.25), (2, 0), (2, None), (0, 0), (1, 3)],
    "a group alike": [(1, 1)] * 4 + [(2, 0), (2, 0), (0, 0), (1, 3)],
}


def scored_by_trl(trainer: Any, batch: list[Sequence], case: str, beta: float, normalize: bool) -> dict[str, Tensor]:
    completions = [s.completion.token_ids for s in batch]
    trainer._generate = lambda prompts: ([s.prompt_ids for s in batch], completions, [""] * N)
    trainer.scores, trainer.beta, trainer.normalize_advantages = SCORES[case], beta, normalize
    try:
        return trainer._generate_and_score_completions([{"prompt": "a"}] * N)
    finally:
        del trainer._generate


def scored_by_us(updater: Updater, batch: list[Sequence], case: str) -> tuple[Credit, Estimates | None]:
    scores = [[Score(None if value is None else float(value)) for value in pair] for pair in SCORES[case]]
    table = ScoreTable(["first", "second"], [1.0, 1.0], scores)
    totals = torch.tensor([torch.nan if total is None else total for total in table.totals])
    estimates = updater.measure(batch, lambda: None)
    return give_credit(get_algorithm("rloo"), updater.options, totals, table, estimates), estimates


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("case", SCORES)
def test_from_scores_to_gradients(case: str, beta: float, normalize: bool, ours: Model, rloo_trainer: Any) -> None:
    batch = sequences()
    inputs = scored_by_trl(rloo_trainer, batch, case, beta, normalize)
    loss = rloo_trainer.compute_loss(rloo_trainer.model, inputs)
    theirs = backward(rloo_trainer, loss)
    options = {"beta": beta, "normalize_advantages": normalize}
    for budget in TOKEN_BUDGETS:
        credit, estimates = scored_by_us(our_updater(ours, "rloo", budget, **options), batch, case)
        torch.testing.assert_close(credit.advantages, inputs["advantages"], rtol=1e-5, atol=1e-6)
        assert (estimates is None) == (beta == 0)
        assert_same_pass(ours, "rloo", batch, credit, estimates, loss.item(), theirs, budgets=[budget], **options)


@pytest.mark.parametrize("masked", [False, True], ids=["all trained", "truncated masked"])
def test_clipping_of_whole_answers(masked: bool, ours: Model, rloo_trainer: Any) -> None:
    batch, old = sequences(masked), moved(rloo_trainer, scale=0.3)
    inputs = trl_inputs(batch)
    inputs["old_logps"] = (old * inputs["completion_mask"]).sum(1)
    loss = rloo_trainer.compute_loss(rloo_trainer.model, inputs)
    theirs = backward(rloo_trainer, loss)
    left_out = sum(float(a) for a, s in zip(ADVANTAGES, batch, strict=True) if not s.trained)
    shown = loss.item() + left_out / N
    for sums in assert_same_pass(ours, "rloo", batch, credit_of(), from_before(old), shown, theirs, beta=0.0):
        assert sums.metrics()["clip_ratio"] > 0.1
