"""Rewards for the form of a completion: tagged sections, each once and in order.

Tags are searched for, not matched by one pattern over the text: that is linear in its length and reads over line
breaks. `prefix` is for templates that write the first tag themselves, as "<think>" before the model's first token: what
the template wrote belongs to the completion. A prompt that ends with the opening tag counts the same. Deliberately
nothing here looks at whether the answer is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_kit.rewards.reward import Reward, ready_made
from grpo_kit.rewards.score import Score

REASONING_AND_ANSWER = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def xml_format(
    *,
    reasoning: str = "reasoning",
    answer: str = "answer",
    prefix: str = "",
    weight: float = 1.0,
    name: str | None = None,
) -> Reward:
    """1.0 for <reasoning>…</reasoning> … <answer>…</answer>, each tag exactly once and both filled; else 0.0.

    reasoning, answer: the names of the tags. Text around and between the two sections is let pass.
    """
    tags = section_tags(reasoning, answer)

    def xml_format(completion: str, prompt: Any) -> Score | float:
        problem = format_problem(with_opening(completion, prompt, tags[0], prefix), tags)
        return 1.0 if problem is None else Score(0.0, "ok", problem)

    return ready_made(xml_format, "xml_format", weight, name, reasoning=reasoning, answer=answer, prefix=prefix)


def approximate_format(
    *,
    tags: Sequence[str] = REASONING_AND_ANSWER,
    seen: float = 0.5,
    otherwise: float = -0.5,
    prefix: str = "",
    weight: float = 1.0,
    name: str | None = None,
) -> Reward:
    """For each of `tags`, `seen` if it stands in the completion exactly once, `otherwise` if not.

    tags: as written, such as ["<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>"].
    """
    wanted = list(tags)
    if isinstance(tags, str) or not wanted or not all(wanted):
        raise ValueError(f'tags must be a list of tags as written, such as ["<answer>", "</answer>"], not {tags!r}')

    def approximate_format(completion: str, prompt: Any) -> Score:
        text = with_opening(completion, prompt, wanted[0], prefix)
        missed = [tag for tag in wanted if text.count(tag) != 1]
        value = seen * (len(wanted) - len(missed)) + otherwise * len(missed)
        return Score(value, "ok", f"not exactly once: {' '.join(missed)}" if missed else "")

    options: dict[str, Any] = {"tags": wanted, "seen": seen, "otherwise": otherwise, "prefix": prefix}
    return ready_made(approximate_format, "approximate_format", weight, name, **options)


def section_tags(reasoning: str, answer: str) -> tuple[str, str, str, str]:
    """The four tags of the two sections; ValueError unless the names are two different plain names."""
    if not reasoning or not answer or reasoning == answer or set("<>/") & set(reasoning + answer):
        raise ValueError(f"give two different tag names without < and >, not {reasoning!r} and {answer!r}")
    return f"<{reasoning}>", f"</{reasoning}>", f"<{answer}>", f"</{answer}>"


def format_problem(text: str, tags: Sequence[str]) -> str | None:
    """What is wrong with the sections in `text`, in words, or None.

    tags: opening and closing tag of each section in turn. Each must stand there once, in this order, around some text.
    """
    for tag in tags:
        count = text.count(tag)
        if count != 1:
            return f"{tag} is missing" if count == 0 else f"{tag} is there {count} times"
    places = [text.index(tag) for tag in tags]
    if places != sorted(places):
        return f"the tags are not in the order {' '.join(tags)}"
    for opening, start, end in zip(tags[::2], places[::2], places[1::2], strict=True):
        if not text[start + len(opening) : end].strip():
            return f"nothing stands in {opening}"
    return None


def with_opening(completion: str, prompt: object, opening: str, prefix: str = "") -> str:
    """The completion with what the template wrote for it: `prefix`, or the opening tag the prompt ends with.

    A model that writes the tag once more, at its very beginning, is not held to have written it twice.
    """
    if completion.lstrip().startswith(opening):
        return completion
    if prefix:
        return prefix + completion
    return opening + completion if _prompt_text(prompt).rstrip().endswith(opening) else completion


def _prompt_text(prompt: object) -> str:
    """The prompt's own words before the completion: a text, or an assistant message the completion goes on with."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content") if prompt[-1].get("role") == "assistant" else ""
    return prompt if isinstance(prompt, str) else ""
