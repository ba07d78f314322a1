"""A run that people rate: their thumbs teach, are kept, and nobody is waited for after a stop."""

from __future__ import annotations

import threading
import time

import pytest

import grpo_kit as gk
from grpo_kit.rewards import HumanReward, human
from grpo_kit.training import resume
from grpo_kit.training.run_lock import RunLock
from tests.training.helpers import QUICK, SOON, DrawnEngine, adapter, events, letters, same, until


class Person(threading.Thread):
    """Thumbs up for answers of less than 7 numbers, down for the others, until told to leave."""

    def __init__(self, asked):
        super().__init__(daemon=True)
        self.asked, self.leaves = asked, threading.Event()

    def run(self):
        while not self.leaves.wait(0.005):
            for question in self.asked.open():
                self.asked.rate(question.id, short(question.text))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.leaves.set()
        self.join(SOON)


def short(text):
    return len(text.split()) < 7


@pytest.fixture
def begin(model, data, tmp_path):
    model.engine = DrawnEngine()

    def begin(*rewards, **options):
        return gk.train(model, data, gk.RewardSet(*rewards), run_dir=tmp_path / "run", **{**QUICK, **options})

    return begin


def finish(run):
    run.wait(SOON)
    assert run.state == "finished", run.error
    return run


def test_thumbs_are_scores_and_are_kept(begin, model):
    asked, before = human(), adapter(model)
    with Person(asked):
        run = finish(begin(asked, steps=3))
    for step in (1, 2, 3):
        for row in run.record.completions(step):
            assert row["scores"]["human"] == [float(short(row["text"])), "ok", ""]
            assert row["total"] == float(short(row["text"]))
    answers = {(row["prompt"], row["text"]) for step in (1, 2, 3) for row in run.record.completions(step)}
    assert len(run.record.ratings()) == len(run.ratings) == len(answers) == len(asked.ratings)
    assert {row["kind"] for row in run.record.ratings()} == {"thumb"}
    assert {row["step"] for row in run.record.ratings()} == {1, 2, 3}
    assert {row["value"] for row in run.record.ratings()} == {0.0, 1.0}
    assert any(row["grad_norm"] > 0 for row in run.record.steps())
    assert not same(adapter(model), before)


def test_a_rating_given_after_the_run_is_kept_with_it(begin):
    asked = human(time_limit=0.05)
    run = finish(begin(asked, letters, steps=1))
    question = next(iter(asked._closed.values()))
    assert not run.record.ratings()
    asked.rate(question.id, True)
    (kept,) = run.record.ratings()
    assert (kept["text"], kept["value"], kept["step"]) == (question.text, 1.0, 1)
    assert len(run.ratings) == len(asked.ratings) == 1
    with pytest.raises(RuntimeError, match="closed for writing"):
        run.record.add_event("warning", "", 1)  # it was opened for that one only


class Unattachable(HumanReward):
    """As if the record's ratings could not be read."""

    run = None

    def attach(self, keep, known):
        self.run = keep.__self__
        raise OSError("no such ratings")


def test_a_run_that_cannot_reach_its_raters_leaves_nothing_hanging(begin, model, tmp_path):
    asked = Unattachable()
    with pytest.raises(OSError, match="no such ratings"):
        begin(asked)
    assert model.stop_run is None
    assert not asked.run.alive
    RunLock(tmp_path / "run").release()
    with pytest.raises(RuntimeError, match="closed for writing"):
        asked.run.record.add_event("warning", "", 0)
    finish(begin(human(time_limit=0.05), letters, steps=1))  # in the same folder


def test_neither_does_one_that_is_to_be_resumed(begin, model, tmp_path):
    run = finish(begin(human(time_limit=0.05), letters, steps=1))
    asked = Unattachable()
    with pytest.raises(OSError, match="no such ratings"):
        resume(run.directory, model=model, rewards=gk.RewardSet(asked, letters), steps=2)
    assert model.stop_run is None
    RunLock(tmp_path / "run").release()
    with pytest.raises(RuntimeError, match="closed for writing"):
        asked.run.record.add_event("warning", "", 0)
    again = resume(run.directory, model=model, rewards=gk.RewardSet(human(time_limit=0.05), letters), steps=2)
    assert finish(again).step == 2


def test_stop_of_an_ended_run_leaves_another_ones_raters_alone(begin, start):
    asked = human(time_limit=1000)
    with Person(asked):
        first = finish(begin(asked, steps=1))
    second = start(asked, run_dir="second", steps=2)
    until(lambda: asked.progress().waits)
    first.stop()
    assert asked.open()
    with Person(asked):
        finish(second)
    for step in (1, 2):
        assert {row["scores"]["human"][1] for row in second.record.completions(step)} == {"ok"}


def test_a_resumed_run_knows_what_was_said(begin, model, tmp_path):
    """A new reward object, as in a new kernel: what was rated is not asked again."""
    asked = human()
    with Person(asked):
        run = finish(begin(asked, steps=2))
    said = run.record.ratings()
    known = human()
    with Person(known):
        again = finish(resume(run.directory, model=model, rewards=known, steps=3))
    assert again.record.ratings()[: len(said)] == said
    assert [r.text for r in known.ratings][: len(said)] == [row["text"] for row in said]
    assert {row["step"] for row in again.record.ratings()[len(said) :]} == {3}


def test_steps_made_again_are_not_rated_again(begin, model):
    """The checkpoint is older than the last ratings: those of the steps that are made again are there already."""
    asked = human()
    with Person(asked):
        run = finish(begin(asked, steps=2))
    said, first = run.record.ratings(), run.record.completions(2)
    for folder in sorted((run.directory / "checkpoints").iterdir())[1:]:
        folder.rename(folder.with_name("gone"))
    known = human()
    model.reset_adapter()
    again = finish(resume(run.directory, model=model, rewards=known))  # nobody is there to answer
    assert again.record.completions(2) == first
    assert again.record.ratings() == said


def test_the_reward_is_found_again_by_its_recipe(begin, model):
    asked = human(time_limit=0.05, name="taste", weight=2.0)
    run = finish(begin(asked, letters, steps=1))
    again = finish(resume(run.directory, model=model, steps=2))
    found = again.rewards.rewards[0]
    assert (found.name, found.patience, again.rewards.weights["taste"]) == ("taste", 0.05, 2.0)


def test_stop_ends_the_waiting_at_once(begin, model):
    asked = human(time_limit=1000)
    before = adapter(model)
    run = begin(asked, steps=5)
    until(lambda: asked.progress().waits)
    began = time.monotonic()
    run.stop()
    run.wait(SOON)
    assert time.monotonic() - began < 10
    assert (run.state, run.step) == ("stopped", 0)
    assert not asked.open()
    assert same(adapter(model), before)
    with Person(asked):
        assert finish(resume(run.directory, model=model, rewards=asked)).step == 5


def test_a_second_run_does_not_wait_for_the_first_ones_raters(begin, start):
    asked = human(time_limit=1000)
    run = begin(asked, steps=5)
    until(lambda: asked.progress().waits)
    second = start(run_dir="second", steps=1)
    finish(second)
    assert run.state == "stopped"


def test_what_nobody_rates_in_time_does_not_apply(begin, model):
    before = adapter(model)
    run = finish(begin(human(time_limit=0.05), steps=1))
    assert {row["scores"]["human"][1] for row in run.record.completions()} == {"not applicable"}
    assert run.record.steps()[0]["reward"] is None
    assert not events(run, "warning")
    assert same(adapter(model), before)
