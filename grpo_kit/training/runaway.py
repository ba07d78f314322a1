"""Early warnings: a run's KL, entropy or answer length on its way to where training no longer recovers from.

A pure function of the metrics rows. Levels are medians, which one odd step does not move. A success looks much the same
on these curves (answers shrink to the point, entropy falls, KL grows), so what the reward does meanwhile decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW = 5  # steps that make a level: the first ones are the start, the last ones are now

KL_HIGH = 1.0  # nats per token: far from the start, unless the reward has gone up
KL_EXTREME = 5.0  # nats per token: what it writes now was e⁵ times less likely at the start, whatever the reward says
KL_FAST = 1.3  # times the level of the WINDOW steps before

ENTROPY_GONE = 0.05  # nats per token, and at most a tenth of the start: it writes one answer
ENTROPY_FACTOR = 2.0  # an explosion is this many times the start, and a nat above it
ENTROPY_EXTREME = 5.0  # nats per token: as unsure as between 150 equally likely tokens, whatever the reward says

LENGTH_FACTOR = 2.0  # times the start, still growing, with more and more answers cut off
LENGTH_GROWING = 1.05  # times the level of the WINDOW steps before
TRUNCATED_SHARE = 0.2
LENGTH_GONE = 2.0  # tokens, or a tenth of the start where that is more


@dataclass(frozen=True)
class Runaway:
    """key: "kl", "entropy" or "length"; text: what was seen, why it matters, and what to do."""

    key: str
    text: str


@dataclass(frozen=True)
class _Curve:
    """The levels of one metric."""

    start: float
    before: float  # WINDOW steps ago
    now: float
    spread: float  # standard deviation of the first WINDOW values
    best: float  # the highest single value


def runaways(rows: Sequence[Mapping[str, Any]]) -> list[Runaway]:
    """What is running away after the last of the metrics rows (in step order), at most one warning a key.

    Reads "kl" (mean k3 per token, nats), "entropy" (nats per token), "length" (tokens), "truncated" (share) and
    "reward"; None and missing values are skipped, and a metric with fewer than 10 values says nothing.
    """
    found = [("kl", _kl(rows)), ("entropy", _entropy(rows)), ("length", _length(rows))]
    return [Runaway(key, text) for key, text in found if text is not None]


def _kl(rows: Sequence[Mapping[str, Any]]) -> str | None:
    kl = _curve(rows, "kl")
    if kl is None or kl.now < KL_FAST * kl.before:
        return None
    if not (kl.now >= KL_EXTREME or (kl.now >= KL_HIGH and _reward_stuck(rows))):
        return None
    return (
        f"KL is running away: {kl.now:.2g} nats per token over the last {WINDOW} steps, {kl.before:.2g} over the "
        f"{WINDOW} before, {kl.start:.2g} at the start; {_reward_words(rows)}. That far from the model it started as, "
        "its text soon falls apart. Lower learning_rate or raise beta, and read some answers: a reward that can be "
        "gamed pulls the model away like this."
    )


def _entropy(rows: Sequence[Mapping[str, Any]]) -> str | None:
    entropy = _curve(rows, "entropy")
    if entropy is None:
        return None
    levels = f"{entropy.now:.2g} nats per token over the last {WINDOW} steps, {entropy.start:.2g} at the start"
    if entropy.now <= min(ENTROPY_GONE, entropy.start / 10) and _reward_stuck(rows):
        return (
            f"Entropy has collapsed: {levels}; {_reward_words(rows)}. The model gives nearly the same answer every "
            "time, so a group has nothing to compare and little more is learned. Lower learning_rate, set entropy_coef "
            "above 0 or raise beta, and go back to a checkpoint from before."
        )
    far = entropy.now >= max(ENTROPY_FACTOR * entropy.start, entropy.start + 1)
    if far and (entropy.now >= ENTROPY_EXTREME or _reward_stuck(rows)):
        return (
            f"Entropy is exploding: {levels}; {_reward_words(rows)}. The model grows unsure of every token, and its "
            "text turns to noise. Lower learning_rate, raise beta, and if entropy_coef is set, lower it."
        )
    return None


def _length(rows: Sequence[Mapping[str, Any]]) -> str | None:
    length, truncated = _curve(rows, "length"), _curve(rows, "truncated")
    if length is None:
        return None
    levels = f"{length.now:.3g} tokens on average over the last {WINDOW} steps, {length.start:.3g} at the start"
    if truncated is not None and _grows_into_the_limit(length, truncated):
        return (
            f"Answers are growing into the limit: {levels}, with {truncated.now:.0%} of them cut off "
            f"({truncated.start:.0%} at the start). An answer that is cut off can't be right, and every step takes "
            "longer. Raise max_completion_length if the answers need it; if they ramble, see whether a reward pays for "
            "length, and lower learning_rate."
        )
    if length.now <= min(max(LENGTH_GONE, length.start / 10), length.start / 2) and _reward_stuck(rows):
        return (
            f"Answers have shrunk to almost nothing: {levels}; {_reward_words(rows)}. The model has stopped trying. "
            "Check whether a reward pays for being short or an empty answer scores as well as a wrong one, lower "
            "learning_rate, and go back to a checkpoint from before."
        )
    return None


def _grows_into_the_limit(length: _Curve, truncated: _Curve) -> bool:
    longer = length.now >= LENGTH_FACTOR * length.start and length.now >= LENGTH_GROWING * length.before
    return longer and truncated.now >= TRUNCATED_SHARE and truncated.now >= 2 * truncated.start


def _reward_stuck(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the reward is known, has not risen by more than its early steps differ among themselves, and is not at
    its ceiling: a level that no single step exceeded."""
    reward = _curve(rows, "reward")
    return reward is not None and reward.now - reward.start <= reward.spread and reward.now < reward.best


def _reward_words(rows: Sequence[Mapping[str, Any]]) -> str:
    reward = _curve(rows, "reward")
    return "the reward is unknown" if reward is None else f"the reward went from {reward.start:.2g} to {reward.now:.2g}"


def _curve(rows: Sequence[Mapping[str, Any]], key: str) -> _Curve | None:
    values = [float(value) for row in rows if (value := row.get(key)) is not None and math.isfinite(value)]
    if len(values) < 2 * WINDOW:
        return None
    first = values[:WINDOW]
    return _Curve(
        start=statistics.median(first),
        before=statistics.median(values[-2 * WINDOW : -WINDOW]),
        now=statistics.median(values[-WINDOW:]),
        spread=statistics.pstdev(first),
        best=max(values),
    )
