"""Recorded rows as pandas DataFrames, for a notebook. pandas is imported only when a frame is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo_kit.store.rows import RATING_KEYS

if TYPE_CHECKING:
    import pandas

BEFORE_SCORES = ("step", "index", "group", "prompt", "text")
AFTER_SCORES = ("total", "advantage", "tokens", "finish_reason", "reasons")


def metrics_to_frame(steps: list[dict[str, Any]]) -> pandas.DataFrame:
    """One row a step. A metric that some steps lack is NaN there."""
    import pandas

    names = list(dict.fromkeys(["step", "time", *(name for row in steps for name in row)]))
    frame = pandas.DataFrame(steps, columns=names)
    return frame.astype({name: "int64" if name == "step" else "float64" for name in names})


def completions_to_frame(completions: list[dict[str, Any]]) -> pandas.DataFrame:
    """One row a completion: step, index, group, prompt, text, one float column per reward, total, advantage, tokens,
    finish_reason, and reasons ("name: reason (detail)" of each score that is not ok, "" if all are).

    A reward's column has the reward's name, or "rewards/<name>" if that name is one of the other columns'.
    """
    import pandas

    names = list(dict.fromkeys(name for row in completions for name in row["scores"]))
    columns = {name: _reward_column(name) for name in names}
    rows = []
    for row in completions:
        values = {columns[name]: score[0] for name, score in row["scores"].items()}
        rows.append({**row, **values, "reasons": _reasons(row["scores"])})
    frame = pandas.DataFrame(rows, columns=[*BEFORE_SCORES, *columns.values(), *AFTER_SCORES])
    return frame.astype({name: "float64" for name in (*columns.values(), "total", "advantage")})


def events_to_frame(events: list[dict[str, Any]]) -> pandas.DataFrame:
    """One row an event; `step` is a nullable integer."""
    import pandas

    frame = pandas.DataFrame(events, columns=["id", "time", "step", "kind", "text", "data"])
    return frame.astype({"id": "int64", "time": "float64", "step": "Int64"})


def ratings_to_frame(ratings: list[dict[str, Any]]) -> pandas.DataFrame:
    """One row a rating; `step` is a nullable integer."""
    import pandas

    frame = pandas.DataFrame(ratings, columns=list(RATING_KEYS))
    return frame.astype({"value": "float64", "step": "Int64", "time": "float64"})


def _reward_column(name: str) -> str:
    return f"rewards/{name}" if name in BEFORE_SCORES + AFTER_SCORES else name


def _reasons(scores: dict[str, list[Any]]) -> str:
    return "; ".join(
        f"{name}: {reason} ({detail})" if detail else f"{name}: {reason}"
        for name, (_, reason, detail) in scores.items()
        if reason != "ok"
    )
