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


def soft_overlong_punishment(
    max_completion_length: int, soft_punish_cache: int, *, weight: float = 1.0, name: str | None = None
) -> Reward:
    """DAPO's soft overlong punishment: 0 up to L_max - L_cache tokens, from there down in a straight
    line to -1 at L_max tokens, and -1 for longer ones. Without token ids it is not applicable.

    max_completion_length: L_max. soft_punish_cache: L_cache, 0 for no slope. Formula: DAPO, arXiv 2503.14476,
    equation 13. ValueError unless 0 <= L_cache <= L_max.
    """
    longest, cache = max_completion_length, soft_punish_cache
    if longest < 1 or not 0 <= cache <= longest:
        raise ValueError(
            "max_completion_length must be at least 1 and soft_punish_cache between 0 and that, "
            f"not {longest!r} and {cache!r}"
        )

    def soft_overlong_punishment(completion_ids: Sequence[int] | None, completion: str) -> Score | float:
        if completion_ids is None:
            return Score(None, "not applicable", "no token ids were given")
        over = len(completion_ids) - (longest - cache)
        return -min(1.0, over / cache if cache else 1.0) if over > 0 else 0.0

    return ready_made(
        soft_overlong_punishment,
        "soft_overlong_punishment",
        weight,
        name,
        max_completion_length=longest,
        soft_punish_cache=cache,
    )


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
