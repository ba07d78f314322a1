"""A finished run as an ordinary plotly figure: hover, zoom, `write_html`, `write_image`. Not live; see panel.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .curves import HEX, Card, cards, held_out_cards, marks, record_of
from .svg import Line, smooth
from .warnings import skipped_updates

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLUMNS = 3
ROW_HEIGHT = 310  # pixels


def plot(record_or_run: Any) -> Figure:
    """Reward, every reward function, KL, entropy, length and dead groups by step, with the events marked.

    A run that was evaluated on held-out prompts has a wide chart of that below.
    Takes a `Run` or a `Record`. Raises ValueError when no step is recorded yet.
    """
    from plotly.subplots import make_subplots  # takes seconds to import, and only a finished plot needs it

    record = record_of(record_or_run)
    rows, events = record.steps(), record.events()
    if not rows:
        raise ValueError("there is nothing to plot: the run has not finished a step yet")
    charts = cards(rows) + held_out_cards(events)
    lines = -(-len(charts) // COLUMNS)
    # The one chart of a last row takes all of it.
    wide = [{"colspan": COLUMNS}, *[None] * (COLUMNS - 1)] if len(charts) % COLUMNS == 1 else [{}] * COLUMNS
    figure = make_subplots(
        rows=lines,
        cols=COLUMNS,
        specs=[*[[{}] * COLUMNS] * (lines - 1), wide],
        subplot_titles=[_title(card) for card in charts],
        horizontal_spacing=0.06,
        vertical_spacing=0.32 / lines,
    )
    for index, card in enumerate(charts):
        _add_card(figure, card, 1 + index // COLUMNS, 1 + index % COLUMNS)
    for step, text in marks(events):
        figure.add_vline(x=step, line={"color": HEX["violet"], "dash": "dash", "width": 1})
        for index, card in enumerate(charts):
            _add_mark(figure, card, step, text, 1 + index // COLUMNS, 1 + index % COLUMNS)
    figure.update_xaxes(title_text="step", row=lines)
    figure.update_layout(height=ROW_HEIGHT * lines, margin={"l": 40, "r": 20, "t": 60, "b": 40})
    figure.update_layout(template="plotly_white", hovermode="x")
    figure.update_layout(legend={"orientation": "h", "y": -0.24 / lines, "yanchor": "top"})
    skipped = skipped_updates(rows)
    if skipped:
        figure.update_layout(title={"text": skipped, "font": {"size": 12}, "x": 0.01, "xanchor": "left"}, margin_t=90)
    return figure


def _title(card: Card) -> str:
    value = f": {card.value}" if any(line.exact for line in card.lines) else ""
    return f"{card.title}{value}<br><sup>{card.term}</sup>"


def _add_card(figure: Figure, card: Card, row: int, column: int) -> None:
    at, steps = {"row": row, "col": column}, card.steps
    for line in card.lines:
        color, name = HEX[line.color], escaped(line.name)
        if line.exact:
            dots = {"mode": "lines+markers", "line": {"color": color, "width": 2}, "marker": {"size": 6}}
            figure.add_scatter(x=steps, y=line.values, name=name, hovertemplate="%{y:.0%}", **dots, **at)
            continue
        if line.spread:
            _add_band(figure, line, steps, at)
        faint = {"color": color, "width": 1}
        figure.add_scatter(x=steps, y=line.values, name=name, line=faint, opacity=0.3, showlegend=False, **at)
        bold = {"color": color, "width": 2}
        figure.add_scatter(x=steps, y=smooth(line.values), name=name, line=bold, hoverinfo="skip", **at)
    if card.share:
        figure.update_yaxes(range=[0, 1.02], tickformat=".0%", **at)


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
        hover = {"hovertext": [escaped(text)], "hoverinfo": "text", "showlegend": False, "name": "event"}
        figure.add_scatter(x=[step], y=[top], mode="markers", marker=marker, row=row, col=column, **hover)


def escaped(text: str) -> str:
    """Plotly reads a little HTML in texts; names and events are data."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
