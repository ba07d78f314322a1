"""Several runs in one plotly figure: a metric by step and, beside it, held-out accuracy. For one run see plot.py."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit.store import Record

from .curves import TITLES, record_of
from .heldout import evaluations
from .plot import escaped

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Row = dict[str, Any]

# Told apart also by readers with any of the three kinds of color blindness, each on white: a test simulates them.
COLORS = ("#2f6fde", "#e69f00", "#009e73", "#aa4499", "#b23a1e", "#6cc5f0", "#332288", "#5b1a4a")
DASHES = ("solid", "dash", "dot", "dashdot")  # the next one when the colors begin again
HEIGHT = 460  # pixels
NAMED = 24  # characters of names that fit under a title
SHARES = ("truncated", "dead_groups")
SEEDS = ("seed",)  # options in which two runs may differ and still be the same experiment


@dataclass(frozen=True)
class _Run:
    """What is drawn of one run."""

    name: str
    info: dict[str, Any]
    rows: list[Row]
    held_out: list[Row]


def compare(*runs: Any, metric: str = "reward", smooth: int = 5, held_out: bool = True) -> Figure:
    """One metric of several runs by step: each run a thin line, and a bold one, the mean of its last `smooth` steps.

    runs: of each the `Run`, its `Record`, or the folder that holds its run.sqlite; or one dict {label: run}.
    Without a dict a run is labelled by its algorithm where runs of one algorithm differ in nothing but the seed, else
    by its name; runs with the same label share a color and a place in the legend.
    metric: any column of `run.metrics`: "reward", "kl", "entropy", "length", "rewards/right_answer", …
    held_out: whether to add the accuracy on held-out prompts beside it, when any run was evaluated.
    Raises ValueError for no runs, a metric that no run recorded, runs without a step and `smooth` below 1, TypeError
    for what is no run, FileNotFoundError for a folder without a record.
    """
    if smooth < 1:
        raise ValueError(f"smooth is the number of steps to average over and must be at least 1, got {smooth}")
    drawn, labels = _labelled(runs)
    _check_metric(metric, drawn)
    styles = {label: _style(index) for index, label in enumerate(dict.fromkeys(labels))}
    beside = held_out and any(run.held_out for run in drawn)
    figure = _figure(_titles(metric, drawn, labels, beside))
    for run, label in zip(drawn, labels, strict=True):
        # Who it is under the pointer: with its name where others carry the same label.
        hover = escaped(label if labels.count(label) == 1 else f"{label}, {run.name}")
        _add_curve(figure, run, label, hover, styles[label], metric, smooth)
        if beside:
            _add_accuracy(figure, run, label, hover, styles[label])
    _one_entry_a_label(figure)
    _lay_out(figure, metric)
    return figure


def _labelled(runs: tuple[Any, ...]) -> tuple[list[_Run], list[str]]:
    given = runs[0] if len(runs) == 1 and isinstance(runs[0], dict) else None
    read = [_read(run) for run in (runs if given is None else given.values())]
    if not read:
        raise ValueError("there is nothing to compare: give at least one run, its folder or its record")
    return read, _labels(read) if given is None else [str(label) for label in given]


def _read(run: Any) -> _Run:
    record = _record(run)
    name = getattr(run, "name", None) if not isinstance(run, str | os.PathLike) else None
    return _Run(name or record.path.parent.name, record.run_info(), record.steps(), evaluations(record.events()))


def _record(run: Any) -> Record:
    if isinstance(run, str | os.PathLike):
        path = Path(run) if Path(run).name.endswith(".sqlite") else Path(run) / "run.sqlite"
        if not path.is_file():  # opening would make an empty one
            raise FileNotFoundError(f"there is no record of a run at {path}; give the folder that holds run.sqlite")
        record = Record(path)
        record.close()  # for writing; it can still be read
        return record
    record = record_of(run)
    if not isinstance(record, Record):
        raise TypeError(
            f"{run!r} is no run: give runs, their folders or their records, one after the other "
            "(compare(*runs)), or one dict {label: run}"
        )
    return record


def _labels(runs: list[_Run]) -> list[str]:
    """The algorithms, if there are several and each stands for one experiment; else the runs' names."""
    algorithms = [run.info.get("options", {}).get("algorithm") for run in runs]
    kinds = {repr([_without_seed(run.info.get(part, {})) for part in ("model", "options")]) for run in runs}
    telling = None not in algorithms and 1 < len(set(algorithms)) == len(kinds)
    return [str(label) for label in (algorithms if telling else [run.name for run in runs])]


def _without_seed(options: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted((key, value) for key, value in options.items() if key not in SEEDS)


def _columns(rows: list[Row]) -> set[str]:
    """The metrics that were measured at least once."""
    return {key for row in rows for key, value in row.items() if value is not None} - {"step", "time"}


def _check_metric(metric: str, runs: list[_Run]) -> None:
    found = sorted(set().union(*(_columns(run.rows) for run in runs)))
    if not found:
        raise ValueError("there is nothing to compare: none of the runs has finished a step yet")
    if metric not in found:
        raise ValueError(f"no run recorded {metric!r}; there are {', '.join(found)}")


def _titles(metric: str, runs: list[_Run], labels: list[str], beside: bool) -> list[str]:
    """One or two; a run that has nothing to draw is named rather than left out in silence."""
    named = list(zip(runs, labels, strict=True))
    words, term = TITLES.get(metric, (metric, ""))
    titles = [_title(words, term, [label for run, label in named if metric not in _columns(run.rows)])]
    if beside:
        words, term = TITLES["accuracy"][0], "share of right greedy answers"
        titles.append(_title(words, term, [label for run, label in named if not run.held_out]))
    return titles


def _title(words: str, term: str, lacking: list[str]) -> str:
    names = ", ".join(dict.fromkeys(lacking))
    who = names if len(names) <= NAMED else f"{len(lacking)} of the runs"
    said = "; ".join(part for part in (term, f"not recorded by {who}" if lacking else "") if part)
    return f"{escaped(words)}<br><sup>{escaped(said)}</sup>"


def _style(index: int) -> dict[str, str]:
    return {"color": COLORS[index % len(COLORS)], "dash": DASHES[index // len(COLORS) % len(DASHES)]}


def _figure(titles: list[str]) -> Figure:
    from plotly.subplots import make_subplots  # takes seconds to import, and only a figure needs it

    widths = [0.58, 0.42] if len(titles) == 2 else [1.0]
    return make_subplots(cols=len(titles), subplot_titles=titles, column_widths=widths, horizontal_spacing=0.07)


def _add_curve(
    figure: Figure, run: _Run, label: str, hover: str, style: dict[str, str], metric: str, smooth: int
) -> None:
    values = [row.get(metric) for row in run.rows]
    known = sum(value is not None for value in values)
    if not known:
        return
    at = {"x": [row["step"] for row in run.rows], "name": escaped(label), "legendgroup": label, "row": 1, "col": 1}
    faint = {"line": {"color": style["color"], "width": 1}, "opacity": 0.28, "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(y=values, mode="lines", **faint, **at)
    form = ".1%" if metric in SHARES else ".4~g"
    words = f"{hover} <b>%{{y:{form}}}</b> (this step %{{customdata:{form}}})<extra></extra>"
    bold = {"line": {**style, "width": 2.2}, "mode": "lines+markers" if known == 1 else "lines", "connectgaps": True}
    figure.add_scatter(y=trailing_mean(values, smooth), customdata=values, hovertemplate=words, **bold, **at)


def _add_accuracy(figure: Figure, run: _Run, label: str, hover: str, style: dict[str, str]) -> None:
    if not run.held_out:
        return
    figure.add_scatter(
        x=[row["step"] for row in run.held_out],
        y=[row["accuracy"] for row in run.held_out],
        mode="lines+markers",
        line={**style, "width": 2.2},
        marker={"size": 6},
        cliponaxis=False,
        name=escaped(label),
        legendgroup=label,
        hovertemplate=f"{hover} <b>%{{y:.0%}}</b><extra></extra>",
        row=1,
        col=2,
    )


def trailing_mean(values: list[float | None], count: int) -> list[float | None]:
    """At each value the mean of the last `count` steps' known values; a missing value stays missing."""
    out: list[float | None] = []
    for index, value in enumerate(values):
        known = [one for one in values[max(0, index + 1 - count) : index + 1] if one is not None]
        out.append(None if value is None else sum(known) / len(known))
    return out


def _one_entry_a_label(figure: Figure) -> None:
    """A label is once in the legend, by its first bold line, however many runs and charts carry it."""
    seen: set[str] = set()
    for trace in figure.data:
        if trace.showlegend is None:
            trace.showlegend = trace.legendgroup not in seen
            seen.add(trace.legendgroup)


def _lay_out(figure: Figure, metric: str) -> None:
    # Under the pointer the prefix stands before every step, on the axis at most before the first.
    figure.update_xaxes(title_text="step", rangemode="tozero", tickprefix="step ", showtickprefix="first")
    figure.update_xaxes(ticks="outside", ticklen=6, tickcolor="rgba(0,0,0,0)")  # clear of the other axis' lowest label
    if metric in SHARES:
        figure.update_yaxes(range=[0, 1.02], tickformat=".0%", col=1)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%", col=2)
    figure.update_layout(height=HEIGHT, margin={"l": 50, "r": 20, "t": 70, "b": 80}, template="plotly_white")
    legend = {"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "groupclick": "togglegroup"}
    figure.update_layout(hovermode="x unified", legend=legend)
