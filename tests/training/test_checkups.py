"""Held-out prompts and the canary: when they are asked, what is counted, and what a stop or a resume leaves of it."""

from __future__ import annotations

import math
import re
import threading
import time

import pytest
import torch

import grpo_kit as gk
from grpo_kit.rewards import human, last_number, reward
from grpo_kit.rollout import Completion
from grpo_kit.training import RunFailed, resume
from grpo_kit.training.checkpoint import checkpoints
from grpo_kit.training.run_lock import RunLock
from tests.training.helpers import QUICK, SOON, adapter, events, letters, numbers, same, until

ASKED = 7  # held-out prompts "0 + 10?" to "6 + 10?"


class SumsEngine:
    """Knows the sums of even n: greedily of n < 4, and in one of `n` tries of the others too. What it sampled for
    training are other letters each time. Calls `before(kind)` when asked: "greedy", "sampled" or "step"."""

    name = "sums"

    def __init__(self, decode):
        self.decode, self.before = decode, lambda kind: None
        self.seeds = {"greedy": [], "sampled": [], "step": []}

    def generate(self, prompt_ids, sampling, n=1, between_tokens=None, on_tokens=None):
        questions = [self.decode(ids) for ids in prompt_ids]
        kind = "greedy" if sampling.temperature == 0 else "sampled" if "10" in questions[0] else "step"
        self.seeds[kind].append(sampling.seed)
        self.before(kind)
        if between_tokens is not None:
            between_tokens()
        return [[self._answer(q, kind, i, sampling.seed) for i in range(n)] for q in questions]

    def _answer(self, question, kind, number, seed):
        if kind == "step":
            text = "abcdefgh"[(seed + number) % 8]
        else:
            n = int(re.search(r"(\d+) \+ 10", question)[1])
            right = n % 2 == 0 and (n < 4 if kind == "greedy" else number == 1)
            text = str(n + 10) if right else "0"
        untold = [math.nan] * len(text)  # logprobs to be judged by
        return Completion([ord(letter) for letter in text], untold, "eos", text)

    def adapter_changed(self):
        pass


@reward
def right(completion, answer):
    return 1.0 if last_number(completion) == answer else 0.25


@pytest.fixture(scope="module")
def eval_data():
    return gk.data.from_rows([{"prompt": f"{n} + 10?", "answer": n + 10} for n in range(ASKED)])


@pytest.fixture
def engine(model):
    model.engine = SumsEngine(model.chat.decode)
    return model.engine


@pytest.fixture
def begin(model, data, tmp_path, eval_data):
    def begin(*rewards, run_dir="run", eval_data=eval_data, **options):
        reward_set = gk.RewardSet(*(rewards or (right, letters)))
        options = {**QUICK, "steps": 5, "eval_steps": 2, "num_generations_eval": 3, **options}
        return gk.train(model, data, reward_set, run_dir=tmp_path / run_dir, eval_data=eval_data, **options)

    return begin


def finish(run):
    run.wait(SOON)
    assert run.state == "finished", run.error
    return run


def test_every_n_steps_before_the_first_and_after_the_last(begin, engine):
    run = finish(begin())
    assert [event["step"] for event in events(run, "evaluation")] == [0, 2, 4, 5]
    assert [event["step"] for event in events(run, "canary")] == [0, 2, 4, 5]
    kinds = [(event["kind"], event["step"]) for event in run.record.events()]
    assert kinds.index(("checkpoint", 0)) < kinds.index(("evaluation", 0))
    assert kinds.index(("evaluation", 5)) < kinds.index(("finished", 5))
    assert list(run.evaluations["step"]) == [0, 2, 4, 5]


def test_what_is_counted(begin, engine):
    """Right are 0 and 2 greedily, and of three tries 0, 2, 4 and 6."""
    run = finish(begin(steps=1))
    event = events(run, "evaluation")[0]
    assert event["text"] == "held-out: 29 % right, 57 % within 3 tries"
    means = (2 * 1.0 + 5 * 0.25) / 7, (letters("10") + letters("12") + 5 * letters("0")) / 7
    data = event["data"]
    assert {key: data[key] for key in ("accuracy", "pass_at_k", "k", "answers")} == {
        "accuracy": 2 / 7, "pass_at_k": 4 / 7, "k": 3, "answers": 7,
    }  # fmt: skip
    assert (data["rewards/right"], data["rewards/letters"]) == pytest.approx(means)
    assert data["reward"] == pytest.approx(sum(means))
    row = run.evaluations.iloc[-1]
    assert (row["accuracy"], row["pass_at_k"]) == (2 / 7, 4 / 7)


def test_without_samples_there_is_no_pass_at_k(begin, engine):
    run = finish(begin(steps=1, num_generations_eval=0))
    event = events(run, "evaluation")[0]
    assert event["text"] == "held-out: 29 % right"
    assert not {"pass_at_k", "k"} & event["data"].keys()
    assert not engine.seeds["sampled"]


def test_the_threshold_decides_what_passes(begin, engine):
    assert events(finish(begin(steps=1, pass_threshold=0.25)), "evaluation")[0]["data"]["accuracy"] == 1


def test_every_evaluation_draws_alike(begin, engine):
    finish(begin())
    assert len(engine.seeds["sampled"]) == 4
    assert len(set(engine.seeds["sampled"])) == 1


def test_weights_set_live_count(begin, engine):
    held, go = threading.Event(), threading.Event()

    def hold(kind):
        if kind == "step" and not held.is_set():
            held.set()
            go.wait(SOON)

    engine.before = hold
    run = begin(steps=2)
    assert held.wait(SOON)
    run.set_weight("letters", 0.0)
    go.set()
    finish(run)
    first, last = run.record.events()[0], events(run, "evaluation")[-1]["data"]
    assert first["kind"] == "started"
    assert last["reward"] == pytest.approx(last["rewards/right"])


def test_an_evaluation_changes_no_number(begin, start, model, data, tmp_path):
    plain = finish(start(right, letters, run_dir="plain", steps=4))
    weights = adapter(model)
    model.reset_adapter()
    watched = finish(begin(run_dir="watched", steps=4, eval_steps=1))
    assert numbers(watched) == numbers(plain)
    assert same(adapter(model), weights)
    assert len(events(watched, "evaluation")) == 5


# ---- the canary ----


def test_the_canary_is_the_first_held_out_prompt(begin, engine, model):
    run = finish(begin(steps=2))
    assert [event["text"] for event in events(run, "canary")] == ["10", "10"]
    assert run.canary.to_dict("records") == [
        {"step": step, "prompt": model.render("0 + 10?"), "answer": "10"} for step in (0, 2)
    ]


def test_another_canary(begin, engine, model):
    run = finish(begin(steps=2, canary="2 + 10?"))
    assert [event["data"] for event in events(run, "canary")] == [
        {"prompt": model.render("2 + 10?"), "answer": "12"}
    ] * 2
    assert len(events(run, "evaluation")) == 2


def test_a_canary_needs_no_held_out_prompts(begin, engine):
    options = {"eval_data": None, "canary": "4 + 10?", "eval_steps": None, "num_generations_eval": None}
    run = finish(begin(steps=4, checkpoint_every=2, **options))
    assert [(event["step"], event["text"]) for event in events(run, "canary")] == [(0, "0"), (2, "0"), (4, "0")]
    assert not events(run, "evaluation")
    assert run.evaluations.empty
    assert ("eval_steps", "2", "with every checkpoint") in [(s.name, s.value, s.reason) for s in run.settings]


def test_a_run_without_either_asks_nothing(begin, engine):
    run = finish(begin(steps=2, eval_data=None, eval_steps=None, num_generations_eval=None))
    assert {event["kind"] for event in run.record.events()} == {"started", "checkpoint", "finished"}
    assert not engine.seeds["greedy"]


def test_its_tables_have_their_columns_all_the_same(begin, engine):
    run = finish(begin(steps=1, eval_data=None, eval_steps=None, num_generations_eval=None))
    assert (len(run.evaluations), len(run.canary)) == (0, 0)
    assert list(run.evaluations.columns) == ["step", "accuracy", "answers", "reward"]
    assert list(run.canary.columns) == ["step", "prompt", "answer"]


# ---- rewards that fail on them ----


def fails_on_held_out(completion, answer):
    if answer >= 10:
        raise RuntimeError("such a large number")
    return 1.0


def test_a_reward_that_fails_on_held_out_prompts_is_a_warning(begin, engine):
    run = finish(begin(right, fails_on_held_out, steps=2))
    (warning,) = events(run, "warning")  # once, and not at each evaluation
    assert warning["step"] == 0
    assert "fails_on_held_out: error in 7 of 7 answers" in warning["text"]
    assert "such a large number" in warning["text"]
    assert len(events(run, "evaluation")) == 2
    assert {row["scores"]["fails_on_held_out"][1] for row in run.record.completions()} == {"ok"}


def test_one_that_fails_on_sampled_answers_only_too(begin, engine):
    def fails_on_others(completion, answer):
        if answer in (14, 16) and completion == str(answer):  # no greedy answer is
            raise RuntimeError("oh")
        return 1.0

    run = finish(begin(right, fails_on_others, steps=1))
    (warning,) = events(run, "warning")
    assert "fails_on_others: error in 2 of 21 answers" in warning["text"]


def test_it_pauses_the_run_if_that_is_wanted(begin, engine):
    run = begin(right, fails_on_held_out, steps=1, on_reward_error="pause")
    until(lambda: run.state == "paused")
    assert run.step == 0
    run.resume()
    finish(run)


# ---- people ----


def test_people_are_not_asked_about_held_out_answers(begin, engine):
    asked = human(time_limit=0.05)
    run = finish(begin(right, asked, steps=1))
    assert len(events(run, "evaluation")) == 2
    for event in events(run, "evaluation"):
        assert "rewards/human" not in event["data"]
        assert event["data"]["accuracy"] == 2 / 7
    assert {len(question.text) for question in asked._closed.values()} == {1}  # a step's answers are one letter
    assert asked._closed


def test_people_alone_cannot_score_them(begin, engine, tmp_path):
    with pytest.raises(ValueError, match="can't be scored by people alone"):
        begin(human())
    assert not (tmp_path / "run").exists()


# ---- what is refused ----


def test_eval_steps_with_nothing_to_ask(begin, engine, tmp_path):
    with pytest.raises(ValueError, match="give eval_data or canary"):
        begin(eval_data=None)
    assert not (tmp_path / "run").exists()


def test_held_out_data_is_checked_before_anything_starts(begin, engine, model, eval_data, tmp_path):
    live = begin(run_dir="live", steps=1000, eval_data=None, eval_steps=None, num_generations_eval=None)
    until(lambda: live.step >= 1)
    long = gk.data.from_rows([{"prompt": "x" * 100, "answer": 1}])
    with pytest.raises(ValueError, match="needs the data column 'answer'"):
        begin(eval_data=eval_data.remove_columns("answer"))
    with pytest.raises(ValueError, match="no rows"):
        begin(eval_data=eval_data.select([]))
    with pytest.raises(ValueError, match="must be shorter"):
        begin(eval_data=long)
    assert live.alive
    assert not (tmp_path / "run").exists()


def test_a_canary_that_does_not_fit_is_refused_before_anything_starts(begin, engine, model, tmp_path):
    """With 6 tokens of an answer, one of 58 fits into 64, and one of 59 does not."""
    live = begin(run_dir="live", steps=1000, eval_data=None, eval_steps=None, num_generations_eval=None)
    until(lambda: live.step >= 1)
    fits = "0 + 10?".ljust(64 - 6 - len(model.encode("")), "?")
    with pytest.raises(ValueError, match=r"the canary leaves room for 5 tokens .* max_completion_length is 6: shorten"):
        begin(canary=fits + "?")
    with pytest.raises(ValueError, match="the canary leaves room for 0 tokens"):
        begin(canary="x" * 500, eval_data=None, num_generations_eval=None)
    assert live.alive
    assert not (tmp_path / "run").exists()
    run = finish(begin(canary=fits, steps=1))
    assert len(events(run, "canary")) == 2


def test_neither_does_resume_begin_with_one_in_a_shorter_model(begin, engine, model, tmp_path, tiny_checkpoint):
    run = finish(begin(steps=1, canary="12 + 10? " * 4))
    before = run.record.events()
    path = str(tiny_checkpoint(chat_template=None))
    shorter = gk.load_model(path, load_in_4bit=False, max_seq_length=40, lora_rank=4)
    rewards = gk.RewardSet(right, letters)
    with pytest.raises(ValueError, match="the canary leaves room for"):
        resume(run.directory, model=shorter, rewards=rewards, steps=2)
    assert shorter.stop_run is None
    assert run.record.events() == before
    RunLock(run.directory).release()


# ---- stop, pause, resume ----


@pytest.mark.parametrize(("when", "step"), [(1, 0), (2, 2), (4, 5)])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_stopped_in_the_middle_of_an_evaluation(begin, engine, model, kind, when, step):
    """The `when`-th evaluation is stopped; "greedy" is asked twice each, for the canary too."""
    whole = finish(begin(run_dir="whole"))
    weights = adapter(model)
    model.reset_adapter()
    engine.seeds = {name: [] for name in engine.seeds}
    box, begun = {}, threading.Event()
    count = 2 * when - 1 if kind == "greedy" else when

    def stop(asked):
        begun.wait(SOON)
        if asked == kind and len(engine.seeds[kind]) == count:
            box["run"].stop()

    engine.before = stop
    run = box["run"] = begin(run_dir="part")
    begun.set()
    run.wait(SOON)
    assert (run.state, run.step) == ("stopped", step)
    assert [e["step"] for e in events(run, "evaluation")] == [0, 2, 4, 5][: when - 1]
    assert [e["step"] for e in events(run, "canary")] == [0, 2, 4, 5][: when - 1]
    assert checkpoints(run.directory)[-1].name == f"step-{step:06d}"

    engine.before = lambda asked: None
    model.reset_adapter()
    again = finish(resume(run.directory, model=model, rewards=gk.RewardSet(right, letters)))
    for name in ("evaluation", "canary"):
        found, expected = events(again, name), events(whole, name)
        assert [(e["step"], e["text"], e["data"]) for e in found] == [
            (e["step"], e["text"], e["data"]) for e in expected
        ]
    assert numbers(again) == numbers(whole)
    assert same(adapter(model), weights)


def test_out_of_memory_in_the_last_evaluation(begin, engine, model):
    """As in any other: the words say what helps, the last step is kept, and a resume makes up for it."""

    def fail(kind):
        if kind == "greedy" and len(engine.seeds["greedy"]) == 7:  # after the steps 0, 2 and 4, with canary
            raise torch.OutOfMemoryError("no memory left")

    engine.before = fail
    run = begin()
    with pytest.raises(RunFailed, match=r"(?s)after step 5:.*no memory left.*Smaller tokens_per_micro_batch"):
        run.wait(SOON)
    assert [event["step"] for event in events(run, "evaluation")] == [0, 2, 4]
    assert checkpoints(run.directory)[-1].name == "step-000005"
    assert model.stop_run is None
    engine.before = lambda kind: None
    again = finish(resume(run.directory, model=model, rewards=gk.RewardSet(right, letters)))
    assert list(again.evaluations["step"]) == [0, 2, 4, 5]


def test_resume_keeps_those_made_and_asks_again_for_those_forgotten(begin, engine, model):
    run = finish(begin(steps=4, checkpoint_every=2))
    before = [event["id"] for event in events(run, "evaluation")]
    for folder in checkpoints(run.directory)[1:]:
        folder.rename(folder.with_name("gone"))
    again = finish(resume(run.directory, model=model, rewards=gk.RewardSet(right, letters)))
    assert [event["step"] for event in events(again, "evaluation")] == [0, 2, 4]
    after = [event["id"] for event in events(again, "evaluation")]
    assert after[:2] == before[:2]
    assert after[2] > before[2]
    assert list(again.evaluations["accuracy"]) == [2 / 7] * 3


def test_a_finished_run_that_goes_on_is_evaluated_at_its_new_end(begin, engine, model):
    run = finish(begin(steps=3))
    assert list(run.evaluations["step"]) == [0, 2, 3]
    again = finish(resume(run.directory, model=model, rewards=gk.RewardSet(right, letters), steps=5))
    assert list(again.evaluations["step"]) == [0, 2, 3, 4, 5]


def test_a_pause_in_an_evaluation_holds_it(begin, engine, model):
    box, begun = {}, threading.Event()

    def pause(kind):
        begun.wait(SOON)
        if kind == "sampled" and len(engine.seeds["sampled"]) == 2:
            box["run"].pause()

    engine.before = pause
    run = box["run"] = begin(steps=2)
    begun.set()
    until(lambda: run.state == "paused")
    time.sleep(0.1)
    assert len(events(run, "evaluation")) == 1
    assert isinstance(model.generate("1 + 10?", max_tokens=4), str)
    run.resume()
    finish(run)
    assert len(events(run, "evaluation")) == 2
