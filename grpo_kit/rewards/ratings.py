"""What people said about completions: single ratings, and the scores that follow from all of them.

Deliberately plain values: how they are asked for is human.py's, where they are kept the run's record's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KINDS = ("thumb", "pair")

Key = tuple[str, str]  # prompt and completion, as plain text


@dataclass(frozen=True)
class Rating:
    """One judgement of a person's; `dataclasses.asdict` gives JSON values.

    kind: "thumb" (text was found good, value 1.0, or bad, 0.0) or "pair" (text was preferred to other, value 1.0).
    prompt, text, other: plain text; other is None for a thumb. step: the training step that wrote the completion.
    time: seconds since 1970. reward: the name of the reward that asked. ValueError for anything else.
    """

    kind: str
    prompt: str
    text: str
    value: float
    other: str | None = None
    step: int | None = None
    time: float = 0.0
    reward: str = "human"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no kind of rating; use one of {', '.join(KINDS)}")
        if (self.kind == "pair") != (self.other is not None):
            raise ValueError("a pair has two texts, `text` and `other`, and a thumb has `text` alone")
        if self.value not in ((1.0,) if self.kind == "pair" else (0.0, 1.0)):
            raise ValueError(f"a thumb is 1.0 or 0.0, and a pair, its better text first, 1.0, not {self.value!r}")


def last_thumbs(ratings: Iterable[Rating]) -> dict[Key, float]:
    """1.0 or 0.0 for each completion with a thumb; of several thumbs the last one counts."""
    thumbs = [rating for rating in ratings if rating.kind == "thumb"]
    return {(r.prompt, r.text): r.value for r in sorted(thumbs, key=lambda rating: rating.time)}


def human_scores(ratings: Iterable[Rating]) -> dict[Key, float]:
    """A score for each completion that was rated: its last thumb, or else the share of its comparisons that it won.

    That share is an estimate of the completion's win rate, and a coarse one: after a single comparison it is 0 or 1.
    """
    ratings = list(ratings)
    won: dict[Key, int] = {}
    made: dict[Key, int] = {}
    for rating in ratings:
        if rating.other is None:
            continue
        better, worse = (rating.prompt, rating.text), (rating.prompt, rating.other)
        won[better] = won.get(better, 0) + 1
        for key in (better, worse):
            made[key] = made.get(key, 0) + 1
    return {key: won.get(key, 0) / count for key, count in made.items()} | last_thumbs(ratings)


def prompt_text(prompt: Any) -> str:
    """A prompt as a person reads it: a string as it is, messages as `role: content` with an empty line in between."""
    if not isinstance(prompt, (list, tuple)):
        return str(prompt)
    return "\n\n".join(f"{message.get('role', '')}: {_content(message.get('content'))}" for message in prompt)


def _content(content: Any) -> str:
    """A message's content; of one that is a list of parts, the parts of text."""
    if isinstance(content, (list, tuple)):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return "" if content is None else str(content)
