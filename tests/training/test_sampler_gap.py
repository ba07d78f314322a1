"""A sampler that is not the model trained: measured, warned of, and given up for the exact engine if it stays so."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_kit.rollout import Completion
from grpo_kit.training import resume
from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.sampler_gap import is_beyond
from grpo_kit.training.update import Updater
from tests.training.helpers import SOON, adapter, drawn_sequences, events, letters, numbers, same


class FaultyEngine:
    """An engine by the name of "faulty", whose logprobs are `off(step)` nats too high in the rollout of step `step`; or
    which samples with the adapter as it was when the engine was made."""

    def __init__(self, model, off=lambda step: 0.0, stale=False, name="faulty"):
        self.model, self.engine, self.off, self.name = model, model.engine, off, name
        self.old = adapter(model) if stale else None
        self.step, self.released = 0, 0

    def generate(self, prompt_ids, sampling, n=1, between_tokens=None, on_tokens=None):
        if between_tokens is None:  # a question, not a rollout
            return self.engine.generate(prompt_ids, sampling, n, None, on_tokens)
        self.step += 1
        now = adapter(self.model)
        if self.old is not None:
            put(self.model, self.old)
        groups = self.engine.generate(prompt_ids, sampling, n)
        put(self.model, now)
        return [[self._told(completion) for completion in group] for group in groups]

    def _told(self, completion: Completion) -> Completion:
        off = self.off(self.step)
        return replace(completion, logprobs=[logprob + off for logprob in completion.logprobs])

    def adapter_changed(self):
        self.engine.adapter_changed()

    def acquire(self):
        self.engine.acquire()

    def release(self):
        self.released += 1
        self.engine.release()


@torch.no_grad()
def put(model, weights):
    for name, parameter in model.trainable().items():
        parameter.copy_(weights[name])


def finished(run):
    run.wait(SOON)
    assert run.state == "finished"
    return run


def engine_notes(model):
    return [note for note in model.notes if note[0] == "engine now"]


@pytest.fixture(autouse=True)
def notes_as_before(model):
    before = list(model.notes)
    yield
    model.notes[:] = before


# ---- measured ----


@torch.no_grad()
def plain_logprobs(model, sequence, temperature):
    ids = torch.tensor([sequence.prompt_ids + sequence.completion.token_ids])
    logits = model.module(input_ids=ids).logits[0, len(sequence.prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(sequence.prompt_ids) :, None])[:, 0]


def off_by(model, sequence, gaps, temperature) -> Sequence:
    told = plain_logprobs(model, sequence, temperature) + torch.tensor(gaps)
    return replace(sequence, completion=replace(sequence.completion, logprobs=told.tolist()))


@pytest.mark.parametrize("budget", [1, 30, 10_000])
@pytest.mark.parametrize(("temperature", "share"), [(1.0, 2 / 3), (0.5, 1 / 3)])
def test_mean_largest_and_share_by_hand(model, budget, temperature, share):
    """Means of 0.09, 0.15 and 0.35 nats a token; the bound of a sequence is 0.1, and 0.2 at temperature ½. Of the last
    one's tokens one is unknown, and of the fourth sequence all are."""
    gaps = [[0.09, -0.09], [0.3, 0.0, -0.15, 0.15], [-0.6, 0.1, math.nan], [math.nan, math.nan]]
    drawn = drawn_sequences([(5, len(gap)) for gap in gaps], seed=1)
    sequences = [off_by(model, s, gap, temperature) for s, gap in zip(drawn, gaps, strict=True)]
    options = TrainOptions(temperature=temperature, tokens_per_micro_batch=budget)
    updater = Updater(model, derive(options, on_gpu=False)[0])
    metrics = updater.update(sequences, Credit(torch.ones(4), None, None, {}), None, lambda: None)
    assert metrics["sampler_gap"] == pytest.approx((0.18 + 0.6 + 0.7) / 8, abs=1e-5)
    assert metrics["sampler_gap_max"] == pytest.approx(0.6, abs=1e-5)
    assert metrics["sampler_gap_share"] == pytest.approx(share)


def test_a_token_told_to_be_impossible_leaves_the_figures_finite(model):
    (sequence,) = drawn_sequences([(5, 2)], seed=1)
    updater = Updater(model, derive(TrainOptions(), on_gpu=False)[0])
    sequences = [off_by(model, sequence, [-math.inf, -math.inf], 1.0)]
    metrics = updater.update(sequences, Credit(torch.zeros(1), None, None, {}), None, lambda: None)
    assert (metrics["sampler_gap"], metrics["sampler_gap_max"], metrics["sampler_gap_share"]) == (1e3, 1e3, 1.0)


def test_without_logprobs_nothing_is_known(model):
    (sequence,) = drawn_sequences([(5, 2)], seed=1)
    updater = Updater(model, derive(TrainOptions(), on_gpu=False)[0])
    sequences = [off_by(model, sequence, [math.nan, math.nan], 1.0)]
    metrics = updater.update(sequences, Credit(torch.zeros(1), None, None, {}), None, lambda: None)
    assert metrics["sampler_gap"] is metrics["sampler_gap_max"] is metrics["sampler_gap_share"] is None
    assert not is_beyond(metrics, 1.0)


@pytest.mark.parametrize(
    ("mean", "largest", "share", "temperature", "beyond"),
    [
        (0.02, 0.3, 0.0, 1.0, False),  # what rounding does
        (0.02, 6.0, 0.125, 1.0, False),  # one odd answer of eight
        (0.051, 0.1, 0.0, 1.0, True),
        (0.03, 0.5, 0.25, 1.0, True),  # a bad group of four
        (0.051, 0.3, 0.0, 0.6, False),  # 0.05 / 0.6 = 0.083
        (0.09, 0.3, 0.0, 0.6, True),
        (0.051, 0.3, 0.0, 1.5, True),
    ],
)
def test_what_is_beyond_the_bounds(mean, largest, share, temperature, beyond):
    row = {"sampler_gap": mean, "sampler_gap_max": largest, "sampler_gap_share": share}
    assert is_beyond(row, temperature) is beyond


# ---- and what follows ----


def test_a_sampler_that_stays_off_is_warned_of_and_then_given_up(start, model):
    plain = finished(start(run_dir="plain", steps=4))
    weights = adapter(model)
    model.reset_adapter()
    faulty = model.engine = FaultyEngine(model, off=lambda step: 0.2)
    run = finished(start(steps=4))

    first, second = events(run, "warning")
    assert (first["step"], second["step"]) == (1, 2)
    assert first["data"]["sampler_gap"] == pytest.approx(0.2, abs=1e-4)
    assert "engine" not in first["data"]
    for words in (
        "faulty and of the trainer differ by 0.2 nats a token on average, 0.2 at most",
        "100% of the answers",
    ):
        assert words in first["text"] and words in second["text"]
    assert "goes on with the slower, exact engine transformers" in first["text"]
    assert second["data"] == pytest.approx(
        {"sampler_gap": 0.2, "sampler_gap_max": 0.2, "sampler_gap_share": 1.0, "engine": "transformers",
         "given_up": "faulty"}, abs=1e-4,
    )  # fmt: skip
    assert "faulty is given up: 2 steps in a row" in second["text"]

    assert (model.engine.name, faulty.step, faulty.released) == ("transformers", 2, 1)
    assert (model.engine.eos_ids, model.engine.module) == (faulty.engine.eos_ids, faulty.engine.module)
    ((_, name, reason),) = engine_notes(model)
    assert name == "transformers"
    assert reason == (
        "instead of faulty, whose logprobs were not the trainer's: 0.2 nats a token on average, 0.2 at most in step 2"
    )
    info = run.record.run_info()
    assert info["engine"] == {"name": "transformers", "reason": reason, "step": 2}
    assert info["model_notes"][-1] == ["engine now", "transformers", reason]
    assert [row["sampler_gap"] > 0.1 for row in run.record.steps()] == [True, True, False, False]
    # What it told was wrong, not what it drew, and without a correction the loss does not read that.
    assert same(adapter(model), weights)
    assert [row["kl"] for row in numbers(run)] == [row["kl"] for row in numbers(plain)]


def test_a_sampler_with_an_old_adapter_is_found_out(start, model):
    """What it tells is right for what it samples with; the first step is, the later ones are not."""
    model.engine = FaultyEngine(model, stale=True)
    run = finished(start(steps=6, learning_rate=2e-2))
    rows = run.record.steps()
    assert rows[0]["sampler_gap"] < 1e-4
    warned, given_up = events(run, "warning")[:2]
    assert warned["step"] >= 2 and given_up["step"] == warned["step"] + 1
    assert model.engine.name == "transformers"
    assert all(row["sampler_gap"] < 1e-4 for row in rows[given_up["step"] :])
    assert all(row["sampler_gap"] > 0.05 for row in rows[warned["step"] - 1 : given_up["step"]])


def test_rounding_is_no_reason(start, model):
    faulty = model.engine = FaultyEngine(model, off=lambda step: 0.02 * (-1) ** step)
    run = finished(start(steps=3))
    assert events(run, "warning") == []
    assert model.engine is faulty


def test_a_single_odd_step_is_warned_of_and_forgotten(start, model):
    faulty = model.engine = FaultyEngine(model, off=lambda step: 0.2 * (step % 2))
    run = finished(start(steps=4))
    assert [event["step"] for event in events(run, "warning")] == [1, 3]
    assert model.engine is faulty
    assert "engine" not in run.record.run_info()


def test_the_exact_engine_is_only_warned_of(start, model):
    exact = model.engine = FaultyEngine(model, off=lambda step: 0.2, name="transformers")
    run = finished(start(steps=4))
    (warning,) = events(run, "warning")
    assert warning["step"] == 1
    assert "there is no engine to fall back to, and the run goes on" in warning["text"]
    assert model.engine is exact
    assert engine_notes(model) == []


def test_a_resumed_run_keeps_the_exact_engine(start, model):
    model.engine = FaultyEngine(model, off=lambda step: 0.2)
    run = finished(start(steps=2))
    faulty = model.engine = FaultyEngine(model, off=lambda step: 0.2)  # as load_model would make it in a new kernel
    model.notes[:] = [note for note in model.notes if note[0] != "engine now"]
    again = finished(resume(run.directory, model=model, rewards=letters, steps=4))
    assert (faulty.step, model.engine.name) == (0, "transformers")
    said = events(again, "resumed")[0]["text"]
    assert said.startswith("from step 3 of 4; transformers samples, instead of faulty, whose logprobs were not")
    assert len(engine_notes(model)) == 1
    assert len(events(again, "warning")) == 2  # those from before
    third = finished(resume(run.directory, model=model, rewards=letters, steps=5))  # in the same kernel: nothing to do
    assert "transformers samples" in events(third, "resumed")[-1]["text"]
    assert len(engine_notes(model)) == 1


def test_the_count_goes_on_through_a_resume(start, model):
    model.engine = FaultyEngine(model, off=lambda step: 0.2)
    run = finished(start(steps=1))
    assert len(events(run, "warning")) == 1
    again = finished(resume(run.directory, model=model, rewards=letters, steps=3))
    assert [event["step"] for event in events(again, "warning")] == [1, 2]
    assert model.engine.name == "transformers"


def test_a_gap_that_stays_with_the_exact_engine_is_warned_of_anew(start, model, monkeypatch):
    """Then it is the training pass that computes something else."""
    token_outputs = model.token_outputs

    def wrong(*args):
        found = token_outputs(*args)
        return replace(found, logprobs=found.logprobs - 0.2 * (found.logprobs != 0))

    monkeypatch.setattr(model, "token_outputs", wrong)
    model.engine = FaultyEngine(model)
    run = finished(start(steps=5))
    assert [event["step"] for event in events(run, "warning")] == [1, 2, 3]
    assert "there is no engine to fall back to" in events(run, "warning")[-1]["text"]


def test_a_model_knows_only_engines_that_there_are(model):
    engine = model.engine
    with model.lock:
        model.use_engine("transformers", "asked for again")
        assert model.engine is engine and engine_notes(model) == []
        engine.name = "other"
        with pytest.raises(ValueError, match="no engine 'fast'"):
            model.use_engine("fast", "why not")
        assert model.engine is engine
        del engine.name
