"""Turns what the training loop hands over into values that SQLite and JSON can hold.

Not a schema library: four row shapes, checked once, with errors that name the offending value.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

COMPLETION_KEYS = (
    "index", "group", "prompt", "text", "scores", "total", "advantage", "tokens", "finish_reason",
)  # fmt: skip
RATING_KEYS = ("kind", "prompt", "text", "value", "other", "step", "time", "reward")
RATING_KINDS = ("thumb", "pair")


def finite(value: Any, what: str) -> float | None:
    """`value` as a float (numpy and one-element torch values too), or None if it is None, NaN or infinite."""
    if value is None:
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond any float is as little a measurement as infinity
        return None
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a torch tensor of several elements
        raise TypeError(f"{what} must be a number or None, not {value!r}") from error
    return number if math.isfinite(number) else None


def storable(text: Any, what: str) -> str:
    """`text` itself, with U+FFFD for lone surrogates: Python strings may hold them, UTF-8 (so SQLite) may not."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a string, not {text!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def to_json(value: Any, what: str) -> str:
    """Strict JSON text: NaN and infinity become null, numpy and torch scalars become numbers."""
    return json.dumps(_plain(value, what), allow_nan=False)


def metrics_to_json(metrics: Mapping[str, Any]) -> str:
    """A step's metrics as JSON; raises ValueError for a name that is taken by the row itself."""
    taken = {"step", "time"} & set(metrics)
    if taken:
        raise ValueError(f"a metric can't be called {sorted(taken)[0]!r}: every step's row has that already; rename it")
    return to_json({name: finite(value, f"metric {name!r}") for name, value in metrics.items()}, "metrics")


def completion_values(step: int, completions: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """One tuple a completion, in the order (step, *COMPLETION_KEYS)."""
    rows = [_completion(step, position, row) for position, row in enumerate(completions)]
    if len({row[1] for row in rows}) < len(rows):
        raise ValueError(f"step {step}: two completions have the same 'index'; number them from 0 to N-1")
    return rows


def rating_values(
    kind: str,
    prompt: str,
    text: str,
    value: float,
    other: str | None,
    step: int | None,
    when: float | None,
    reward: str,
) -> tuple[Any, ...]:
    """A rating in the order of RATING_KEYS."""
    number = finite(value, "a rating's value")
    if kind not in RATING_KINDS or number not in (0.0, 1.0):
        raise ValueError(f"a rating is a {' or a '.join(RATING_KINDS)} of value 0 or 1, not {kind!r} of {value!r}")
    return (
        storable(kind, "a rating's kind"),
        storable(prompt, "a rating's prompt"),
        storable(text, "a rating's text"),
        number,
        None if other is None else storable(other, "a rating's other text"),
        None if step is None else int(step),
        time.time() if when is None else float(when),
        storable(reward, "a rating's reward"),
    )


def _completion(step: int, position: int, row: Mapping[str, Any]) -> tuple[Any, ...]:
    where = f"step {step}, completion {position}"
    missing = [key for key in COMPLETION_KEYS if key not in row]
    unknown = [key for key in row if key not in COMPLETION_KEYS and key != "step"]
    if missing or unknown:
        raise ValueError(f"{where}: missing {missing}, unknown {unknown}; a completion has {list(COMPLETION_KEYS)}")
    if row.get("step", step) != step:
        raise ValueError(f"{where} says that it is of step {row['step']}")
    return (
        step,
        int(row["index"]),
        int(row["group"]),
        storable(row["prompt"], f"{where}: prompt"),
        storable(row["text"], f"{where}: text"),
        to_json({name: _score(score, f"{where}: score {name!r}") for name, score in row["scores"].items()}, where),
        finite(row["total"], f"{where}: total"),
        finite(row["advantage"], f"{where}: advantage"),
        int(row["tokens"]),
        storable(row["finish_reason"], f"{where}: finish_reason"),
    )


def _score(score: Any, what: str) -> list[Any]:
    try:
        value, reason, detail = score
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must be [value or None, reason, detail], not {score!r}") from error
    return [finite(value, what), storable(reason, what), storable(detail, what)]


def _plain(value: Any, what: str) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return storable(value, what)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {storable(key, f"a key in {what}"): _plain(item, f"{what}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{what}[{place}]") for place, item in enumerate(value)]
    if getattr(value, "ndim", None) == 0:  # numpy and torch scalars
        return _plain(value.item(), what)
    raise TypeError(f"{what} can't be written as JSON: {value!r}; use numbers, strings, lists, dicts or None")
