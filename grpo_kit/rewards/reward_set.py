"""The rewards of a run: scored one after another, weighted, and exchangeable while it runs.

Deliberately one after another and not in parallel: the functions are the user's, and need not be thread-safe.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grpo_kit.rewards.reward import Reward, checked_weight
from grpo_kit.rewards.score import ScoreTable
from grpo_kit.rewards.scoring import Batch, score_batch


class RewardSet:
    """K rewards and their weights, which may change between two calls of `score`.

    rewards: Reward objects or plain functions. ValueError for two of the same name or none at all.
    """

    def __init__(self, *rewards: Reward | Callable[..., Any]) -> None:
        self.rewards = [item if isinstance(item, Reward) else Reward(item) for item in rewards]
        if not self.rewards:
            raise ValueError("a RewardSet needs at least one reward")
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'two rewards are called {name!r}; give one of them another name, name="..."')
        self.weights = {item.name: item.weight for item in self.rewards}

    @property
    def names(self) -> list[str]:
        """The K names, in order."""
        return [item.name for item in self.rewards]

    def __repr__(self) -> str:
        return f"RewardSet({', '.join(f'{name} × {weight:g}' for name, weight in self.weights.items())})"

    def set_weight(self, name: str, weight: float) -> None:
        """The weight of reward `name` from the next `score` on; ValueError for an unknown name or no finite number."""
        if name not in self.weights:
            raise ValueError(f"no reward is called {name!r}; there are {', '.join(self.names)}")
        self.weights[name] = checked_weight(weight, name)

    def check_columns(self, columns: Iterable[str]) -> None:
        """ValueError if a reward needs a data column that is not among `columns`."""
        there = list(columns)
        for item in self.rewards:
            for needed in item.columns:
                if needed not in there:
                    raise ValueError(
                        f"reward {item.name!r} needs the data column {needed!r}; "
                        f"the data has {', '.join(there) or 'no columns'}"
                    )

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        rows: Sequence[dict[str, Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        step: int | None = None,
    ) -> ScoreTable:
        """Scores N completions under the K rewards; whatever a reward does, it costs no more than its own scores.

        prompts: N lists of messages or texts. rows: N dicts, the columns of the data row each completion answers.
        completion_ids: N lists of token ids. ValueError if the lengths differ.
        """
        count = len(completions)
        for what, given in (("prompts", prompts), ("rows", rows), ("completion_ids", completion_ids)):
            if given is not None and len(given) != count:
                raise ValueError(f"{count} completions but {len(given)} {what}")
        rewards, weights = list(self.rewards), dict(self.weights)
        batch = Batch(prompts, completions, rows, completion_ids, step)
        columns = [score_batch(item, batch) for item in rewards]  # [K][N]
        return ScoreTable(
            names=[item.name for item in rewards],
            weights=[weights[item.name] for item in rewards],
            scores=[[column[index] for column in columns] for index in range(count)],
        )

    def refresh(self) -> list[str]:
        """Takes over rewards whose definition was run again, as by rerunning a notebook cell.

        Every reward is looked up by its name in the module that defined it. If another Reward or function that can
        serve is bound to that name now, it takes the old one's place, under the old name. Its weight counts only if
        it differs from the weight the old definition gave; a weight set live stays otherwise. Returns the names of
        the rewards replaced.
        """
        replaced = []
        for place, old in enumerate(self.rewards):
            new = _defined_again(old)
            if new is None:
                continue
            if new.weight != old.weight:
                self.weights[old.name] = new.weight
            self.rewards[place] = new
            replaced.append(old.name)
        return replaced


def _defined_again(old: Reward) -> Reward | None:
    """The reward now bound to old's name in old's module, if it is another one; None otherwise."""
    module = sys.modules.get(getattr(old.function, "__module__", None) or "")
    # A function made inside another one is bound to no name of its module.
    if module is None or old.spec is not None or "<locals>" in getattr(old.function, "__qualname__", ""):
        return None
    for name in (getattr(old.function, "__name__", old.name), old.name):
        new = _usable(getattr(module, name, None), old)
        if new is not None:
            same = (new.function, new.weight, new.time_limit) == (old.function, old.weight, old.time_limit)
            return None if same else new
    return None


def _usable(found: object, old: Reward) -> Reward | None:
    """found as a Reward under old's name; None if it cannot serve as one."""
    if isinstance(found, Reward):
        new = copy.copy(found)
        new.name = old.name
        return new
    if not inspect.isfunction(found):
        return None
    try:
        new = Reward(found, weight=old.weight, name=old.name)
    except TypeError:
        return None
    if new.batched == old.batched:  # a plain function says nothing about the limit, so the old one holds
        new.time_limit = old.time_limit
    return new
