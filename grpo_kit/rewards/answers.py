"""Rewards for the right answer. The gold answer comes from a data column, `answer` unless told otherwise.

Deliberately strict about gold: a gold answer that is empty, or no number where one is needed, makes the reward "not
applicable" rather than right or wrong. What counts as a completion's answer is `final_answer`'s to say.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from grpo_kit.rewards.extraction import final_answer
from grpo_kit.rewards.numbers import equal_numbers, parse_number, to_number
from grpo_kit.rewards.reward import Reward, ready_made
from grpo_kit.rewards.score import Score


def exact_match(*, column: str = "answer", weight: float = 1.0, name: str | None = None) -> Reward:
    """1.0 if the final answer, or the whole completion, is the gold text; case, spacing and outer marks ignored."""

    def exact_match(completion: str, **columns: Any) -> Score | float:
        gold = plain_text(columns[column])
        if not gold:
            return _no_gold(columns[column])
        stated = final_answer(completion)
        if gold in (plain_text(completion), plain_text(stated)):
            return 1.0
        return Score(0.0, "unparseable", "states no answer") if stated is None else wrong(stated, gold)

    return ready_made(exact_match, "exact_match", weight, name, [column], column=column)


def numeric_match(
    *, column: str = "answer", tolerance: float = 0.0, weight: float = 1.0, name: str | None = None
) -> Reward:
    """1.0 if the final answer is the gold number, as `equal_numbers` sees it; relative `tolerance`."""

    def numeric_match(completion: str, **columns: Any) -> Score | float:
        gold = gold_number(columns[column])
        if gold is None:
            return _no_gold(columns[column])
        stated = answer_number(completion)
        if stated is None:
            return unread(completion)
        return 1.0 if equal_numbers(stated, gold, tolerance) else wrong(stated, gold)

    return ready_made(numeric_match, "numeric_match", weight, name, [column], column=column, tolerance=tolerance)


def digits_with_bonus(
    *, number: float = 1.0, right: float = 3.0, column: str = "answer", weight: float = 1.0, name: str | None = None
) -> Reward:
    """`number` if the completion states a number as its answer, and `right` more if it is the gold number."""

    def digits_with_bonus(completion: str, **columns: Any) -> Score | float:
        gold = gold_number(columns[column])
        if gold is None:
            return _no_gold(columns[column])
        stated = answer_number(completion)
        if stated is None:
            return unread(completion)
        if equal_numbers(stated, gold):
            return number + right
        return Score(number, "ok", wrong(stated, gold).detail)

    return ready_made(
        digits_with_bonus, "digits_with_bonus", weight, name, [column], number=number, right=right, column=column
    )


def number_close(*, width: float = 1.0, column: str = "answer", weight: float = 1.0, name: str | None = None) -> Reward:
    """The nearer the final answer x to the gold number g, the more: 1 / (1 + |x - g| / (width · max(1, |g|))).

    1 for the right number, 1/2 at a distance of `width` times the gold number's size, towards 0 far away.
    """
    if not width > 0:
        raise ValueError(f"width must be above 0, not {width!r}")

    def number_close(completion: str, **columns: Any) -> Score | float:
        gold = gold_number(columns[column])
        if gold is None:
            return _no_gold(columns[column])
        stated = answer_number(completion)
        if stated is None:
            return unread(completion)
        return float(1 / (1 + abs(stated - gold) / (Fraction(width) * max(Fraction(1), abs(gold)))))

    return ready_made(number_close, "number_close", weight, name, [column], width=width, column=column)


def answer_number(completion: str, tag: str = "answer") -> Fraction | None:
    """The number that a completion states as its final answer; None if it states none or something else."""
    stated = final_answer(completion, tag)
    return None if stated is None else parse_number(stated)


def gold_number(gold: object) -> Fraction | None:
    """The number a gold answer stands for; also of a worked solution that ends in #### or \\boxed."""
    number = to_number(gold)
    return answer_number(gold) if number is None and isinstance(gold, str) and "\\boxed" in gold else number


def plain_text(value: object) -> str:
    """value as text to compare: no case, single spaces, no outer quotes, brackets, emphasis or full stop."""
    return "" if value is None else " ".join(str(value).casefold().split()).strip(" *_`\"'()$.")


def unread(completion: str) -> Score:
    """The zero of a completion in which no numeric answer can be read."""
    stated = final_answer(completion)
    return Score(0.0, "unparseable", "states no answer" if stated is None else f"{stated[:60]!r} is not one number")


def wrong(stated: object, gold: object) -> Score:
    """The zero of a wrong answer."""
    return Score(0.0, "ok", f"answered {str(stated)[:60]}, right is {str(gold)[:60]}")


def _no_gold(gold: object) -> Score:
    return Score(None, "not applicable", f"the gold answer {str(gold)[:60]!r} cannot be compared")
