from __future__ import annotations

from pathlib import Path

import pytest

from grpo_kit.widgets import plot
from tests.widgets.fake_run import FakeRun


def test_traces_hold_the_recorded_numbers(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, ready=12, edit_step=7)
    figure = plot(run)
    rows = run.record.steps()
    raw = {trace.name: trace for trace in figure.data if trace.opacity == 0.3}
    columns = {"total ± spread": "reward", "right_answer": "rewards/right_answer", "KL": "kl", "entropy": "entropy"}
    columns |= {"length": "length", "all answers scored alike": "dead_groups", "cut off at the limit": "truncated"}
    for name, column in columns.items():
        assert list(raw[name].x) == list(range(1, 13))
        assert list(raw[name].y) == [row[column] for row in rows]


def test_events_are_marked_in_every_chart(tmp_path: Path) -> None:
    figure = plot(FakeRun(tmp_path, ready=12, edit_step=7))
    marks = [trace for trace in figure.data if trace.name == "event"]
    assert len(marks) == 6
    assert {tuple(mark.x) for mark in marks} == {(7,)}
    assert marks[0].hovertext[0] == "reward edited: number_close was edited"


def test_texts_are_not_read_as_html(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, ready=2)
    run.record.add_event("warning", "<a href='javascript:1'>x</a>", 1)
    mark = next(trace for trace in plot(run).data if trace.name == "event")
    assert mark.hovertext[0] == "warning: &lt;a href='javascript:1'&gt;x&lt;/a&gt;"


def test_nothing_to_plot_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not finished a step"):
        plot(FakeRun(tmp_path))


def test_an_evaluated_run_has_a_seventh_chart(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, ready=20, evaluate_every=10, float16=True)
    figure = plot(run)
    (greedy,) = [trace for trace in figure.data if trace.name == "greedy"]
    (within,) = [trace for trace in figure.data if trace.name == "within 4 tries"]
    measured = [event["data"] for event in run.record.events() if event["kind"] == "evaluation"]
    assert list(greedy.x) == list(within.x) == [0, 10, 20]
    assert list(greedy.y) == [data["accuracy"] for data in measured]
    assert list(within.y) == [data["pass_at_k"] for data in measured]
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert len(titles) == 7
    assert "before training 22 %" in titles[6]
    assert "2 updates were skipped in 20 steps" in figure.layout.title.text
    assert not [trace for trace in figure.data if trace.name == "event"], "evaluations are no marks"
