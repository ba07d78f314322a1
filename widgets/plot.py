"""A finished run as an ordinary plotly figure: hover, zoom, `write_html`, `write_image`. Not live; see panel.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .curves import HEX, Card, cards, marks, record_of
from .svg import Line, smooth

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLUMNS = 3


def plot(record_or_run: Any) -> Figure:
    """Reward, every reward function, KL, entropy, length and dead groups by step, with the events marked.

    Takes a `Run` or a `Record`. Raises ValueError when no step is recorded yet.
    """
    from plotly.subplots import make_subplots  # takes seconds to import, and only a finished plot needs it

    record = record_of(record_or_run)
    rows = record.steps()
    if not rows:
        raise ValueError("there is nothing to plot: the run has not finished a step yet")
    steps = [row["step"] for row in rows]
    charts = cards(rows)
    figure = make_subplots(
        rows=-(-len(charts) // COLUMNS),
        cols=COLUMNS,
        subplot_titles=[f"{card.title}<br><sup>{card.term}</sup>" for card in charts],
        horizontal_spacing=0.06,
        vertical_spacing=0.16,
    )
    for index, card in enumerate(charts):
        _add_card(figure, card, steps, 1 + index // COLUMNS, 1 + index % COLUMNS)
    for step, text in marks(record.events()):
        figure.add_vline(x=step, line={"color": HEX["violet"], "dash": "dash", "width": 1})
        for index, card in enumerate(charts):
            _add_mark(figure, card, step, text, 1 + index // COLUMNS, 1 + index % COLUMNS)
    figure.update_xaxes(title_text="step", row=2)
    figure.update_layout(height=620, margin={"l": 40, "r": 20, "t": 60, "b": 40}, template="plotly_white")
    figure.update_layout(legend={"orientation": "h", "y": -0.12}, hovermode="x")
    return figure


def _add_card(figure: Figure, card: Card, steps: list[int], row: int, column: int) -> None:
    at = {"row": row, "col": column}
    for line in card.lines:
        color = HEX[line.color]
        if line.spread:
            _add_band(figure, line, steps, at)
        faint = {"color": color, "width": 1}
        name = _escaped(line.name)
        figure.add_scatter(x=steps, y=line.values, name=name, line=faint, opacity=0.3, showlegend=False, **at)
        bold = {"color": color, "width": 2}
        figure.add_scatter(x=steps, y=smooth(line.values), name=name, line=bold, hoverinfo="skip", **at)
    if card.share:
        figure.update_yaxes(range=[0, 1], tickformat=".0%", **at)


def _add_band(figure: Figure, line: Line, steps: list[int], at: dict[str, int]) -> None:
    middle, spread = smooth(line.values), smooth(line.spread or [])
    known = [(s, m, d) for s, m, d in zip(steps, middle, spread, strict=True) if m is not None and d is not None]
    x = [step for step, _, _ in known]
    edges = [m + d for _, m, d in known] + [m - d for _, m, d in reversed(known)]
    shade = {"fill": "toself", "fillcolor": HEX[line.color], "opacity": 0.12, "line": {"width": 0}}
    figure.add_scatter(x=x + x[::-1], y=edges, hoverinfo="skip", showlegend=False, name="spread", **shade, **at)


def _add_mark(figure: Figure, card: Card, step: int, text: str, row: int, column: int) -> None:
    """A point on top of the dashed line, because plotly's lines across a chart have no hover."""
    values = [value for line in card.lines for value in line.values if value is not None]
    if values:
        top = 1.0 if card.share else max(values)
        marker = {"color": HEX["violet"], "size": 7, "symbol": "diamond"}
        hover = {"hovertext": [_escaped(text)], "hoverinfo": "text", "showlegend": False, "name": "event"}
        figure.add_scatter(x=[step], y=[top], mode="markers", marker=marker, row=row, col=column, **hover)


def _escaped(text: str) -> str:
    """Plotly reads a little HTML in texts; names and events are data."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
