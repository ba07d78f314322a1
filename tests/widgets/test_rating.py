"""The rating panel's messages, with a real reward that people give and no front end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_kit.rewards import HumanReward, Rating, RewardSet, human, numeric_match
from grpo_kit.widgets import RatingPanel
from grpo_kit.widgets.rating import AHEAD


class Wire(RatingPanel):
    """A panel whose messages are kept instead of sent; `ask` plays the front end."""

    def __init__(self, asked: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        super().__init__(asked)

    def send(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self.sent.append(content)

    def ask(self, **message: Any) -> dict[str, Any]:
        """The answer, which is the last message: what is pushed comes before it."""
        self.sent.clear()
        self._receive(self, message, [])
        return self.sent[-1]


def score(asked: HumanReward, prompts: list[str], texts: list[str], step: int = 1) -> list[float | None]:
    return [row[0] for row in RewardSet(asked).score(prompts, texts, [{}] * len(texts), step=step).values]


@pytest.fixture
def asked() -> HumanReward:
    made = human(wait=False)
    score(made, ["p", "p", "q", "q"], ["a", "b", "c", "d"])
    return made


def texts(message: dict[str, Any]) -> list[str]:
    return [question["text"] for question in message["questions"]]


def test_a_poll_is_answered_with_what_there_is_to_rate(asked: HumanReward) -> None:
    panel = Wire(asked)
    state = panel.ask(type="poll", version=0)
    assert state["questions"][0] == {"id": 1, "step": 1, "prompt": "p", "text": "a"}
    assert texts(state) == ["a", "b", "c", "d"]
    assert [[one["text"] for one in pair] for pair in state["pairs"]] == [["a", "b"], ["c", "d"]]
    assert state["progress"] == {"waits": False, "rated": 0, "asked": 4, "seconds_left": None}
    assert state["problem"] == ""
    again = panel.ask(type="poll", version=state["version"])
    assert "questions" not in again and again["version"] == state["version"]
    assert again["progress"] == state["progress"]


def test_clicks_reach_the_reward(asked: HumanReward) -> None:
    panel = Wire(asked)
    assert texts(panel.ask(type="rate", id=1, up=True)) == ["b", "c", "d"]
    assert texts(panel.ask(type="rate", id=2, up=False)) == ["c", "d"]
    state = panel.ask(type="prefer", better=4, worse=3)
    assert (state["questions"], state["pairs"]) == ([], [])
    assert [(r.kind, r.text, r.value) for r in asked.ratings] == [
        ("thumb", "a", 1.0),
        ("thumb", "b", 0.0),
        ("pair", "d", 1.0),
    ]
    score(asked, ["r", "r"], ["x", "y"])
    assert texts(panel.ask(type="skip", ids=[5, 6])) == []
    assert len(asked.ratings) == 3


def test_only_the_next_few_are_sent() -> None:
    asked = human(wait=False)
    score(asked, ["p"] * 50, [str(i) for i in range(50)])
    state = Wire(asked).ask(type="poll")
    assert texts(state) == [str(i) for i in range(AHEAD)]
    assert len(state["pairs"]) == AHEAD
    assert state["progress"]["asked"] == 50


def test_what_is_refused_comes_back_in_words(asked: HumanReward) -> None:
    panel = Wire(asked)
    assert "no question 99" in panel.ask(type="rate", id=99, up=True)["problem"]
    assert "same prompt" in panel.ask(type="prefer", better=1, worse=3)["problem"]
    assert asked.ratings == []


def test_a_rating_that_cannot_be_stored_is_said(asked: HumanReward) -> None:
    def full(rating: Rating) -> None:
        raise OSError("no space left on device")

    asked.attach(full, [])
    problem = Wire(asked).ask(type="rate", id=1, up=True)["problem"]
    assert "counts, but it could not be stored: OSError: no space left on device" in problem
    assert len(asked.ratings) == 1


def test_nothing_is_sent_while_nobody_watches(asked: HumanReward) -> None:
    panel = Wire(asked)
    score(asked, ["p"], ["z"])
    assert panel.sent == []


def test_new_questions_are_pushed_to_a_front_end_that_polled(asked: HumanReward) -> None:
    panel = Wire(asked)
    before = panel.ask(type="poll")
    panel.sent.clear()
    panel._pushed_at = 0.0
    score(asked, ["p"], ["z"], step=2)
    (push,) = panel.sent
    assert texts(push)[-1] == "z"
    assert push["version"] > before["version"]


def test_training_that_waits_is_said_and_goes_on_when_all_is_rated() -> None:
    asked = human(time_limit=60)
    panel = Wire(asked)
    results: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: results.append(score(asked, ["p", "p"], ["a", "b"], step=3)))
    thread.start()
    while not panel.ask(type="poll")["progress"]["waits"]:
        thread.join(0.01)
    state = panel.ask(type="rate", id=1, up=True)
    assert (state["progress"]["waits"], state["progress"]["rated"], state["progress"]["asked"]) == (True, 1, 2)
    assert 0 < state["progress"]["seconds_left"] <= 60
    panel.ask(type="rate", id=2, up=False)
    thread.join(20)
    assert results == [[1.0, 0.0]]
    assert not panel.ask(type="poll")["progress"]["waits"]


def test_a_broken_transport_does_not_reach_the_training_thread(asked: HumanReward) -> None:
    panel = Wire(asked)
    panel.ask(type="poll")

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the socket is gone")

    panel.send = broken  # type: ignore[method-assign]
    panel._pushed_at = 0.0
    assert score(asked, ["p"], ["z"]) == [None]
    assert panel._lock.acquire(blocking=False)


def test_the_training_thread_never_waits_for_the_panel(asked: HumanReward) -> None:
    panel = Wire(asked)
    panel.ask(type="poll")
    panel._pushed_at = 0.0
    with panel._lock:
        thread = threading.Thread(target=score, args=(asked, ["p"], ["z"]), daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()


def test_closing_lets_go_of_the_reward(asked: HumanReward) -> None:
    panel = Wire(asked)
    panel.close()
    panel.close()
    assert asked._subscribers == []


def test_it_finds_the_reward_in_a_run() -> None:
    def run(*rewards: Any) -> Any:
        return SimpleNamespace(rewards=RewardSet(*rewards))

    asked = human()
    assert RatingPanel(run(numeric_match(), asked)).human is asked
    with pytest.raises(ValueError, match=r"none of the run's rewards asks people: add grpo_kit\.rewards\.human"):
        RatingPanel(run(numeric_match()))
    with pytest.raises(ValueError, match="several rewards ask people: human, taste"):
        RatingPanel(run(asked, human(name="taste")))
