"""What a run's events say about questions that it does not train on: how many it gets right, and how its answer to
one of them changes. Pure functions of the events.
"""

from __future__ import annotations

from typing import Any

from .words import number, percent

Row = dict[str, Any]

QUIET = ("evaluation", "canary")  # kinds that have a card of their own and would flood a list of events


def evaluations(events: list[Row]) -> list[Row]:
    """One row an evaluation, in step order: {"step", "accuracy", "pass_at_k", "k", …}; step 0 is before training.

    Of two at one step, which a resume leaves, the later counts. One without an accuracy is left out.
    """
    by_step = {event["step"]: event["data"] for event in events if event["kind"] == "evaluation"}
    return [{**data, "step": step} for step, data in sorted(by_step.items()) if data.get("accuracy") is not None]


def accuracy_words(rows: list[Row]) -> str:
    """`now 91 %, before training 22 %`, or what of it is known; `rows` are those of `evaluations`."""
    parts = []
    if rows and rows[-1]["step"] > 0:
        parts.append(f"now {percent(rows[-1]['accuracy'])}")
    if rows and rows[0]["step"] == 0:
        parts.append(f"before training {percent(rows[0]['accuracy'])}")
    return ", ".join(parts)


def tries(rows: list[Row]) -> str:
    """The name of the pass@k line, `within 4 tries`; "" if only greedy answers were drawn."""
    counts = [row["k"] for row in rows if row.get("pass_at_k") is not None]
    return f"within {number(counts[-1])} tries" if counts else ""


def canary(events: list[Row]) -> tuple[str, list[tuple[int, str]]]:
    """The question asked all through the run, and (step, answer), newest first; ("", []) when there is none.

    When the question was changed in between, only what was answered to the newest one.
    """
    asked = [event for event in events if event["kind"] == "canary"]
    if not asked:
        return "", []
    question = asked[-1]["data"]["prompt"]
    answers = {event["step"]: event["data"]["answer"] for event in asked if event["data"]["prompt"] == question}
    return question, sorted(answers.items(), reverse=True)
