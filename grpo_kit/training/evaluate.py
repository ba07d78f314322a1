"""How well a model answers held-out prompts: greedy answers, scored by the rewards given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo_kit.model import Model
from grpo_kit.rewards import HumanReward, Reward, RewardSet, ScoreTable
from grpo_kit.rollout import Completion, Sampling, stream_seed
from grpo_kit.training.prompts import Prompts, ready_prompts

if TYPE_CHECKING:
    import pandas
    from datasets import Dataset

Rewards = RewardSet | Reward | Callable[..., Any]
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

    Rewards that people give are left out. May be called while a run trains; it takes its turn. Raises ValueError for
    rewards whose columns are missing, for none that scores by itself, and for prompts that leave no room for an answer.
    """
    reward_set = without_people(rewards if isinstance(rewards, RewardSet) else RewardSet(rewards))
    reward_set.check_columns([name for name in data.column_names if name != "prompt"])
    prompts = ready_prompts(data, model, max_completion_length)
    sampling = Sampling(max_tokens=max_completion_length, temperature=0)
    return score_answers(reward_set, prompts, answer_all(model, prompts, sampling, adapter=adapter))


def answer_all(
    model: Model,
    prompts: Prompts,
    sampling: Sampling,
    n: int = 1,
    *,
    adapter: bool = True,
    between_tokens: Callable[[], None] | None = None,
) -> list[Completion]:
    """n answers to each prompt, those of one prompt side by side; a batch of about `BATCH` answers at a time."""
    completions: list[Completion] = []
    at_once = max(1, BATCH // n)
    for start in range(0, len(prompts.token_ids), at_once):
        part = replace(sampling, seed=stream_seed(sampling.seed, start))
        groups = model.complete(
            prompts.token_ids[start : start + at_once], part, n, adapter=adapter, between_tokens=between_tokens
        )
        completions += [completion for group in groups for completion in group]
    return completions


def score_answers(
    rewards: RewardSet, prompts: Prompts, completions: list[Completion], step: int | None = None
) -> Evaluation:
    """Score answers as `answer_all` returns them: as many to each prompt."""
    each = [i for i in range(len(prompts.messages)) for _ in range(len(completions) // len(prompts.messages))]
    texts = [completion.text for completion in completions]
    table = rewards.score(
        [prompts.messages[i] for i in each],
        texts,
        [prompts.columns[i] for i in each],
        [completion.token_ids for completion in completions],
        step,
    )
    means = {name: _mean([score.value for score in table.column(name)]) for name in table.names}
    return Evaluation(texts, table, means, _mean(table.totals))


def without_people(rewards: RewardSet) -> RewardSet:
    """The rewards that can score by themselves, with the weights in use. Raises ValueError if there are none."""
    chosen = [reward for reward in rewards.rewards if not isinstance(reward, HumanReward)]
    if not chosen:
        raise ValueError("held-out prompts can't be scored by people alone: add a reward function, or don't evaluate")
    automatic = RewardSet(*chosen)
    for name in automatic.names:
        automatic.set_weight(name, rewards.weights[name])
    return automatic


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
