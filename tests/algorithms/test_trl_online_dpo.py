"""Online DPO equals TRL 1.16's: its own `OnlineDPOTrainer.training_step`, given our completions and scores.

Deliberate differences:

- TRL does not divide its logits by the temperature that it sampled with; ours measures the likelihoods of the policy
  that sampled. Both sample at temperature 1 here, where that is the same.
- Of two answers scored alike TRL trains the first as the better one; ours learns nothing from them and counts them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import get_algorithm
from grpo_kit.model import Model
from grpo_kit.model.lora import lora_parameters
from grpo_kit.rewards import Score, ScoreTable
from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit, give_credit
from grpo_kit.training.options import TrainOptions
from tests.algorithms.parity import N, assert_same_pass, gradients, our_updater, sequences, trl_inputs

LOSS_TYPES = {"online_dpo": "sigmoid", "online_ipo": "ipo"}
APART = [1.0, 0.0, 0.25, 0.5, 3.0, -1.0, 0.0, 2.0]  # four pairs: the first, the second, the first, the second
TIED = [1.0, 0.0, 0.25, 0.5, 3.0, 3.0, 0.0, 2.0]
OPTIONS = {"temperature": 1.0, "num_generations": 2}


def pairs_of_prompts() -> list[Sequence]:
    """Two answers each to four prompts: the batch's answers, with the prompt of each pair's first one."""
    batch = sequences()
    return [Sequence(batch[i - i % 2].prompt_ids, batch[i].completion) for i in range(N)]


def trl_step(trainer: Any, batch: list[Sequence], rewards: list[float], loss_type: str, beta: float) -> Tensor:
    """The loss; the gradients stay in the parameters. TRL has all first answers before all second ones."""
    order = [*range(0, len(batch), 2), *range(1, len(batch), 2)]
    inputs = trl_inputs([batch[i] for i in order])
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    trainer._generate = lambda *_: (*(inputs[name] for name in names), None)
    trainer.args.loss_type, trainer._beta = loss_type, beta
    trainer.scores = [(rewards[i], 0.0) for i in order]
    try:
        return trainer.training_step(trainer.model, {"prompt": ["a"] * (len(batch) // 2)})
    finally:
        del trainer._generate


def credit_for(name: str, rewards: list[float]) -> Credit:
    table = ScoreTable(["score"], [1.0], [[Score(reward)] for reward in rewards])
    options = TrainOptions(algorithm=name, num_generations=2)
    return give_credit(get_algorithm(name), options, torch.tensor(rewards), table, None)


@pytest.mark.parametrize("beta", [0.05, 0.1])
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_loss_and_gradients(name: str, beta: float, ours: Model, dpo_trainer: Any) -> None:
    batch = pairs_of_prompts()
    loss = trl_step(dpo_trainer, batch, APART, LOSS_TYPES[name], beta)
    theirs = gradients(lora_parameters(dpo_trainer.model))
    credit = credit_for(name, APART)
    assert credit.pairs == [(0, 1), (3, 2), (4, 5), (7, 6)]
    for sums in assert_same_pass(ours, name, batch, credit, None, loss.item(), theirs, beta=beta, **OPTIONS):
        accuracy = dpo_trainer.stats["rewards/accuracies"][-1]
        assert sums.metrics()["pair_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_a_tie(name: str, ours: Model, dpo_trainer: Any) -> None:
    """TRL's loss with a tie is ours with the first one of it called better; what ours makes of it is TRL's loss of the
    batch without the tied pair."""
    batch, kind = pairs_of_prompts(), LOSS_TYPES[name]
    credit = credit_for(name, TIED)
    assert credit.pairs == [(0, 1), (3, 2), (7, 6)]
    assert credit.metrics == {"pairs": 3.0, "tied_pairs": 1.0}
    assert credit.advantages.tolist() == [1.0, -1.0, -1.0, 1.0, 0.0, 0.0, -1.0, 1.0]

    loss = trl_step(dpo_trainer, batch, TIED, kind, 0.1)
    theirs = gradients(lora_parameters(dpo_trainer.model))
    first_is_better = Credit(credit.advantages, None, [(0, 1), (3, 2), (4, 5), (7, 6)], {})
    assert_same_pass(ours, name, batch, first_is_better, None, loss.item(), theirs, beta=0.1, **OPTIONS)

    untied = [batch[i] for i in (0, 1, 2, 3, 6, 7)]
    loss = trl_step(dpo_trainer, untied, [TIED[i] for i in (0, 1, 2, 3, 6, 7)], kind, 0.1)
    theirs = gradients(lora_parameters(dpo_trainer.model))
    assert_same_pass(ours, name, batch, credit, None, loss.item(), theirs, beta=0.1, **OPTIONS)


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_nothing_but_ties_moves_nothing(name: str, ours: Model) -> None:
    credit = credit_for(name, [1.0] * N)
    before = {key: parameter.detach().clone() for key, parameter in ours.trainable().items()}
    metrics = our_updater(ours, name, 45, **OPTIONS).update(pairs_of_prompts(), credit, None, lambda: None)
    assert metrics["grad_norm"] == 0 and credit.metrics["tied_pairs"] == 4
    assert all(torch.equal(before[key], parameter) for key, parameter in ours.trainable().items())
