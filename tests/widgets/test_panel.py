from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_kit.widgets import Panel
from tests.widgets.fake_run import FakeRun


class Wire(Panel):
    """A panel whose messages are kept instead of sent; `ask` plays the front end."""

    def __init__(self, run: FakeRun) -> None:
        self.sent: list[dict[str, Any]] = []
        self.buffers: list[bytes] = []
        super().__init__(run)

    def send(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self.sent.append(content)
        self.buffers += buffers or []

    def ask(self, **message: Any) -> list[dict[str, Any]]:
        self.sent.clear()
        self._receive(self, message, [])
        return list(self.sent)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    made = FakeRun(tmp_path, ready=3, edit_step=2)
    yield made
    made.record.close()


def steps_of(message: dict[str, Any]) -> list[int]:
    return [row["step"] for row in message["rows"]]


def has(message: dict[str, Any]) -> dict[str, int]:
    """What a front end that took only `message` says it has."""
    completions = message["completions"]["step"] if "completions" in message else 0
    return {
        "since": max(steps_of(message), default=message["since"]),
        "events_since": max((event["id"] for event in message["events"]), default=message["events_since"]),
        "completions_step": completions,
        "epoch": message["epoch"],
    }


def test_a_poll_is_answered_with_all_that_is_missing(run: FakeRun) -> None:
    panel = Wire(run)
    (answer,) = panel.ask(type="poll", since=0, events_since=0)
    assert steps_of(answer) == [1, 2, 3]
    assert [event["kind"] for event in answer["events"]] == ["reward edited"]
    assert answer["answer"] is True
    assert answer["completions"]["step"] == 3
    assert len(answer["completions"]["rows"]) == 16
    assert set(answer["completions"]["prompts"]) == {"0", "1", "2", "3"}
    assert "prompt" not in answer["completions"]["rows"][0]

    (again,) = panel.ask(type="poll", **has(answer))
    assert again["rows"] == again["events"] == []
    assert "completions" not in again


def test_status_says_how_long_it_takes_and_what_can_be_set(run: FakeRun) -> None:
    run.set_state("running")
    (answer,) = Wire(run).ask(type="poll")
    status = answer["status"]
    assert (status["state"], status["step"], status["steps"]) == ("running", 3, 300)
    assert status["seconds_per_step"] == pytest.approx(4.8)
    assert status["seconds_left"] == pytest.approx(297 * 4.8)
    assert status["split"]["rollout"] == pytest.approx(4.8 * 0.65)
    assert status["knobs"]["weights"]["right_answer"] == 2.0


def test_nothing_is_sent_or_read_while_nobody_watches(run: FakeRun) -> None:
    panel = Wire(run)
    run.write_step()
    assert panel.sent == []
    assert panel._feed.rows == []


def test_a_step_is_pushed_to_a_front_end_that_polled(run: FakeRun) -> None:
    panel = Wire(run)
    panel.ask(type="poll")
    panel.sent.clear()
    panel._pushed_at = 0.0
    run.write_step()
    (push,) = panel.sent
    assert (push["since"], steps_of(push), push["answer"]) == (3, [4], False)


def test_fast_steps_are_not_pushed_one_by_one_but_a_new_state_is(run: FakeRun) -> None:
    panel = Wire(run)
    panel.ask(type="poll")
    panel.sent.clear()
    run.write_step()
    assert panel.sent == []
    run.set_state("paused")
    (push,) = panel.sent
    assert (push["status"]["state"], steps_of(push)) == ("paused", [4])


def test_the_record_is_not_read_when_nothing_changed(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = Wire(run)
    (answer,) = panel.ask(type="poll")

    def unexpected(*_: Any, **__: Any) -> None:
        raise AssertionError("the record was read")

    for method in ("steps", "events", "completions"):
        monkeypatch.setattr(run.record, method, unexpected)
    (again,) = panel.ask(type="poll", **has(answer))
    assert again["rows"] == []


def test_steps_rewritten_by_a_resume_start_a_new_epoch(run: FakeRun) -> None:
    panel = Wire(run)
    (before,) = panel.ask(type="poll")
    run.record.forget_after(1)
    run.step = 1
    for _ in range(3):
        run.write_step()
    (after,) = panel.ask(type="poll", **has(before))
    assert after["epoch"] == before["epoch"] + 1
    assert (after["since"], steps_of(after)) == (0, [1, 2, 3, 4])
    assert after["rows"][1]["time"] > before["rows"][1]["time"]
    assert [event["step"] for event in after["events"]] == [2]


def test_buttons_call_the_run(run: FakeRun) -> None:
    panel = Wire(run)
    for kind in ("pause", "resume", "stop"):
        (answer,) = panel.ask(type=kind)
        assert answer["type"] == "rows"
    assert [what for _, what in run.calls] == ["pause", "resume", "stop"]


def test_edits_reach_the_run(run: FakeRun) -> None:
    panel = Wire(run)
    taken, answer = panel.ask(type="set", field="learning_rate", value="1e-6")
    assert taken == {"type": "set", "field": "learning_rate", "name": None, "problem": ""}
    assert run.learning_rate == 1e-6
    assert answer["status"]["knobs"]["learning_rate"] == 1e-6
    panel.ask(type="set", field="weight", name="xml_format", value="0.25")
    assert run.weights["xml_format"] == 0.25


@pytest.mark.parametrize(("value", "words"), [("abc", "not a number"), ("7", "between 0 and 1")])
def test_a_refused_value_comes_back_in_words(run: FakeRun, value: str, words: str) -> None:
    refused, answer = Wire(run).ask(type="set", field="learning_rate", value=value)
    assert (refused["type"], refused["field"]) == ("set", "learning_rate")
    assert words in refused["problem"]
    assert answer["status"]["knobs"]["learning_rate"] == run.learning_rate == 5e-6


def test_an_earlier_steps_completions_can_be_asked_for(run: FakeRun) -> None:
    panel = Wire(run)
    (answer,) = panel.ask(type="completions", step=2)
    assert answer["completions"]["step"] == 2
    (nothing,) = panel.ask(type="completions", step=99)
    assert nothing["completions"] is None


def test_plotly_is_sent_as_bytes(run: FakeRun) -> None:
    panel = Wire(run)
    assert panel.ask(type="plotly") == [{"type": "plotly"}]
    (script,) = panel.buffers
    assert b"plotly.js v" in script[:200]
    assert len(script) > 1_000_000


def test_a_broken_transport_does_not_reach_the_training_thread(run: FakeRun) -> None:
    panel = Wire(run)
    panel.ask(type="poll")

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the socket is gone")

    panel.send = broken  # type: ignore[method-assign]
    run.set_state("running")
    assert panel._lock.acquire(blocking=False)


def test_the_training_thread_never_waits_for_the_panel(run: FakeRun) -> None:
    panel = Wire(run)
    panel.ask(type="poll")
    with panel._lock:
        thread = threading.Thread(target=run.set_state, args=("running",), daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()


def test_closing_lets_go_of_the_run(run: FakeRun) -> None:
    panel = Wire(run)
    panel.close()
    panel.close()
    assert run._callbacks == []


def test_a_saved_notebook_gets_the_picture(run: FakeRun) -> None:
    bundle = Panel(run)._repr_mimebundle_()
    assert bundle is not None
    assert "application/vnd.jupyter.widget-view+json" in bundle[0]
    assert 'class="gkp"' in bundle[0]["text/html"]


def test_before_the_first_step_there_is_no_picture(tmp_path: Path) -> None:
    bundle = Panel(FakeRun(tmp_path))._repr_mimebundle_()
    assert bundle is not None
    assert "text/html" not in bundle[0]


def test_evaluations_and_the_same_question_arrive_as_events(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, ready=2, evaluate_every=2, float16=True)
    panel = Wire(run)
    (answer,) = panel.ask(type="poll")
    assert [(event["kind"], event["step"]) for event in answer["events"]] == [
        ("evaluation", 0),
        ("canary", 0),
        ("evaluation", 2),
        ("canary", 2),
    ]
    assert answer["events"][0]["data"]["accuracy"] == pytest.approx(0.22)
    assert answer["status"]["skipped"].startswith("1 update was skipped in 2 steps")
    assert answer["status"]["sampler"] == "sampler and trainer differ by 0.004 nats a token, 0.13 at most"

    run.write_step()
    run.write_step()
    (more,) = panel.ask(type="poll", **has(answer))
    assert [(event["kind"], event["step"]) for event in more["events"]] == [("evaluation", 4), ("canary", 4)]
    (again,) = panel.ask(type="poll", **has(answer))
    assert again["events"] == more["events"]
    run.record.close()


def test_evaluations_of_forgotten_steps_are_gone_in_the_new_epoch(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, ready=4, evaluate_every=2)
    panel = Wire(run)
    (before,) = panel.ask(type="poll")
    run.record.forget_after(2)
    run.step = 2
    run.write_step()
    (after,) = panel.ask(type="poll", **has(before))
    assert (after["epoch"], after["events_since"]) == (before["epoch"] + 1, 0)
    assert [event["step"] for event in after["events"] if event["kind"] == "evaluation"] == [0, 2]
    run.record.close()


def test_a_run_that_skips_nothing_says_nothing_of_it(run: FakeRun) -> None:
    (answer,) = Wire(run).ask(type="poll")
    assert answer["status"]["skipped"] == ""
