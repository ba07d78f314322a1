"""The background run: it returns at once, is steered between tokens and micro-batches, and ends cleanly whatever
happens."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from grpo_kit.rewards import RewardSet, reward
from grpo_kit.store import Record
from grpo_kit.training import Run, RunFailed, resume
from grpo_kit.training.checkpoint import checkpoints
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.order import rows_of_step
from grpo_kit.training.prompts import Prompts
from grpo_kit.training.run_lock import RunLock
from tests.training.helpers import QUICK, SOON, adapter, events, letters, numbers, same, until


def test_train_returns_at_once_and_the_run_finishes(start):
    began = time.monotonic()
    run = start(steps=3)
    assert time.monotonic() - began < 5
    assert run.state in ("starting", "running")
    run.wait(SOON)
    assert (run.state, run.step, run.steps, run.alive, run.error) == ("finished", 3, 3, False, None)
    assert [event["kind"] for event in run.record.events()] == ["started", "checkpoint", "checkpoint", "finished"]
    assert run.record.last_step() == 3


def test_metrics_and_completions(start):
    run = start(steps=2)
    run.wait(SOON)
    expected = {
        "reward", "reward_std", "rewards/letters", "rewards/letters/none", "kl", "entropy", "length", "truncated",
        "dead_groups", "clip_ratio", "grad_norm", "learning_rate", "sampler_gap", "tokens", "seconds",
        "seconds_rollout", "seconds_reward", "seconds_update",
    }  # fmt: skip
    assert expected <= set(run.metrics.columns)
    assert list(run.metrics["step"]) == [1, 2]
    assert run.metrics["sampler_gap"].max() < 1e-4  # the model sampled is the model trained
    assert len(run.completions(1)) == len(run.completions()) == 6
    assert set(run.events["kind"]) == {"started", "checkpoint", "finished"}


def test_the_model_learns_and_stays_usable(start, model):
    before = adapter(model)
    run = start(steps=2)
    run.wait(SOON)
    assert not same(adapter(model), before)
    assert isinstance(model.generate("2 + 2?", max_tokens=4), str)
    assert model.stop_run is None


def test_a_stream_is_answered_while_the_run_goes_on_and_does_not_hold_it_up(start, model):
    run = start(steps=1000, learning_rate=1e-6)
    until(lambda: run.step >= 1)
    began = time.monotonic()
    pieces = model.generate("2 + 2?", max_tokens=30, temperature=5.0, seed=1, stream=True)
    next(pieces)
    assert time.monotonic() - began < 5
    step = run.step
    until(lambda: run.step >= step + 2)  # with the stream half read, and open
    assert run.state == "running"
    assert "".join(pieces)
    run.stop()
    run.wait(SOON)


# ---- pause ----


def test_pause_holds_and_resume_goes_on(start, model):
    run = start(steps=50)
    until(lambda: run.step >= 1)
    run.pause()
    until(lambda: run.state == "paused")
    step, elapsed, weights = run.step, run.elapsed, adapter(model)
    assert isinstance(model.generate("2 + 2?", max_tokens=8), str)
    time.sleep(0.3)
    assert (run.step, run.record.last_step(), run.elapsed) == (step, step, elapsed)  # the clock stands still too
    assert same(adapter(model), weights)
    run.resume()
    until(lambda: run.step > step)
    run.stop()
    run.wait(SOON)
    assert [event["kind"] for event in run.record.events() if event["kind"] in ("paused", "resumed")] == [
        "paused",
        "resumed",
    ]
    assert run.elapsed < sum(row["seconds"] for row in run.record.steps()) + 5


def test_a_pause_costs_no_training_time(start, engine):
    box, begun = {}, threading.Event()

    def hold_for_a_second(step, token):
        if (step, token) == (2, 2) and begun.wait(SOON):
            box["run"].pause()
            threading.Timer(1.0, box["run"].resume).start()

    engine.on_token = hold_for_a_second
    run = box["run"] = start(steps=2)
    begun.set()
    run.wait(SOON)
    (paused,), (resumed,) = events(run, "paused"), events(run, "resumed")
    assert resumed["time"] - paused["time"] > 0.9
    first, second = run.record.steps()
    assert second["seconds"] < second["time"] - first["time"] - 0.9
    assert run.elapsed < run.record.events()[-1]["time"] - run.record.events()[0]["time"] - 0.9


def test_resume_right_after_pause_and_pause_again(start):
    run = start(steps=6)
    for _ in range(20):
        run.pause()
        run.resume()
    run.wait(SOON)
    assert run.state == "finished"


def test_a_pause_in_the_middle_changes_no_number(start, engine, model):
    plain = start(run_dir="plain", steps=3)
    plain.wait(SOON)
    weights = adapter(model)
    model.reset_adapter()

    def ask(step, token):
        if token in (1, 4):
            box["run"].pause()
            threading.Timer(0.05, lambda: (model.generate("why?", max_tokens=3), box["run"].resume())).start()

    box, begun = {}, threading.Event()
    engine.on_token = lambda step, token: begun.wait(SOON) and ask(step, token)
    run = box["run"] = start(run_dir="paused", steps=3)
    begun.set()
    run.wait(SOON)
    assert events(run, "paused")
    assert numbers(run) == numbers(plain)
    assert same(adapter(model), weights)


def test_a_checkpoint_can_be_asked_for_while_paused_and_while_running(start):
    run = start(steps=100, checkpoint_every=1000)
    until(lambda: run.step >= 1)
    run.pause()
    until(lambda: run.state == "paused")
    before = len(events(run, "checkpoint"))
    run.checkpoint()
    until(lambda: len(events(run, "checkpoint")) > before)
    assert run.state == "paused"
    assert checkpoints(run.directory)[-1].name == f"step-{run.step:06d}"
    run.resume()
    run.checkpoint()
    until(lambda: len(events(run, "checkpoint")) > before + 1)
    run.stop()
    run.wait(SOON)


# ---- stop ----


@pytest.mark.parametrize("state", ["running", "paused"])
def test_stop_keeps_the_last_finished_step(start, model, state):
    run = start(steps=1000, checkpoint_every=1000)
    until(lambda: run.step >= 2)
    if state == "paused":
        run.pause()
        until(lambda: run.state == "paused")
    run.stop()
    run.wait(SOON)
    run.stop()  # again: nothing
    assert run.state == "stopped"
    assert run.record.last_step() == run.step
    assert checkpoints(run.directory)[-1].name == f"step-{run.step:06d}"
    assert [event["kind"] for event in run.record.events()][-1] == "stopped"
    assert "resumed" not in [event["kind"] for event in run.record.events()]
    assert isinstance(model.generate("2 + 2?", max_tokens=4), str)


def stopped_in(where, start, engine, model, monkeypatch):
    """A run of 4 steps that is told to stop in the middle of its third, and the adapter as it was after the second."""
    box, begun, seen = {}, threading.Event(), {"passes": 0}

    def stop():
        begun.wait(SOON)
        seen["adapter"] = adapter(model)
        box["run"].stop()

    if where == "rollout":
        engine.on_token = lambda step, token: stop() if (step, token) == (3, 3) else None
    else:
        token_outputs = model.token_outputs

        def counted(*args):
            if engine.step == 3 and torch.is_grad_enabled():
                seen["passes"] += 1
                if seen["passes"] == 2:  # the first micro-batch has left its gradient
                    stop()
            return token_outputs(*args)

        monkeypatch.setattr(model, "token_outputs", counted)
    box["run"] = start(steps=4, checkpoint_every=100, tokens_per_micro_batch=1)
    begun.set()
    box["run"].wait(SOON)
    return box["run"], seen["adapter"]


@pytest.mark.parametrize("where", ["rollout", "update"])
def test_stop_in_the_middle_of_a_step_and_resume(start, engine, model, monkeypatch, where):
    whole = start(run_dir="whole", steps=4, checkpoint_every=100, tokens_per_micro_batch=1)
    whole.wait(SOON)
    weights = adapter(model)
    model.reset_adapter()
    engine.step = 0
    run, at_two = stopped_in(where, start, engine, model, monkeypatch)
    assert (run.state, run.step, run.record.last_step()) == ("stopped", 2, 2)
    assert same(adapter(model), at_two)
    assert all(parameter.grad is None for parameter in model.trainable().values())
    assert isinstance(model.generate("2 + 2?", max_tokens=4), str)
    assert checkpoints(run.directory)[-1].name == "step-000002"

    model.reset_adapter()  # whatever happens to the model meanwhile
    again = resume(run.directory, model=model, rewards=letters)
    again.wait(SOON)
    assert (again.state, again.step) == ("finished", 4)
    assert numbers(again) == numbers(whole)
    assert same(adapter(model), weights)


def test_stop_before_the_first_step(start):
    run = start(steps=1000)
    run.stop()
    run.wait(SOON)
    assert run.state == "stopped"
    assert checkpoints(run.directory)


def test_a_second_run_of_the_model_stops_the_first(start, model):
    first = start(run_dir="first", steps=1000)
    until(lambda: first.step >= 1)
    second = start(run_dir="second", steps=2)
    assert first.state == "stopped"
    assert not first.alive
    second.wait(SOON)
    assert second.state == "finished"
    assert first.record.last_step() == first.step


def test_unloading_stops_the_run(start, model):
    run = start(steps=1000)
    until(lambda: run.step >= 1)
    model.unload()
    assert run.state == "stopped"
    assert not run.alive


def test_an_ended_run_holds_no_optimizer(start):
    run = start()
    run.wait(SOON)
    assert not hasattr(run, "_stepper")
    assert run.knobs() == {"learning_rate": 1e-3, "weights": {"letters": 1.0}}
    run.pause(), run.resume(), run.checkpoint(), run.stop()
    assert run.state == "finished"


# ---- changes while it runs ----


def test_options_changed_live_are_recorded_and_used(start):
    def constant(completion):
        return 0.5

    run = start(letters, constant, steps=1000)
    until(lambda: run.step >= 1)
    run.set_learning_rate(5e-4)
    run.set_weight("letters", 3)
    run.set_weight("constant", 0.25)
    assert run.knobs() == {"learning_rate": 5e-4, "weights": {"letters": 3.0, "constant": 0.25}}
    until(lambda: len(events(run, "option changed")) == 3)
    changed = events(run, "option changed")
    until(lambda: run.step >= changed[-1]["step"])
    run.stop()
    run.wait(SOON)
    assert [event["data"] for event in changed] == [
        {"learning_rate": 5e-4},
        {"weight": {"letters": 3.0}},
        {"weight": {"constant": 0.25}},
    ]
    first = changed[0]["step"]
    for row in run.record.steps():
        new = row["step"] >= first
        assert row["learning_rate"] == (5e-4 if new else 1e-3)
        expected = 3 * row["rewards/letters"] + 0.125 if new else row["rewards/letters"] + 0.5
        assert row["reward"] == pytest.approx(expected, rel=1e-5)
    assert run.knobs() == {"learning_rate": 5e-4, "weights": {"letters": 3.0, "constant": 0.25}}
    assert run.record.run_info()["knobs"] == run.knobs()


def test_many_threads_may_turn_the_knobs(start):
    def one(completion):
        return 1.0

    def two(completion):
        return 2.0

    run = start(one, two, steps=5)

    def turn(name):
        for value in range(1, 101):
            run.set_weight(name, value)

    threads = [threading.Thread(target=turn, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.knobs()["weights"] == {"one": 100.0, "two": 100.0}
    run.wait(SOON)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "fast", None])
def test_a_learning_rate_that_makes_no_sense(start, value):
    run = start()
    with pytest.raises(ValueError, match="learning rate must be a number above 0"):
        run.set_learning_rate(value)
    run.wait(SOON)
    assert run.knobs()["learning_rate"] == 1e-3


def test_a_weight_that_makes_no_sense(start):
    run = start()
    with pytest.raises(ValueError, match="no reward named 'leters'; there are letters"):
        run.set_weight("leters", 1)
    for value in (float("nan"), float("inf"), "much", None):
        with pytest.raises(ValueError, match="finite number"):
            run.set_weight("letters", value)
    run.set_weight("letters", -1)  # a penalty is a weight
    run.set_weight("letters", 0)
    run.wait(SOON)


def test_a_reward_cell_that_is_rerun_is_used_from_the_next_step(start, notebook):
    cell = notebook("def mine(completion):\n    return 0.25")
    run = start(cell.mine, letters, steps=1000)
    until(lambda: run.step >= 1)
    notebook("def mine(completion):\n    return 0.75")
    until(lambda: events(run, "reward edited"))
    (edited,) = events(run, "reward edited")
    until(lambda: run.step >= edited["step"])
    run.stop()
    run.wait(SOON)
    assert edited["data"]["name"] == "mine"
    for row in run.record.steps():
        assert row["rewards/mine"] == (0.75 if row["step"] >= edited["step"] else 0.25)


def test_a_reward_repaired_during_a_pause_between_steps_is_used_at_once(start, notebook):
    cell = notebook("def mine(completion):\n    raise ValueError('oh')")
    run = start(cell.mine, letters, steps=2, on_reward_error="pause")
    until(lambda: run.state == "paused")
    assert run.step == 1
    notebook("def mine(completion):\n    return 0.75")
    run.set_learning_rate(1e-4)
    run.resume()
    run.wait(SOON)
    first, second = run.record.steps()
    assert (first["rewards/mine"], second["rewards/mine"]) == (None, 0.75)
    assert second["learning_rate"] == 1e-4


# ---- questions, subscribers, waiting ----


def test_a_question_is_answered_while_the_run_goes_on(start, model):
    run = start(steps=1000)
    until(lambda: run.step >= 1)
    answers = model.generate(["2 + 2?", "3 + 3?"], max_tokens=12)
    assert run.alive
    assert len(answers) == 2
    step = run.step
    until(lambda: run.step > step)  # and it does go on
    run.stop()
    run.wait(SOON)


def test_questions_change_no_number(start, model):
    plain = start(run_dir="plain", steps=3)
    plain.wait(SOON)
    model.reset_adapter()
    asked = start(run_dir="asked", steps=3)
    while asked.alive:
        model.generate("why?", max_tokens=3)
        model.generate("why?", max_tokens=3, adapter=False)
    assert numbers(asked) == numbers(plain)


def test_a_reward_may_ask_the_model(start, model):
    def judged(completion):
        return len(model.generate("good? " + completion[:3], max_tokens=2, temperature=0)) / 10

    run = start(judged, letters, steps=1)
    run.wait(SOON)
    assert run.record.steps()[0]["rewards/judged/none"] == 0


def test_subscribers_are_called_until_they_leave(start):
    run = start(steps=1000)
    seen = []
    leave = run.subscribe(lambda: seen.append((threading.current_thread().name, run.state, run.step)))
    until(lambda: len(seen) > 5)
    leave()
    leave()  # again: nothing
    run.pause()
    until(lambda: run.state == "paused")
    count = len(seen)
    run.stop()
    run.wait(SOON)
    assert len(seen) == count
    assert {name for name, _, _ in seen} == {f"grpo-kit {run.name}"}
    assert len({step for _, _, step in seen}) > 1


def test_a_subscriber_that_raises_is_dropped_and_the_run_goes_on(start):
    run = start(steps=1000)
    calls = []

    def broken():
        calls.append(1)
        raise RuntimeError("no such widget")

    run.subscribe(broken)
    until(lambda: events(run, "warning"))
    step = run.step
    until(lambda: run.step > step + 1)
    run.stop()
    run.wait(SOON)
    assert run.state == "stopped"
    assert len(calls) == 1
    (warning,) = events(run, "warning")
    assert "RuntimeError: no such widget" in warning["text"]


def test_wait_gives_up_in_time_and_a_run_goes_on(start):
    run = start(steps=1000)
    run.wait(0.3)
    assert run.alive
    run.stop()
    run.wait(SOON)


def test_an_interrupt_ends_the_waiting_and_not_the_run(start):
    run = start(steps=1000)
    threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(SOON)
    assert run.alive
    step = run.step
    until(lambda: run.step > step)
    run.wait(0.2)
    assert run.alive
    run.stop()
    run.wait(SOON)
    assert run.state == "stopped"


# ---- failing ----


class FullDisk(Record):
    """A record that has no room from some step on."""

    def __init__(self, path, broken_from: int):
        super().__init__(path)
        self.broken_from, self.full = broken_from, False

    def write_step(self, step, metrics, completions):
        self.full = step >= self.broken_from
        if self.full:
            raise OSError("no space left on device")
        super().write_step(step, metrics, completions)

    def add_event(self, *args, **kwargs):
        if self.full:
            raise OSError("no space left on device")
        return super().add_event(*args, **kwargs)


def a_run(model, directory, record, **options):
    chosen, settings = derive(TrainOptions(**{**QUICK, **options}), on_gpu=False)
    prompts = Prompts(["2 + 2?"], [model.encode("2 + 2?")], [{}])
    return Run(model, prompts, None, RewardSet(letters), chosen, settings, record, directory, RunLock(directory))


def test_a_run_that_fails_says_so_and_leaves_the_model_usable(model, tmp_path):
    run = a_run(model, tmp_path, FullDisk(tmp_path / "run.sqlite", broken_from=2))
    run.start()
    with pytest.raises(RunFailed, match=r"(?s)failed after step 1:.*write_step.*no space left on device"):
        run.wait(SOON)
    assert (run.state, run.step, run.alive) == ("failed", 1, False)
    assert "no space left" in run.error
    assert model.stop_run is None
    assert all(parameter.grad is None for parameter in model.trainable().values())
    assert isinstance(model.generate("2 + 2?", max_tokens=4), str)
    RunLock(tmp_path).release()  # and the folder is free


def test_a_step_that_fails_before_its_update_keeps_the_step_before(start, model, engine, tmp_path):
    def fail_in_the_third(step, token):
        if step == 3:
            raise torch.OutOfMemoryError("no memory left")

    engine.on_token = fail_in_the_third
    run = start(steps=4, checkpoint_every=100)
    with pytest.raises(RunFailed, match=r"(?s)no memory left.*num_generations"):
        run.wait()
    assert checkpoints(run.directory)[-1].name == "step-000002"
    engine.on_token = lambda step, token: None
    again = resume(run.directory, model=model, rewards=letters)
    again.wait()
    assert [row["step"] for row in again.record.steps()] == [1, 2, 3, 4]


def test_a_failure_is_an_event_when_the_record_can_hold_it(start, model, engine):
    def fail(step, token):
        raise RuntimeError("CUDA out of memory")

    engine.on_token = fail
    run = start()
    with pytest.raises(RunFailed, match="after step 0"):
        run.wait(SOON)
    assert events(run, "failed")[0]["text"] == "RuntimeError: CUDA out of memory"
    engine.on_token = lambda step, token: None
    again = resume(run.directory, model=model, rewards=letters)
    again.wait(SOON)
    assert again.state == "finished"


def test_a_full_disk_at_the_end_is_a_failure(model, tmp_path):
    record = FullDisk(tmp_path / "run.sqlite", broken_from=99)
    run = a_run(model, tmp_path, record, steps=1)
    run.subscribe(lambda: setattr(record, "full", run.step == 1))
    run.start()
    with pytest.raises(RunFailed, match="no space left"):
        run.wait(SOON)


# ---- rewards that misbehave ----


def raises(completion):
    raise RuntimeError("division by cucumber")


def hangs(completion):
    time.sleep(30)


def short(completions, **kwargs):
    return [1.0]


HOSTILE = [
    (reward(raises), "error", "division by cucumber"),
    (reward(hangs, time_limit=0.05), "timeout", "more than 0.05 s"),
    (reward(lambda completion: float("nan"), name="not_a_number"), "not finite", "nan"),
    (reward(short), "wrong shape", "1 values for 6"),
    (reward(lambda completion: "good", name="words"), "wrong shape", "the text 'good'"),
]


@pytest.mark.parametrize(("hostile", "reason", "detail"), HOSTILE, ids=[r.name for r, _, _ in HOSTILE])
def test_a_hostile_reward_costs_its_own_scores_only(start, hostile, reason, detail):
    run = start(hostile, letters, steps=2)
    run.wait(SOON)
    assert run.state == "finished"
    for row in run.record.completions(2):
        value, said, why = row["scores"][hostile.name]
        assert (value, said) == (None, reason)
        assert why
        assert row["total"] == row["scores"]["letters"][0]
    assert reason in run.completions(1).to_string()
    (warning,) = events(run, "warning")  # once, not once a step
    assert f"{hostile.name}: {reason} in 6 of 6 answers" in warning["text"]
    assert detail in warning["text"]
    for row in run.record.steps():
        assert row[f"rewards/{hostile.name}"] is None
        assert row[f"rewards/{hostile.name}/none"] == 1
        assert row["grad_norm"] > 0  # the other reward still teaches


def test_a_reward_that_does_not_apply_is_no_warning(start):
    run = start(reward(lambda completion: None, name="shy"), letters, steps=2)
    run.wait(SOON)
    assert run.state == "finished"
    assert not events(run, "warning")
    assert run.record.completions()[0]["scores"]["shy"][:2] == [None, "not applicable"]


def test_with_no_score_at_all_nothing_is_learned(start, model):
    before = adapter(model)
    run = start(reward(lambda completion: None, name="shy"), steps=2)
    run.wait(SOON)
    assert [row["reward"] for row in run.record.steps()] == [None, None]
    assert [row["dead_groups"] for row in run.record.steps()] == [1, 1]
    assert same(adapter(model), before)


def test_on_reward_error_pause(start):
    run = start(raises, letters, steps=3, on_reward_error="pause")
    until(lambda: run.state == "paused")
    assert run.step == 1
    run.resume()
    run.wait(SOON)  # known by now: no second pause
    assert run.state == "finished"
    assert len(events(run, "paused")) == 1


def test_failures_in_groups_that_are_replaced_are_warnings_too(start):
    """Both groups drawn first fail, so both are replaced, and no answer kept tells of it."""
    failing = {row + 1 for row in rows_of_step(1, 5, 2, seed=0)}  # their answers

    def uneven(completion, answer):
        if answer in failing:
            raise RuntimeError("division by cucumber")
        return letters(completion)

    run = start(uneven, steps=1, algorithm="dapo")
    run.wait(SOON)
    (row,) = run.record.steps()
    assert row["refilled_groups"] == 2
    assert {row["scores"]["uneven"][1] for row in run.record.completions()} == {"ok"}
    (warning,) = events(run, "warning")
    assert "uneven: error in 6 of 12 answers" in warning["text"]
    assert "division by cucumber" in warning["text"]
