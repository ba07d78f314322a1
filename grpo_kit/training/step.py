"""One training step, in the order in which the data sees it. Start reading here.

rows → prompts → completions → scores → credit (advantages) → updated adapter → one row of metrics and N of completions
in the record. Threads, pauses and checkpoints are not here but in `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_kit.algorithms import get_algorithm
from grpo_kit.model import Model
from grpo_kit.rewards import RewardSet, ScoreTable
from grpo_kit.rollout import Completion, stream_seed
from grpo_kit.store import Record
from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit, give_credit
from grpo_kit.training.memory import begin_peak, peak_gb
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.order import rows_of_step, rows_to_refill
from grpo_kit.training.prompts import Prompts
from grpo_kit.training.rollouts import Rollouts, with_live_groups
from grpo_kit.training.update import Unwanted, Updater, never


class Stepper:
    """Everything that a step needs. N = prompts_per_step · num_generations completions; a group's stand side by side.

    clock() are seconds that stand still while the run is paused.
    """

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        rewards: RewardSet,
        options: TrainOptions,
        record: Record,
        clock: Callable[[], float],
    ):
        self.model, self.prompts, self.rewards, self.options, self.record, self.clock = (
            model,
            prompts,
            rewards,
            options,
            record,
            clock,
        )
        self.algorithm = get_algorithm(options.algorithm)
        self.updater = Updater(model, options)
        self._seconds_scoring = 0.0  # of the step being made, as what follows
        self._tokens = 0
        self._asked: list[int] = []
        self._scored: list[ScoreTable] = []

    def step(
        self,
        number: int,
        pause_point: Callable[[], None],
        unwanted: Unwanted = never,
    ) -> ScoreTable:
        """Make step `number` and write it to the record; returns the scores of all answers drawn in it, those of groups
        that were replaced included. Whatever `pause_point` raises leaves the model as after the step before; `unwanted`
        is `Updater.update`'s."""
        started, device = self.clock(), self.model.precision.device
        begin_peak(device)
        learning_rate = self.updater.schedule(number)
        rows = rows_of_step(number, len(self.prompts.messages), self.options.prompts_per_step, self.options.seed)
        self._seconds_scoring, self._tokens, self._asked, self._scored = 0.0, 0, [], []
        first = self._roll_out(number, 0, rows, pause_point)
        rollouts = self._refilled(number, first, pause_point)
        rolled_out, peak_of_rollout = self.clock(), peak_gb(device)
        begin_peak(device)
        sequences = self._sequences(rollouts)
        estimates = self.updater.measure(sequences, pause_point, unwanted)
        credit = give_credit(self.algorithm, self.options, self._totals(rollouts), rollouts.table, estimates)
        learned = self.updater.update(sequences, credit, estimates, pause_point, unwanted)
        ended = self.clock()
        metrics = {  # of the groups drawn first: those that came in for dead ones were chosen for being uneven
            **_reward_metrics(first),
            "dead_groups": self._dead_share(first),
            **_length_metrics(first.completions),
            "tokens": float(self._tokens),
            **credit.metrics,
            **learned,
            "learning_rate": learning_rate,
            "seconds": ended - started,
            "seconds_rollout": rolled_out - started - self._seconds_scoring,
            "seconds_reward": self._seconds_scoring,
            "seconds_update": ended - rolled_out,
            "peak_gb_rollout": peak_of_rollout,
            "peak_gb_update": peak_gb(device),
        }
        if self.options.dynamic_sampling_rounds:
            metrics["refilled_groups"] = float(rollouts.replaced)
        self.record.write_step(number, metrics, self._completion_rows(rollouts, credit))
        self.updater.moved = False
        names, weights = first.table.names, first.table.weights
        return ScoreTable(names, weights, [row for table in self._scored for row in table.scores])

    def _roll_out(self, number: int, round: int, rows: list[int], pause_point: Callable[[], None]) -> Rollouts:
        """Sample and score. round: 0, or which refill of the step's dead groups this is."""
        pause_point()
        seed = stream_seed(self.options.seed, "step", number, *([round] if round else []))
        groups = self.model.complete(
            [self.prompts.token_ids[row] for row in rows],
            self.options.sampling(seed=seed),
            self.options.num_generations,
            between_tokens=pause_point,
        )
        completions = [completion for group in groups for completion in group]
        started = self.clock()
        table = self._score(number, rows, completions)
        self._seconds_scoring += self.clock() - started
        self._tokens += sum(len(completion.token_ids) for completion in completions)
        self._scored.append(table)
        self._asked += rows
        return Rollouts(rows, completions, table)

    def _refilled(self, number: int, first: Rollouts, pause_point: Callable[[], None]) -> Rollouts:
        def draw(round: int, count: int) -> Rollouts:
            rows = rows_to_refill(number, round, len(self.prompts.messages), self._asked, count, self.options.seed)
            return self._roll_out(number, round, rows, pause_point)

        return with_live_groups(first, self.options.dynamic_sampling_rounds or 0, draw, self._by_reward)

    def _score(self, number: int, rows: list[int], completions: list[Completion]) -> ScoreTable:
        each = [row for row in rows for _ in range(self.options.num_generations)]
        with self.model.lock.released():  # a reward may be slow, and may ask the model itself
            return self.rewards.score(
                prompts=[self.prompts.messages[row] for row in each],
                completions=[completion.text for completion in completions],
                rows=[self.prompts.columns[row] for row in each],
                completion_ids=[completion.token_ids for completion in completions],
                step=number,
            )

    @property
    def _by_reward(self) -> bool:
        return self.options.multi_objective_aggregation == "normalize_then_sum"

    def _dead_share(self, rollouts: Rollouts) -> float | None:
        """Of the groups, those that teach nothing; a critic learns from any."""
        if self.algorithm.value_head:
            return None
        dead = rollouts.dead(self._by_reward)
        return sum(dead) / len(dead)

    def _totals(self, rollouts: Rollouts) -> Tensor:
        """Scores for the advantages. A pair with an answer that is left out would compare it all the same, so it counts
        as unscored there."""
        totals = rollouts.totals
        if self.algorithm.advantages == "pairs":
            cut = [self._left_out(completion) for completion in rollouts.completions]
            totals = totals.masked_fill(torch.tensor(cut), torch.nan)
        return totals

    def _sequences(self, rollouts: Rollouts) -> list[Sequence]:
        """A critic must not learn that an unscored answer was worth nothing: it is left out there."""
        unscored = rollouts.totals.isnan().tolist()
        return [
            Sequence(
                self.prompts.token_ids[rollouts.rows[i // self.options.num_generations]],
                completion,
                trained=not (self._left_out(completion) or (self.algorithm.value_head and unscored[i])),
            )
            for i, completion in enumerate(rollouts.completions)
        ]

    def _left_out(self, completion: Completion) -> bool:
        return self.options.mask_truncated_completions and completion.finish_reason == "length"

    def _completion_rows(self, rollouts: Rollouts, credit: Credit) -> list[dict[str, Any]]:
        rendered = [self.model.render(self.prompts.messages[row]) for row in rollouts.rows]
        table, totals, advantages = rollouts.table, rollouts.table.totals, credit.of_answers()
        return [
            {
                "index": i,
                "group": i // self.options.num_generations,
                "prompt": rendered[i // self.options.num_generations],
                "text": completion.text,
                "scores": {
                    name: [score.value, score.reason, score.detail]
                    for name, score in zip(table.names, table.scores[i], strict=True)
                },
                "total": totals[i],
                "advantage": advantages[i],
                "tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            for i, completion in enumerate(rollouts.completions)
        ]


def _reward_metrics(rollouts: Rollouts) -> dict[str, float | None]:
    table, totals = rollouts.table, rollouts.totals
    known = totals[~totals.isnan()]
    metrics: dict[str, float | None] = {
        "reward": float(known.mean()) if len(known) else None,
        "reward_std": float(known.std()) if len(known) > 1 else None,
    }
    for name in table.names:
        values = [score.value for score in table.column(name) if score.value is not None]
        metrics[f"rewards/{name}"] = sum(values) / len(values) if values else None
        metrics[f"rewards/{name}/none"] = 1 - len(values) / len(table.scores)
    return metrics


def _length_metrics(completions: list[Completion]) -> dict[str, float | None]:
    tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "length": tokens / len(completions),
        "truncated": sum(completion.finish_reason == "length" for completion in completions) / len(completions),
    }
