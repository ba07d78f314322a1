"""What a run's record says of its rewards, and how a resumed run finds them again.

Recorded source code is for people to read; it is never run.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from grpo_kit.rewards import Reward, RewardSet, from_spec


def describe(rewards: RewardSet) -> list[dict[str, Any]]:
    """JSON values, one dict a reward; `weight` is the one that its definition gives."""
    return [
        {
            "name": reward.name,
            "weight": reward.weight,
            "time_limit": reward.time_limit,
            "spec": reward.spec,
            "function": _global_name(reward.function),
            "module": getattr(reward.function, "__module__", "__main__"),
            "source": reward.source,
        }
        for reward in rewards.rewards
    ]


def rewards_again(described: list[dict[str, Any]]) -> RewardSet:
    """Ready-made rewards from their recipe, the user's own by name in the notebook or the module they came from.

    Raises ValueError naming those that are not there.
    """
    found = [from_spec(d["spec"]) if d["spec"] else _by_name(d) for d in described]
    missing = [d["name"] for d, reward in zip(described, found, strict=True) if reward is None]
    if missing:
        raise ValueError(
            f"the run was made with reward functions that this notebook does not define yet: {', '.join(missing)}. "
            "Rerun their cells (the run's record keeps their source), or pass rewards="
        )
    return RewardSet(*(reward for reward in found if reward is not None))


def recall_weights(rewards: RewardSet, described: list[dict[str, Any]], last: dict[str, float]) -> None:
    """Give the rewards the weights last in use. A weight that the user has written otherwise since then stays."""
    written = {d["name"]: d["weight"] for d in described}
    for name, weight in last.items():
        if name in written and rewards.weights.get(name) == written[name]:
            rewards.set_weight(name, weight)


def _global_name(function: Any) -> str | None:
    """The name by which a module holds the function; None for a closure, a partial, an object that can be called."""
    plain = inspect.isfunction(function) and "<locals>" not in function.__qualname__
    return function.__name__ if plain else None


def _by_name(described: dict[str, Any]) -> Reward | None:
    """The Reward, or else the function, that stands under the reward's name now."""
    for thing in _bound(described, (described["function"], described["name"])):
        if isinstance(thing, Reward):
            found = copy.copy(thing)
            found.name = described["name"]
            return found
    for thing in _bound(described, (described["function"],)):
        if inspect.isfunction(thing):  # it says nothing of weight and limit, so those of the run hold
            options = {key: described[key] for key in ("name", "weight", "time_limit")}
            return Reward(thing, **options)
    return None


def _bound(described: dict[str, Any], names: tuple[str | None, ...]) -> Iterator[Any]:
    """What the names stand for in the module that the reward came from, and in the notebook."""
    for module in (described["module"], "__main__"):
        for name in names:
            yield getattr(sys.modules.get(module), name or "", None)
