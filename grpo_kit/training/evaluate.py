"""How well a model answers held-out prompts: greedy answers, scored by the rewards given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_kit.data import check_lengths
from grpo_kit.model import Model
from grpo_kit.rewards import RewardSet, ScoreTable
from grpo_kit.rollout import Sampling
from grpo_kit.training.start import Rewards

if TYPE_CHECKING:
    import pandas
    from datasets import Dataset

BATCH = 32


@dataclass(frozen=True)
class Evaluation:
    """Answers and scores of one model on one data set.

    means: of each reward over the answers it applied to; mean: of the weighted totals. None where nothing applied.
    """

    texts: list[str]
    table: ScoreTable
    means: dict[str, float | None]
    mean: float | None

    @property
    def frame(self) -> pandas.DataFrame:
        """One row an answer: its text and its scores."""
        frame = self.table.to_frame()
        frame.insert(0, "text", self.texts)
        return frame

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.means.items() if value is not None)
        return f"<Evaluation of {len(self.texts)} answers: {parts}>"


def evaluate(
    model: Model, data: Dataset, rewards: Rewards, max_completion_length: int = 256, *, adapter: bool = True
) -> Evaluation:
    """Answer every prompt of `data` greedily with the current adapter (or without) and score the answers.

    May be called while a run trains; it takes its turn. Raises ValueError for rewards whose columns are missing and
    for prompts that leave no room for an answer.
    """
    reward_set = rewards if isinstance(rewards, RewardSet) else RewardSet(rewards)
    reward_set.check_columns([name for name in data.column_names if name != "prompt"])
    token_ids = check_lengths(data, model, max_completion_length)
    rows = [dict(row) for row in data]
    prompts = [row.pop("prompt") for row in rows]
    sampling = Sampling(max_tokens=max_completion_length, temperature=0)
    completions = []
    for start in range(0, len(token_ids), BATCH):
        groups = model.complete(token_ids[start : start + BATCH], sampling, adapter=adapter)
        completions += [group[0] for group in groups]
    texts = [completion.text for completion in completions]
    table = reward_set.score(prompts, texts, rows, [completion.token_ids for completion in completions])
    means = {name: _mean([score.value for score in table.column(name)]) for name in table.names}
    return Evaluation(texts, table, means, _mean(table.totals))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
