"""Numbers and times as a reader wants them: few digits, no scientific notation where it can be avoided."""

from __future__ import annotations

import math

MISSING = "–"


def number(value: float | None) -> str:
    """About three significant digits: 163, 12.4, 2.71, 0.031, 5e-06; `–` for None."""
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1 or size == 0:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.3g}" if size < 1e-3 else f"{value:.3f}".rstrip("0")


def percent(share: float | None) -> str:
    """A share of 0..1 as `41 %`."""
    return MISSING if share is None else f"{100 * share:.0f} %"


def clock(seconds: float | None) -> str:
    """`9:41`, or `1:02:07` from an hour on."""
    if seconds is None:
        return MISSING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
