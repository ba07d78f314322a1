"""One training step, in the order in which the data sees it. Start reading here.

rows → prompts → completions → scores → advantages → updated adapter → one row of metrics and N of completions in the
record. Threads, pauses and checkpoints are not here but in `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kit.algorithms import dead_groups, group_advantages
from grpo_kit.model import Model
from grpo_kit.rewards import RewardSet, ScoreTable
from grpo_kit.rollout import Completion, stream_seed
from grpo_kit.store import Record
from grpo_kit.training.batch import Sequence
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.order import rows_of_step
from grpo_kit.training.update import Updater


@dataclass(frozen=True)
class Prompts:
    """The data, ready to train on: per row the messages, their token ids and the columns that rewards ask for."""

    messages: list[Any]
    token_ids: list[list[int]]
    columns: list[dict[str, Any]]


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
        self.updater = Updater(model, options)

    def step(
        self,
        number: int,
        pause_point: Callable[[], None],
        unwanted: Callable[[bool], bool] = lambda first_try: False,
    ) -> ScoreTable:
        """Make step `number` and write it to the record. Whatever `pause_point` raises leaves the model as after
        the step before; `unwanted` is `Updater.update`'s."""
        started = self.clock()
        rows = rows_of_step(number, len(self.prompts.messages), self.options.prompts_per_step, self.options.seed)
        completions = self._roll_out(number, rows, pause_point)
        rolled_out = self.clock()
        table = self._score(number, rows, completions)
        scored = self.clock()
        totals = torch.tensor([torch.nan if total is None else total for total in table.totals])
        assert self.options.scale_rewards is not None
        advantages = group_advantages(totals, self.options.num_generations, self.options.scale_rewards)
        learned = self.updater.update(self._sequences(rows, completions), advantages, pause_point, unwanted)
        ended = self.clock()
        metrics = {
            **_reward_metrics(table, totals, self.options.num_generations),
            **_length_metrics(completions),
            **learned,
            "learning_rate": self.updater.optimizer.param_groups[0]["lr"],
            "seconds": ended - started,
            "seconds_rollout": rolled_out - started,
            "seconds_reward": scored - rolled_out,
            "seconds_update": ended - scored,
        }
        self.record.write_step(number, metrics, self._completion_rows(rows, completions, table, advantages))
        self.updater.moved = False
        return table

    def _roll_out(self, number: int, rows: list[int], pause_point: Callable[[], None]) -> list[Completion]:
        pause_point()
        groups = self.model.complete(
            [self.prompts.token_ids[row] for row in rows],
            self.options.sampling(seed=stream_seed(self.options.seed, "step", number)),
            self.options.num_generations,
            between_tokens=pause_point,
        )
        return [completion for group in groups for completion in group]

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

    def _sequences(self, rows: list[int], completions: list[Completion]) -> list[Sequence]:
        masked = self.options.mask_truncated_completions
        return [
            Sequence(
                self.prompts.token_ids[rows[i // self.options.num_generations]],
                completion,
                trained=not (masked and completion.finish_reason == "length"),
            )
            for i, completion in enumerate(completions)
        ]

    def _completion_rows(
        self, rows: list[int], completions: list[Completion], table: ScoreTable, advantages: Tensor
    ) -> list[dict[str, Any]]:
        rendered = [self.model.render(self.prompts.messages[row]) for row in rows]
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
                "total": table.totals[i],
                "advantage": float(advantages[i]),
                "tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            for i, completion in enumerate(completions)
        ]


def _reward_metrics(table: ScoreTable, totals: Tensor, num_generations: int) -> dict[str, float | None]:
    known = totals[~totals.isnan()]
    metrics: dict[str, float | None] = {
        "reward": float(known.mean()) if len(known) else None,
        "reward_std": float(known.std()) if len(known) > 1 else None,
        "dead_groups": float(dead_groups(totals, num_generations).float().mean()),
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
        "tokens": float(tokens),
    }
