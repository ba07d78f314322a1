"""Which curves a run's charts show, and the words on them; shared by the static picture and the finished plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .heldout import accuracy_words, evaluations, tries
from .svg import Line
from .warnings import reward_names
from .words import number, percent

Row = dict[str, Any]

REWARD_COLORS = ("blue", "green", "orange", "violet", "red", "gray")
HEX = {
    "blue": "#2f6fde",
    "green": "#1a9a6c",
    "orange": "#d9822b",
    "violet": "#8a5cd6",
    "red": "#cf4a4a",
    "gray": "#7a8699",
}
MARKED = ("reward edited", "option changed", "warning", "out of memory")


# Plain words and the field's term for the columns that have a chart of their own.
TITLES = {
    "reward": ("total reward", "mean weighted reward of the step's completions"),
    "kl": ("drift from the untrained model", "KL divergence, k3 estimate per token"),
    "entropy": ("variety", "entropy, nats per token"),
    "length": ("answer length", "mean completion length in tokens"),
    "dead_groups": ("groups with nothing to learn from", "dead groups: all completions of the prompt scored alike"),
    "accuracy": ("held-out accuracy", "greedy answers to prompts kept out of the training; within k tries: pass@k"),
}


@dataclass(frozen=True)
class Card:
    """One chart: its plain-word title, the field's term for it, the newest value in words, its lines over `steps`."""

    title: str
    term: str
    value: str
    lines: list[Line]
    steps: list[int]
    share: bool = False


def cards(rows: list[Row]) -> list[Card]:
    """The six charts of a run from its metrics rows."""
    steps = [row["step"] for row in rows]

    def column(key: str) -> list[float | None]:
        return [row.get(key) for row in rows]

    def newest(key: str) -> float | None:
        return rows[-1].get(key) if rows else None

    names = reward_names(rows)
    by_function = [
        Line(name, REWARD_COLORS[index % len(REWARD_COLORS)], column(f"rewards/{name}"))
        for index, name in enumerate(names)
    ]
    total = Line("total ± spread", "blue", column("reward"), column("reward_std"))
    dead = Line("all answers scored alike", "red", column("dead_groups"))
    cut = Line("cut off at the limit", "gray", column("truncated"))
    length = newest("length")
    tokens = number(length) + " tokens" if length else "–"
    return [
        Card(*TITLES["reward"], number(newest("reward")), [total], steps),
        Card("by reward function", "mean of each reward function, unweighted", "", by_function, steps),
        Card(*TITLES["kl"], number(newest("kl")), [Line("KL", "violet", column("kl"))], steps),
        Card(*TITLES["entropy"], number(newest("entropy")), [Line("entropy", "gray", column("entropy"))], steps),
        Card(*TITLES["length"], tokens, [Line("length", "orange", column("length"))], steps),
        Card(*TITLES["dead_groups"], percent(newest("dead_groups")), [dead, cut], steps, share=True),
    ]


def held_out_cards(events: list[Row]) -> list[Card]:
    """The chart of the run's evaluations on held-out prompts; none if there were none."""
    rows = evaluations(events)
    if not rows:
        return []
    lines = [Line("greedy", "blue", [row["accuracy"] for row in rows], exact=True)]
    if tries(rows):
        lines.append(Line(tries(rows), "green", [row.get("pass_at_k") for row in rows], exact=True))
    return [Card(*TITLES["accuracy"], accuracy_words(rows), lines, [row["step"] for row in rows], share=True)]


def marks(events: list[Row]) -> list[tuple[int, str]]:
    """(step, text) of the events that charts mark, one a step."""
    texts: dict[int, list[str]] = {}
    for event in events:
        if event["kind"] in MARKED and event["step"] is not None:
            texts.setdefault(event["step"], []).append(f"{event['kind']}: {event['text']}")
    return [(step, "; ".join(said)) for step, said in sorted(texts.items())]


def record_of(record_or_run: Any) -> Any:
    """The record itself, or that of a run."""
    return getattr(record_or_run, "record", record_or_run)
