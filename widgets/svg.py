"""Small line charts as SVG text: no script, readable wherever HTML is shown. Not interactive; see plot.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape

from .words import number, percent

WIDTH, HEIGHT = 340, 132
LEFT, RIGHT, TOP, BOTTOM = 34, 8, 8, 18  # room for the axes' numbers
SMOOTHING = 0.15  # weight of the newest value in the smoothed line


@dataclass(frozen=True)
class Line:
    """One curve: y values by step (None leaves a gap), and the half-width of its band if it has one."""

    name: str
    color: str  # a name that the page has a light and a dark color for, as the CSS variable --name
    values: list[float | None]
    spread: list[float | None] | None = None
    exact: bool = False  # few values that each count: dots, and nothing smoothed


def smooth(values: list[float | None]) -> list[float | None]:
    """Exponential mean that starts unbiased (Adam's correction); a None stays None and is skipped over."""
    mean = weight = 0.0
    out: list[float | None] = []
    for value in values:
        if value is None:
            out.append(None)
            continue
        mean += SMOOTHING * (value - mean)
        weight += SMOOTHING * (1 - weight)
        out.append(mean / weight)
    return out


def chart(title: str, steps: list[int], lines: list[Line], marks: list[tuple[int, str]], share: bool = False) -> str:
    """An `<svg>` of `lines` over `steps`, with `marks` (step, text) as dashed lines; `share` fixes the axis to 0..1."""
    low, high = (0.0, 1.0) if share else _bounds(lines)
    first, last = (steps[0], steps[-1]) if steps else (1, 1)

    def at(step: int, value: float) -> str:
        return f"{_x(step, first, last):.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low):.1f}"

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for value in ticks(low, high):
        y = float(at(first, value).split(",")[1])
        text = percent(value) if share else number(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 5}" y="{y + 3}" text-anchor="end">{text}</text>')
    for step in sorted({first, *(round(tick) for tick in ticks(first, last)), last} if last > first else {first}):
        if step != last and last - step < (last - first) / 12:
            continue  # it would run into the last one
        x = _x(step, first, last)
        parts.append(f'<text class="axis" x="{x:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{step}</text>')
    for step, text in marks:
        if not first <= step <= last:
            continue
        x = _x(step, first, last)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
            f"<title>{escape(text)}</title></line>"
        )
    for line in lines:
        parts += _curves(line, steps, at)
    return "".join([*parts, "</svg>"])


def _curves(line: Line, steps: list[int], at: Callable[[int, float], str]) -> Iterator[str]:
    color = f"var(--{line.color})"
    if line.exact:
        yield from _exact(line, steps, at)
        return
    smoothed = smooth(line.values)
    if line.spread:
        wide = zip(steps, smoothed, smooth(line.spread), strict=True)
        band = [(step, value, spread) for step, value, spread in wide if value is not None and spread is not None]
        upper = [at(step, value + spread) for step, value, spread in band]
        lower = [at(step, value - spread) for step, value, spread in reversed(band)]
        yield f'<polygon fill="{color}" opacity=".12" points="{" ".join(upper + lower)}"/>'
    for values, style in ((line.values, 'opacity=".28"'), (smoothed, 'stroke-width="1.8"')):
        points = [at(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
        if len(points) == 1:
            x, y = points[0].split(",")
            yield f'<circle fill="{color}" cx="{x}" cy="{y}" r="2"/>'
        elif points:
            yield f'<polyline fill="none" stroke="{color}" {style} points="{" ".join(points)}"/>'


def _exact(line: Line, steps: list[int], at: Callable[[int, float], str]) -> Iterator[str]:
    color = f"var(--{line.color})"
    points = [at(step, value) for step, value in zip(steps, line.values, strict=True) if value is not None]
    yield f'<polyline fill="none" stroke="{color}" stroke-width="1.8" points="{" ".join(points)}"/>'
    for x, y in (point.split(",") for point in points):
        yield f'<circle fill="{color}" cx="{x}" cy="{y}" r="2.2"/>'


def ticks(low: float, high: float) -> list[float]:
    """Two to five round numbers (1, 2 or 5 times a power of ten apart) within low..high; low < high."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [count * apart for count in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


def _x(step: int, first: int, last: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * ((step - first) / (last - first) if last > first else 0.5)


def _bounds(lines: list[Line]) -> tuple[float, float]:
    values: list[float] = []
    for line in lines:
        values += [value for value in line.values if value is not None]
        if line.spread:
            for middle, spread in zip(smooth(line.values), smooth(line.spread), strict=True):
                if middle is not None and spread is not None:
                    values += [middle - spread, middle + spread]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = (high - low) * 0.04 or abs(high) * 0.1 or 0.5
    return low - room, high + room
