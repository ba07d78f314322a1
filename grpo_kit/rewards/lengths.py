"""Penalties for completions that run too long or repeat themselves. Both are 0 or negative.

Deliberately soft: a cliff at the limit would score alike what missed it by a word and by a page.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_kit.rewards.reward import Reward, ready_made
from grpo_kit.rewards.score import Score

UNITS = ("tokens", "words", "characters")


def length_penalty(
    target: int, *, slack: int | None = None, unit: str = "tokens", weight: float = 1.0, name: str | None = None
) -> Reward:
    """0 up to `target` units, then down in a straight line to -1 at `target + slack` and beyond.

    slack: a quarter of target, unless given. unit: "tokens", "words" or "characters". Without token ids, a penalty
    on tokens is not applicable.
    """
    room = max(1, target // 4) if slack is None else slack
    if target < 1 or room < 1 or unit not in UNITS:
        raise ValueError(f"target and slack must be at least 1 and unit one of {', '.join(UNITS)}")

    def length_penalty(completion: str, completion_ids: Sequence[int] | None) -> Score | float:
        if unit == "tokens" and completion_ids is None:
            return Score(None, "not applicable", "no token ids were given")
        length = _length(completion, completion_ids, unit)
        return -min(1.0, max(0, length - target) / room) or 0.0  # never -0.0

    return ready_made(length_penalty, "length_penalty", weight, name, target=target, slack=slack, unit=unit)


def repetition_penalty(*, ngram: int = 3, most: float = 1.0, weight: float = 1.0, name: str | None = None) -> Reward:
    """-most · (the share of runs of `ngram` words that were there before); 0 for a text shorter than that.

    Words are what spaces separate, without regard to case. Formula: arXiv 2502.03373, section on repetition.
    """
    if ngram < 1 or not most > 0:
        raise ValueError(f"ngram must be at least 1 and most above 0, not {ngram!r} and {most!r}")

    def repetition_penalty(completion: str) -> float:
        words = completion.casefold().split()
        runs = list(zip(*(words[start:] for start in range(ngram)), strict=False))
        return -most * (1 - len(set(runs)) / len(runs)) or 0.0 if runs else 0.0

    return ready_made(repetition_penalty, "repetition_penalty", weight, name, ngram=ngram, most=most)


def _length(completion: str, completion_ids: Sequence[int] | None, unit: str) -> int:
    if unit == "tokens":
        return len(completion_ids or ())
    return len(completion.split()) if unit == "words" else len(completion)
