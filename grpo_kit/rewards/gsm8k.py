"""The five rewards usually given for grade-school maths in <reasoning> and <answer> tags, done carefully.

The format rewards read reasoning of several lines, and whole numbers may be negative or have commas. Deliberately no
data here: see the data room for the questions.
"""

from __future__ import annotations

from typing import Any

from grpo_kit.rewards.answers import answer_number, gold_number, plain_text, unread, wrong
from grpo_kit.rewards.extraction import final_answer, tag_content
from grpo_kit.rewards.formats import format_problem, section_tags, with_opening
from grpo_kit.rewards.numbers import equal_numbers, is_only_number, parse_number
from grpo_kit.rewards.reward import Reward, ready_made
from grpo_kit.rewards.score import Score

PER_TAG = 0.125
PER_TRAILING_CHARACTER = 0.001


def gsm8k_rewards() -> list[Reward]:
    """All five, for `RewardSet(*gsm8k_rewards())`; at most 4.0 together."""
    return [
        gsm8k_correctness(),
        gsm8k_integer(),
        gsm8k_strict_format(),
        gsm8k_soft_format(),
        gsm8k_tag_count(),
    ]


def gsm8k_correctness(
    *, answer: str = "answer", column: str = "answer", weight: float = 1.0, name: str | None = None
) -> Reward:
    """2.0 if the final answer is the gold answer: as a number if gold is one, as text otherwise.

    answer: the name of the answer tag; without tags, `final_answer` finds the answer elsewhere.
    """

    def gsm8k_correctness(completion: str, **columns: Any) -> Score | float:
        gold = columns[column]
        if not plain_text(gold):
            return Score(None, "not applicable", "the gold answer is empty")
        stated = final_answer(completion, answer)
        if stated is None:
            return Score(0.0, "unparseable", "states no answer")
        number = gold_number(gold)
        if number is None:
            return 2.0 if plain_text(stated) == plain_text(gold) else wrong(stated, gold)
        stated_number = answer_number(completion, answer)
        if stated_number is None:
            return unread(stated)
        return 2.0 if equal_numbers(stated_number, number) else wrong(stated, gold)

    return ready_made(gsm8k_correctness, "gsm8k_correctness", weight, name, [column], answer=answer, column=column)


def gsm8k_integer(*, answer: str = "answer", weight: float = 1.0, name: str | None = None) -> Reward:
    """0.5 if the answer tag holds one whole number and nothing else; -3, 1,200 and $5 are such."""

    def gsm8k_integer(completion: str) -> Score | float:
        stated = tag_content(completion, answer)
        if stated is None:
            return Score(0.0, "unparseable", f"has no <{answer}>")
        number = parse_number(stated) if is_only_number(stated) else None
        if number is None or number.denominator != 1:
            return Score(0.0, "ok", f"{stated.strip()[:60]!r} is not a whole number")
        return 0.5

    return ready_made(gsm8k_integer, "gsm8k_integer", weight, name, answer=answer)


def gsm8k_strict_format(
    *,
    reasoning: str = "reasoning",
    answer: str = "answer",
    prefix: str = "",
    weight: float = 1.0,
    name: str | None = None,
) -> Reward:
    """0.5 if each tag stands on a line of its own, in order, once, with text between and none around."""
    tags = section_tags(reasoning, answer)

    def gsm8k_strict_format(completion: str, prompt: Any) -> Score | float:
        text = with_opening(completion, prompt, tags[0], prefix).strip()
        problem = format_problem(text, tags) or _layout_problem(text, tags)
        return 0.5 if problem is None else Score(0.0, "ok", problem)

    return ready_made(
        gsm8k_strict_format, "gsm8k_strict_format", weight, name, reasoning=reasoning, answer=answer, prefix=prefix
    )


def gsm8k_soft_format(
    *,
    reasoning: str = "reasoning",
    answer: str = "answer",
    prefix: str = "",
    weight: float = 1.0,
    name: str | None = None,
) -> Reward:
    """0.5 if the two sections are there, in order and once, whatever the layout and the text around them."""
    tags = section_tags(reasoning, answer)

    def gsm8k_soft_format(completion: str, prompt: Any) -> Score | float:
        problem = format_problem(with_opening(completion, prompt, tags[0], prefix), tags)
        return 0.5 if problem is None else Score(0.0, "ok", problem)

    return ready_made(
        gsm8k_soft_format, "gsm8k_soft_format", weight, name, reasoning=reasoning, answer=answer, prefix=prefix
    )


def gsm8k_tag_count(
    *,
    reasoning: str = "reasoning",
    answer: str = "answer",
    prefix: str = "",
    weight: float = 1.0,
    name: str | None = None,
) -> Reward:
    """0.125 for each of the four tags that stands there exactly once, less 0.001 a character after the last; >= 0."""
    tags = section_tags(reasoning, answer)

    def gsm8k_tag_count(completion: str, prompt: Any) -> float:
        text = with_opening(completion, prompt, tags[0], prefix)
        _, closed, trailing = text.rpartition(tags[-1])
        cost = PER_TRAILING_CHARACTER * len(trailing.strip()) if closed else 0.0
        return max(0.0, PER_TAG * sum(text.count(tag) == 1 for tag in tags) - cost)

    return ready_made(
        gsm8k_tag_count, "gsm8k_tag_count", weight, name, reasoning=reasoning, answer=answer, prefix=prefix
    )


def _layout_problem(text: str, tags: tuple[str, str, str, str]) -> str | None:
    """Why well-formed `text` is not laid out strictly, or None."""
    lines = [line.strip() for line in text.splitlines()]
    for tag in tags:
        if tag not in lines:
            return f"{tag} does not stand on a line of its own"
    if lines[0] != tags[0] or lines[-1] != tags[-1]:
        return "there is text before or after the sections"
    between = lines[lines.index(tags[1]) + 1 : lines.index(tags[2])]
    return "there is text between the sections" if any(between) else None
