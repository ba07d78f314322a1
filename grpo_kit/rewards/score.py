"""What a reward says about a completion: a value, and why that value or why none.

Deliberately not a bare float: a zero that means "wrong", a zero that means "no answer found" and a
missing value after a time-out ask for different remedies, so each keeps its reason.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

REASONS = ("ok", "not applicable", "unparseable", "timeout", "error", "wrong shape", "not finite")

LARGEST = 1e18  # the square of a larger one leaves float32, and the group's deviation with it


@dataclass(frozen=True)
class Score:
    """One reward's verdict on one completion.

    value: the number, unweighted, or None when there is none. reason: one of `REASONS`; a value may carry a
    reason too, `Score(0.0, "unparseable")`. detail: one line for people. ValueError for an unknown reason.
    """

    value: float | None
    reason: str = "ok"
    detail: str = ""

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"{self.reason!r} is no reason; use one of {', '.join(REASONS)}")


def to_score(value: object) -> Score:
    """The Score for whatever a reward function returned for one completion; raises only what `.item()` raises.

    Numbers, booleans and one-element numpy or torch values give their value; None gives "not applicable";
    NaN, infinities and magnitudes above 1e18 give "not finite"; anything else gives "wrong shape".
    """
    if value is None:
        return Score(None, "not applicable")
    if isinstance(value, Score):
        return _checked(value)
    number = _as_float(value)
    if number is None:
        return Score(None, "wrong shape", f"returned {_described(value)}, expected a number, None or a Score")
    if not math.isfinite(number):
        return Score(None, "not finite", f"returned {number}")
    if abs(number) > LARGEST:
        return Score(None, "not finite", f"returned {number:.3g}, too large to train on (the limit is {LARGEST:.0e})")
    return Score(number)


def _checked(score: Score) -> Score:
    """A Score built by a user's function, its value held to the same rules as a bare number."""
    if score.value is None:
        return score if score.reason != "ok" else Score(None, "not applicable", score.detail)
    plain = to_score(score.value)
    return plain if plain.value is None else Score(plain.value, score.reason, score.detail)


def _as_float(value: object) -> float | None:
    """value as a float (infinite where it overflows), or None when it is not one number."""
    if not isinstance(value, (numbers.Real, Decimal)):
        value = _single_item(value)
    if not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _single_item(value: object) -> object:
    """What the one-element array or tensor `value` holds; None for several elements or no array at all."""
    item = getattr(value, "item", None)
    if not callable(item) or getattr(value, "size", 1) == 0:
        return None
    try:
        return item()
    except (ValueError, RuntimeError):  # numpy's and torch's answer to several elements
        return None


def _described(value: object) -> str:
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"


class ScoreTable:
    """The scores of N completions under K rewards.

    names: K names. weights: K weights as they were when scored. scores: [N][K] Score.
    """

    def __init__(self, names: list[str], weights: list[float], scores: list[list[Score]]) -> None:
        self.names = names
        self.weights = weights
        self.scores = scores

    @property
    def values(self) -> list[list[float | None]]:
        """[N][K] unweighted values."""
        return [[score.value for score in row] for row in self.scores]

    @property
    def totals(self) -> list[float | None]:
        """[N] Σ weight·value over the values that are there; None where there is none at all."""
        return [self._total(row) for row in self.scores]

    def column(self, name: str) -> list[Score]:
        """The N scores of the reward called `name`; ValueError if there is none of that name."""
        if name not in self.names:
            raise ValueError(f"no reward is called {name!r}; there are {', '.join(self.names)}")
        place = self.names.index(name)
        return [row[place] for row in self.scores]

    def to_frame(self) -> pandas.DataFrame:
        """One row a completion: each reward's value, `total`, and `reasons` (those that are not "ok", in words)."""
        import pandas

        frame = pandas.DataFrame(self.values, columns=self.names, dtype=float)
        frame["total"] = pandas.Series(self.totals, dtype=float)
        frame["reasons"] = pandas.Series([self._reasons(row) for row in self.scores], dtype=object)
        return frame

    def _total(self, row: list[Score]) -> float | None:
        pairs = zip(self.weights, row, strict=True)
        parts = [weight * score.value for weight, score in pairs if score.value is not None]
        return sum(parts) if parts else None

    def _reasons(self, row: list[Score]) -> str:
        said = [(name, score) for name, score in zip(self.names, row, strict=True) if score.reason != "ok"]
        return "; ".join(f"{n}: {s.reason}" + (f" ({s.detail})" if s.detail else "") for n, s in said)
