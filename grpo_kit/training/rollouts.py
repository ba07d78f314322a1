"""One step's prompts, their sampled answers and scores; and the exchange of groups that teach nothing (DAPO's dynamic
sampling)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kit.algorithms import dead_groups
from grpo_kit.rewards import ScoreTable
from grpo_kit.rollout import Completion


@dataclass(frozen=True)
class Rollouts:
    """P groups of G answers. rows [P]: the data rows asked; completions [P·G] and table (P·G rows) in their order.
    replaced: how many groups of other rows were given up for these."""

    rows: list[int]
    completions: list[Completion]
    table: ScoreTable
    replaced: int = 0

    @property
    def group_size(self) -> int:
        return len(self.completions) // len(self.rows)

    @property
    def totals(self) -> Tensor:
        """The weighted sum of each answer's scores, [P·G], NaN where none applied."""
        return torch.tensor([torch.nan if total is None else total for total in self.table.totals])

    def dead(self, each_reward: bool = False) -> list[bool]:
        """Which groups teach nothing, [P]: those whose totals are alike or, where every reward is normalised by itself,
        whose scores are alike in each reward."""
        return dead_groups(score_tensor(self.table) if each_reward else self.totals, self.group_size).tolist()

    def groups(self, chosen: list[int]) -> Rollouts:
        """Some of the groups."""
        each = [g * self.group_size + i for g in chosen for i in range(self.group_size)]
        scores = [self.table.scores[i] for i in each]
        rows, completions = [self.rows[g] for g in chosen], [self.completions[i] for i in each]
        return Rollouts(rows, completions, ScoreTable(self.table.names, self.table.weights, scores))


def score_tensor(table: ScoreTable) -> Tensor:
    """The unweighted scores, [N, K], NaN where a reward did not apply."""
    return torch.tensor([[torch.nan if value is None else value for value in row] for row in table.values])


def with_live_groups(
    first: Rollouts, rounds: int, draw: Callable[[int, int], Rollouts], each_reward: bool = False
) -> Rollouts:
    """Replace groups that teach nothing (see `Rollouts.dead`), in up to `rounds` rounds; those still dead then stay.

    draw(round, count): `count` new groups. DAPO, https://arxiv.org/abs/2503.14476, equation 11.
    """
    kept = first
    for number in range(1, rounds + 1):
        dead = kept.dead(each_reward)
        if not any(dead):
            break
        fresh = draw(number, sum(dead))
        alive = [g for g, is_dead in enumerate(fresh.dead(each_reward)) if not is_dead]
        kept = _exchanged(kept, [g for g, is_dead in enumerate(dead) if is_dead], fresh.groups(alive))
    return kept


def _exchanged(kept: Rollouts, dead: list[int], fresh: Rollouts) -> Rollouts:
    """With as many of the dead groups as there are fresh ones given up for those; the order of places stays."""
    takes = dict(zip(dead, range(len(fresh.rows)), strict=False))
    size = kept.group_size
    rows, completions, scores = [], [], []
    for place in range(len(kept.rows)):
        source, group = (fresh, takes[place]) if place in takes else (kept, place)
        rows.append(source.rows[group])
        completions += source.completions[group * size : (group + 1) * size]
        scores += source.table.scores[group * size : (group + 1) * size]
    table = ScoreTable(kept.table.names, kept.table.weights, scores)
    return Rollouts(rows, completions, table, kept.replaced + len(takes))
