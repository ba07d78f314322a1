"""`train` and `resume`: what is refused, what is written, and how a run goes on, here and in another process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import grpo_kit as gk
from grpo_kit.rewards import number_close, reward
from grpo_kit.store import Record
from grpo_kit.training import resume
from grpo_kit.training.checkpoint import checkpoints
from grpo_kit.training.run_lock import RunLock
from tests.training.helpers import QUICK, SOON, adapter, events, letters, numbers, same, until

ROOT = Path(__file__).resolve().parents[2]


def finish(run):
    run.wait(SOON)
    assert run.state == "finished"
    return run


# ---- train ----


def test_an_unknown_option_names_the_close_one(start):
    with pytest.raises(ValueError, match="no option 'learning_rte'; did you mean 'learning_rate'"):
        start(learning_rte=1e-5)
    with pytest.raises(ValueError, match="no option 'zzz'; it has steps, prompts_per_step"):
        start(zzz=1)


def test_refused_before_a_live_run_is_stopped(start, model, data, tmp_path):
    run = start(steps=1000)
    until(lambda: checkpoints(run.directory))

    def needs(completion, solution):
        return 0.0

    long = gk.data.from_rows([{"prompt": "x" * 100, "answer": 1}])
    with pytest.raises(ValueError, match="learning_rate"):
        start(run_dir="other", learning_rate=0)
    with pytest.raises(ValueError, match="needs the data column 'solution'"):
        start(needs, run_dir="other")
    with pytest.raises(ValueError, match="must be shorter"):
        gk.train(model, long, letters, run_dir=tmp_path / "other", **QUICK)
    with pytest.raises(ValueError, match="no rows"):
        gk.train(model, data.select([]), letters, run_dir=tmp_path / "other", **QUICK)
    with pytest.raises(ValueError, match=r"holds a run already: go on with it by resume\("):
        start(run_dir="run")
    assert run.alive
    assert not (tmp_path / "other").exists()


def test_the_record_says_what_was_trained_with_what(start, model):
    run = finish(start(letters, number_close(weight=0.5), steps=1, scale_rewards="batch"))
    info = run.record.run_info()
    assert (info["options"]["steps"], info["options"]["scale_rewards"]) == (1, "batch")
    assert info["model"]["name_or_path"] == model.options.name_or_path
    derived = {setting["name"] for setting in info["settings"]}
    assert {"epsilon_high", "beta"} <= derived
    assert not {"scale_rewards", "tokens_per_micro_batch"} & derived  # those were set
    assert [setting.name for setting in run.settings] == [setting["name"] for setting in info["settings"]]
    plain, made = info["rewards"]
    assert (plain["name"], plain["weight"], plain["spec"], plain["function"]) == ("letters", 1.0, None, "letters")
    assert "def letters" in plain["source"]
    assert made["spec"][0] == "number_close"
    assert {"torch", "transformers", "python"} <= set(info["versions"])
    assert info["hardware"]["device"] == "cpu"


def test_folders_of_runs_that_begin_in_the_same_second(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [gk.train(model, data, letters, **{**QUICK, "steps": 1000}) for _ in range(3)]
    monkeypatch.chdir("/")  # where the notebook goes afterwards is indifferent
    runs[-1].stop()
    runs[-1].wait(SOON)
    assert len({run.directory for run in runs}) == 3
    assert {run.directory.parent for run in runs} == {tmp_path / "runs"}
    assert all(run.state == "stopped" and checkpoints(run.directory) for run in runs)


def test_training_prints_nothing(start, capfd):
    capfd.readouterr()
    run = start(steps=1)
    until(lambda: not run.alive)
    assert capfd.readouterr() == ("", "")


# ---- resume ----


def test_resume_goes_on_with_the_same_numbers(start, model):
    whole = finish(start(run_dir="whole", steps=4, num_iterations=2, beta=0.05))
    weights = adapter(model)
    model.reset_adapter()
    part = finish(start(run_dir="part", steps=2, num_iterations=2, beta=0.05))
    model.reset_adapter()
    again = finish(resume(part.directory, model=model, rewards=letters, steps=4))
    assert numbers(again) == numbers(whole)
    assert same(adapter(model), weights)
    for step in (1, 2, 3, 4):
        assert again.record.completions(step) == whole.record.completions(step)
    assert again.elapsed > part.elapsed
    assert events(again, "resumed")[0]["text"] == "from step 3 of 4"
    assert again.settings == part.settings
    assert again.record.run_info()["options"]["steps"] == 4  # so that the next resume knows


def test_steps_after_the_checkpoint_are_made_again(start, model):
    run = finish(start(steps=3))
    before = numbers(run)
    shutil.rmtree(run.directory / "checkpoints" / "step-000003")
    again = finish(resume(run.directory, model=model, rewards=letters))
    assert events(again, "resumed")[0]["text"] == "from step 1 of 3"
    assert numbers(again) == before


def test_resume_of_a_live_run_stops_it_and_goes_on_from_there(start, model):
    run = start(steps=1000, checkpoint_every=1000)
    until(lambda: run.step >= 2)
    again = resume(run.directory, model=model, rewards=letters)
    assert run.state == "stopped"
    until(lambda: events(again, "resumed"))
    assert events(again, "resumed")[0]["text"] == f"from step {run.step + 1} of 1000"
    again.stop()
    again.wait(SOON)


def test_resume_of_a_finished_run_has_nothing_to_do(start, model):
    run = finish(start(steps=2))
    again = finish(resume(run.directory, model=model, rewards=letters))
    assert (again.step, again.record.last_step()) == (2, 2)
    assert events(again, "resumed")[0]["text"] == "all steps are made"
    with pytest.raises(ValueError, match="has made 2 steps already, so it can't end at 1"):
        resume(run.directory, model=model, rewards=letters, steps=1)
    assert not again.alive
    assert finish(resume(run.directory, model=model, rewards=letters, steps=3)).record.last_step() == 3


def test_what_was_changed_live_survives(start, model):
    run = start(letters, number_close(weight=0.5), steps=1000, checkpoint_every=1000)
    run.set_weight("letters", 4)
    run.set_weight("number_close", 0)
    run.set_learning_rate(2e-4)
    until(lambda: len(events(run, "option changed")) == 3)
    run.stop()
    run.wait(SOON)
    again = resume(run.directory, model=model, rewards=gk.RewardSet(letters, number_close(weight=0.5)))
    assert again.knobs() == {"learning_rate": 2e-4, "weights": {"letters": 4.0, "number_close": 0.0}}
    step = again.step
    until(lambda: again.step > step)
    again.stop()
    again.wait(SOON)
    assert again.record.steps()[-1]["learning_rate"] == 2e-4


def test_it_survives_a_kill_after_the_checkpoint_too(start, model):
    """The change comes after the only checkpoint there is left."""
    run = start(steps=1000, checkpoint_every=1000)
    until(lambda: run.step >= 1)
    run.set_weight("letters", 4)
    until(lambda: events(run, "option changed"))
    run.stop()
    run.wait(SOON)
    shutil.rmtree(checkpoints(run.directory)[-1])
    again = resume(run.directory, model=model, rewards=letters)
    assert again.knobs()["weights"] == {"letters": 4.0}
    until(lambda: events(again, "resumed"))
    assert events(again, "resumed")[-1]["data"] == again.knobs()


def test_a_weight_written_anew_wins_over_the_one_changed_live(start, model):
    run = start(steps=2)
    run.set_weight("letters", 4)
    finish(run)
    again = finish(resume(run.directory, model=model, rewards=reward(letters, weight=3.0), steps=3))
    assert again.knobs()["weights"] == {"letters": 3.0}
    again = finish(resume(run.directory, model=model, rewards=reward(letters, weight=3.0), steps=4))
    assert again.knobs()["weights"] == {"letters": 3.0}


def test_rewards_are_found_again(start, model, notebook):
    cell = notebook(
        "import grpo_kit as gk\n"
        "@gk.reward(weight=2.0, name='other name')\ndef mine(completion): return len(completion)\n"
        "def plain(completion): return 1.0\n"
    )
    rewards = (cell.mine, reward(cell.plain, weight=0.5, time_limit=2.0), number_close(weight=0.25))
    run = finish(start(*rewards, steps=1))
    again = finish(resume(run.directory, model=model, steps=2))
    assert again.rewards.names == ["other name", "plain", "number_close"]
    assert again.rewards.weights == {"other name": 2.0, "plain": 0.5, "number_close": 0.25}
    assert [item.time_limit for item in again.rewards.rewards] == [5.0, 2.0, 5.0]
    notebook("del mine, plain")
    with pytest.raises(ValueError, match="does not define yet: other name, plain"):
        resume(run.directory, model=model)


def test_a_closure_is_not_mistaken_for_a_function_of_its_name(start, model, notebook):
    def letters(completion):  # a local one, named like a global
        return 0.0

    run = finish(start(letters, steps=1))
    with pytest.raises(ValueError, match="does not define yet: letters"):
        resume(run.directory, model=model)


def test_what_cannot_be_resumed(start, model, tmp_path, tiny_checkpoint):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        resume(tmp_path)
    run = finish(start(steps=1))
    other = gk.load_model(str(tiny_checkpoint(chat_template=None)), load_in_4bit=False, max_seq_length=64, lora_rank=2)
    with pytest.raises(ValueError, match="another model or LoRA rank"):
        resume(run.directory, model=other, rewards=letters)
    assert run.record.last_step() == 1  # the refusal has cost nothing
    RunLock(run.directory).release()
    shutil.rmtree(run.directory / "checkpoints")
    with pytest.raises(FileNotFoundError, match="start it anew with train"):
        resume(run.directory, model=other, rewards=letters)


def test_a_run_killed_before_its_first_checkpoint_can_be_started_anew(start, tmp_path):
    with closing(Record(tmp_path / "run" / "run.sqlite")) as record:
        record.write_run({"options": {}})
    finish(start(steps=1))


HOLDER = """
import fcntl, os, sys
with open(sys.argv[1], "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    print(os.getpid(), file=file, flush=True)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no flock")
def test_two_processes_do_not_train_the_same_run(start, model):
    run = finish(start(steps=2))
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.directory / "run.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"is being trained by process {other.pid} already: stop that run first"):
            resume(run.directory, model=model, rewards=letters, steps=3)
    finally:
        other.kill()
        other.wait()
    finish(resume(run.directory, model=model, rewards=letters, steps=3))  # a killed process holds nothing


SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
import grpo_kit as gk

try:
    gk.resume(sys.argv[1])
except ValueError as error:
    print(error)

@gk.reward(weight=2.0)
def letters(completion):
    return len(completion) / 10

run = gk.resume(sys.argv[1], steps=3)
run.wait()
print(run.state, run.step, run.rewards)
"""


@pytest.mark.slow
def test_resume_in_a_new_process(start, tmp_path):
    """The model is loaded again, ready-made rewards are rebuilt, and functions are found in __main__."""
    run = finish(start(reward(letters, weight=2.0), number_close(weight=0.5), steps=2))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(run.directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    refused, *_, last = done.stdout.splitlines()
    assert "does not define yet: letters. Rerun their cells" in refused, done.stderr
    assert last == "finished 3 RewardSet(letters × 2, number_close × 0.5)"
    assert run.record.last_step() == 3
