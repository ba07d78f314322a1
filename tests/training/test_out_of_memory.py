"""A pass that runs out of memory is made again with smaller micro-batches, and the step is the one that had those from
the start."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import grpo_kit.training.update as update_module
from grpo_kit.training import RunFailed, resume
from grpo_kit.training.batch import Sequence
from grpo_kit.training.checkpoint import checkpoints
from grpo_kit.training.credit import Credit
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.passes import Trainee
from grpo_kit.training.update import Updater, never
from tests.training.helpers import SOON, DrawnEngine, adapter, drawn_sequences, events, letters, numbers, same

LENGTHS = [(9, 11), (10, 10), (8, 9), (7, 10), (9, 8), (6, 10), (5, 10), (8, 6)]  # prompt, completion: 20 to 14 tokens
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -0.9, 1.0, 0.5, -1.6, 0.1])
PAIRS = [(0, 1), (2, 3), (6, 5), (4, 7)]
TWO_OF_FOUR, FOUR_OF_TWO, EIGHT_OF_ONE = 80, 40, 19  # micro-batches of sequences; of pairs 2, 4 and 4


class Memory:
    """Suffices for micro-batches of `rows` sequences, but for the calls, counted from 1, that are in `fails`. Of calls
    that don't learn only with `measuring`, of others only without."""

    def __init__(self, *fails: int, rows: int = 1000, measuring: bool = False, in_backward: bool = False):
        self.fails, self.rows, self.measuring, self.in_backward = fails, rows, measuring, in_backward
        self.calls: list[int] = []  # how many sequences each had
        self.before: Callable[[], object] = lambda: None

    def run_out(self, *_):
        raise torch.OutOfMemoryError("no memory left")

    def lacks(self, rows: int, train: bool) -> bool:
        if train == self.measuring:
            return False
        self.before()
        self.calls.append(rows)
        return len(self.calls) in self.fails or rows > self.rows


@dataclass(frozen=True)
class Scarce(Trainee):
    """A trainee on a small device."""

    memory: Any = None

    def outputs(self, batch, train):
        found = super().outputs(batch, train)
        if self.memory.lacks(len(batch.indices), train):
            if not self.memory.in_backward:
                self.memory.run_out()
            found.logprobs.register_hook(self.memory.run_out)
        return found


@pytest.fixture
def sequences() -> list[Sequence]:
    return drawn_sequences(LENGTHS, seed=3)


@pytest.fixture
def trained(model):
    """With an adapter that makes it another model than the reference."""
    fill(model)
    yield model
    model.module.zero_grad(set_to_none=True)  # of a step that was stopped


@torch.no_grad()
def fill(model):
    model.reset_adapter()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.trainable().items():
        if ".lora_B." in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


class Step:
    """One step on a model as it was at first: what it made of it, and what was told on the way."""

    def __init__(
        self, model, sequences, memory, budget, credit=None, pause_point=lambda: None, unwanted=never, **options
    ):
        fill(model)
        chosen = {"learning_rate": 1e-3, "tokens_per_micro_batch": budget, **options}
        self.updater = Updater(model, derive(TrainOptions(**chosen), on_gpu=False)[0])
        self.updater.trainee = Scarce(**vars(self.updater.trainee), memory=memory)
        self.told: list[tuple[int, int]] = []
        self.updater.tell_budget = lambda before, after: self.told.append((before, after))
        self.begun_with = self.weights()
        self.estimates = self.updater.measure(sequences, pause_point, unwanted)
        credit = credit or self.credit_for(ADVANTAGES)
        self.metrics = self.updater.update(sequences, credit, self.estimates, pause_point, unwanted)

    def credit_for(self, advantages) -> Credit:
        if self.updater.value_head is not None:
            each = advantages[:, None] * self.estimates.mask
            return Credit(each, each + 1, None, {})
        return Credit(advantages, None, PAIRS if self.updater.options.algorithm == "online_dpo" else None, {})

    def weights(self):
        return {name: parameter.detach().clone() for name, parameter in self.updater.parameters.items()}


def length(weights) -> float:
    return float(torch.stack([weight.norm() for weight in weights.values()]).norm())


def assert_same_step(one: Step, other: Step, close: float) -> None:
    """close: relative, of each metric and of the way that the weights went as a whole; 0 is to the last bit."""
    assert one.metrics == pytest.approx(other.metrics, rel=close, abs=1e-9 if close else 0)
    ways = [{name: weight - step.begun_with[name] for name, weight in step.weights().items()} for step in (one, other)]
    assert length(ways[1]) > 1e-2
    gap = length({name: ways[0][name] - ways[1][name] for name in ways[0]})
    assert gap <= close * length(ways[1]), gap / length(ways[1])


MEASURING = {"rloo": {"algorithm": "rloo", "beta": 0.1}, "ppo": {"algorithm": "ppo", "num_iterations": 1}}
ONCE = {
    "grpo": {"beta": 0.1, "importance_sampling_correction": "token_truncate"},
    "without a pull": {"beta": 0.0},  # KL is measured on one micro-batch only
    "online_dpo": {"algorithm": "online_dpo", "num_iterations": 1},
}
SEVERAL_TIMES = {
    "grpo": {"beta": 0.1, "importance_sampling_correction": "token_truncate"},
    "online_dpo": {"algorithm": "online_dpo"},
    "ppo": {"algorithm": "ppo"},
}


# ---- the first pass ----


@pytest.mark.parametrize("case", ONCE)
def test_a_first_pass_is_made_again_from_its_beginning(trained, sequences, case):
    """At its first micro-batch, or in its middle, with gradients and sums left of the first."""
    small = Step(trained, sequences, Memory(), FOUR_OF_TWO, **ONCE[case])
    for fails in (1, 2):
        memory = Memory(fails)
        step = Step(trained, sequences, memory, TWO_OF_FOUR, **ONCE[case])
        assert step.told == [(TWO_OF_FOUR, FOUR_OF_TWO)]
        assert memory.calls == [4] * fails + [2] * 4
        assert_same_step(step, small, close=0)


def test_out_of_memory_in_the_backward_pass(trained, sequences):
    small = Step(trained, sequences, Memory(), FOUR_OF_TWO, num_iterations=2)
    step = Step(trained, sequences, Memory(2, in_backward=True), TWO_OF_FOUR, num_iterations=2)
    assert step.told == [(TWO_OF_FOUR, FOUR_OF_TWO)]
    assert_same_step(step, small, close=0)


def test_a_pause_point_comes_before_each_micro_batch_of_the_new_cut_too(trained, sequences):
    pauses, told = [], []
    memory = Memory(2)
    memory.before = lambda: told.append(len(pauses))
    Step(trained, sequences, memory, TWO_OF_FOUR, pause_point=lambda: pauses.append(1))
    assert told == [1, 2, 3, 4, 5, 6]


def test_what_a_pause_point_raises_then_leaves_the_weights(trained, sequences):
    class Stop(Exception):
        pass

    pauses = []

    def stop_at_the_fourth():  # the second micro-batch of the new cut
        pauses.append(adapter(trained))
        if len(pauses) == 4:
            raise Stop

    with pytest.raises(Stop):
        Step(trained, sequences, Memory(2), TWO_OF_FOUR, pause_point=stop_at_the_fourth)
    assert all(same(seen, pauses[0]) for seen in (*pauses, adapter(trained)))


def test_it_can_be_given_up_as_well(trained, sequences):
    small = Step(trained, sequences, Memory(), FOUR_OF_TWO)
    asked = []

    def unwanted(first_try):
        asked.append(first_try)
        return first_try and asked.count(True) % 5 == 3

    step = Step(trained, sequences, Memory(rows=2), TWO_OF_FOUR, unwanted=unwanted)
    assert False in asked
    assert step.told == [(TWO_OF_FOUR, FOUR_OF_TWO)]
    assert_same_step(step, small, close=0)


def test_the_frames_of_the_failure_are_gone_when_it_is_tried_again(trained, sequences):
    """A tensor in one of them is memory that the new try needs."""
    held = []

    def run_out_with_a_tensor():
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("no memory left")

    memory = Memory(2)
    memory.run_out = run_out_with_a_tensor
    memory.before = lambda: [ref() for ref in held] == [None] * len(held) or pytest.fail("a frame is alive")
    Step(trained, sequences, memory, TWO_OF_FOUR)
    assert len(held) == 1


# ---- measuring ----


@pytest.mark.parametrize("case", MEASURING)
def test_measuring_is_made_again_too(trained, sequences, case):
    small = Step(trained, sequences, Memory(), FOUR_OF_TWO, **MEASURING[case])
    memory = Memory(2, measuring=True)
    step = Step(trained, sequences, memory, TWO_OF_FOUR, **MEASURING[case])
    assert step.told == [(TWO_OF_FOUR, FOUR_OF_TWO)]
    assert memory.calls == [4, 4] + [2] * 4
    for name, values in vars(small.estimates).items():
        found = getattr(step.estimates, name)
        assert found is values is None or torch.equal(found, values), name
    assert_same_step(step, small, close=0)


@pytest.mark.parametrize("case", MEASURING)
def test_what_was_measured_is_kept_when_learning_needs_more(trained, sequences, case):
    small = Step(trained, sequences, Memory(), FOUR_OF_TWO, **MEASURING[case])
    memory = Memory(2)
    step = Step(trained, sequences, memory, TWO_OF_FOUR, **MEASURING[case])
    assert memory.calls == [4, 4] + [2] * 4
    assert_same_step(step, small, close=1e-6)


def test_a_step_without_signal_is_measured_with_less(trained, sequences):
    still = Credit(torch.zeros(8), None, None, {})
    small = Step(trained, sequences, Memory(), FOUR_OF_TWO, still)
    step = Step(trained, sequences, Memory(1, measuring=True), TWO_OF_FOUR, still)
    assert step.told == [(TWO_OF_FOUR, FOUR_OF_TWO)]
    assert step.metrics == small.metrics
    assert step.metrics["entropy"] > 0
    assert same(step.weights(), step.begun_with)


# ---- later passes ----


@pytest.mark.parametrize("case", SEVERAL_TIMES)
def test_a_later_pass_is_made_again_by_itself(trained, sequences, case):
    """The weights have moved: the passes before it stand, and so do the logprobs from before the first."""
    options, pauses = {**SEVERAL_TIMES[case], "num_iterations": 3}, []
    small = Step(trained, sequences, Memory(), FOUR_OF_TWO, **options)
    for fails in (1, 2):
        memory = Memory(2 + fails)
        step = Step(trained, sequences, memory, TWO_OF_FOUR, pause_point=lambda: pauses.append(1), **options)
        assert step.told == [(TWO_OF_FOUR, FOUR_OF_TWO)]
        assert memory.calls == [4, 4] + [4] * fails + [2] * 8
        assert_same_step(step, small, close=1e-6)
    assert len(pauses) == 2 * (4 if case == "ppo" else 2)  # none after the first optimizer step
    assert step.metrics["clip_ratio"] > 0 or case == "online_dpo"


# ---- how small ----


def test_micro_batches_become_as_small_as_memory_needs(trained, sequences):
    """Never a try with the same ones: they hold 136 tokens, so anything from that on is one micro-batch."""
    memory = Memory(rows=1)
    step = Step(trained, sequences, memory, 10_000)
    assert step.told == [(10_000, 78), (78, 39), (39, 19)]
    assert memory.calls[-8:] == [1] * 8
    assert step.updater.trainee.budget == EIGHT_OF_ONE


def test_the_budget_is_kept_for_the_steps_that_follow(trained, sequences):
    memory = Memory(rows=2)
    step = Step(trained, sequences, memory, TWO_OF_FOUR)
    tried = len(memory.calls)
    step.updater.update(sequences, step.credit_for(ADVANTAGES), None, lambda: None)
    assert memory.calls[tried:] == [2] * 4
    assert len(step.told) == 1


def test_a_single_sequence_that_is_too_large_is_an_error_that_says_so(trained, sequences):
    step = Step(trained, sequences, Memory(), FOUR_OF_TWO)
    before = adapter(trained)
    step.updater.trainee.memory.rows = 0
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step.updater.update(sequences, step.credit_for(ADVANTAGES), None, lambda: None)
    assert "single sequence (or pair) already" in caught.value.__notes__[0]
    assert step.told == [(FOUR_OF_TWO, 20)]
    step.updater.forget_gradients()
    assert same(adapter(trained), before)
    step.updater.trainee.memory.rows = 1
    assert step.updater.update(sequences, step.credit_for(ADVANTAGES), None, lambda: None)["grad_norm"] > 0


class HoldingEngine(DrawnEngine):
    """Keeps a cache that `take` brings back."""

    def __init__(self):
        super().__init__()
        self.holds_memory, self.released = True, 0

    def release(self):
        self.released += self.holds_memory
        self.holds_memory = False


@pytest.mark.parametrize("budget", [TWO_OF_FOUR, EIGHT_OF_ONE])
def test_what_the_sampler_holds_goes_before_micro_batches_become_smaller(trained, sequences, budget, monkeypatch):
    whole = Step(trained, sequences, Memory(), budget)
    engine = HoldingEngine()
    monkeypatch.setattr(trained, "engine", engine)
    step = Step(trained, sequences, Memory(2), budget)
    assert_same_step(step, whole, close=0)
    assert engine.released == 1 and not step.told
    assert [text for text in step.updater.troubles if "gives the cache back" in text] == step.updater.troubles
    engine.holds_memory = True
    step.updater.update(sequences, step.credit_for(ADVANTAGES), None, lambda: None)
    assert engine.released == 2, "before the update, not after it failed again"
    assert len(step.updater.troubles) == 1, "it is told once"


def test_a_single_sequence_is_too_large_only_without_the_samplers_cache(trained, sequences, monkeypatch):
    engine = HoldingEngine()
    monkeypatch.setattr(trained, "engine", engine)
    with pytest.raises(torch.OutOfMemoryError):
        Step(trained, sequences, Memory(rows=0), EIGHT_OF_ONE)
    assert engine.released == 1


def test_a_pair_is_never_parted(trained, sequences):
    with pytest.raises(torch.OutOfMemoryError):
        Step(trained, sequences, Memory(rows=1), TWO_OF_FOUR, algorithm="online_dpo")


def test_a_limit_never_makes_the_budget_larger(model):
    made = Updater(model, derive(TrainOptions(tokens_per_micro_batch=64), on_gpu=False)[0])
    for limit, expected in ((100, 64), (32, 32), (64, 32)):
        made.limit_budget(limit)
        assert made.trainee.budget == expected


# ---- runs ----


@pytest.fixture
def memory(monkeypatch, model) -> Memory:
    """Of the device that runs are on."""
    made = Memory()
    monkeypatch.setattr(update_module, "Trainee", partial(Scarce, memory=made))
    model.engine = DrawnEngine()
    return made


@pytest.fixture
def small(start, model, memory):
    """Of four steps, the first few, with 50 tokens to a micro-batch, which are a prompt with its three answers; and
    the adapter at its end. 100 are both."""

    def small(steps):
        run = start(run_dir="small", steps=steps, tokens_per_micro_batch=50)
        run.wait(SOON)
        weights = adapter(model)
        model.reset_adapter()
        return run, weights

    return small


def test_a_run_goes_on_with_less_and_says_so(start, small, model, memory):
    expected, weights = small(steps=3)
    memory.rows = 3
    run = start(steps=3, tokens_per_micro_batch=100)
    run.wait(SOON)
    (event,) = events(run, "out of memory")
    assert event["step"] == 1
    assert event["text"] == "tokens_per_micro_batch 100 → 50, kept for the rest of the run"
    assert event["data"] == {"tokens_per_micro_batch": 50}
    assert numbers(run) == numbers(expected)
    assert same(adapter(model), weights)


def test_the_budget_is_kept_through_a_resume(start, small, model, memory):
    expected, weights = small(steps=4)
    memory.rows = 3
    run = start(steps=2, tokens_per_micro_batch=100)
    run.wait(SOON)
    model.reset_adapter()
    memory.rows = 1000  # were larger ones tried again, they would do
    memory.calls.clear()
    again = resume(run.directory, model=model, rewards=letters, steps=4)
    again.wait(SOON)
    assert set(memory.calls) <= {2, 3}
    assert [event["step"] for event in events(again, "out of memory")] == [1]
    assert "tokens_per_micro_batch is 50 at most, since memory ran out" in events(again, "resumed")[-1]["text"]
    assert numbers(again) == numbers(expected)
    assert same(adapter(model), weights)


def test_a_run_that_can_not_go_on_fails_with_what_to_change(start, model, memory):
    model.engine.before = lambda asked: setattr(memory, "rows", 0 if asked == 3 else 2)
    run = start(steps=4, checkpoint_every=100, tokens_per_micro_batch=128)
    with pytest.raises(RunFailed, match=r"(?s)after step 2:.*no memory left.*single sequence.*max_completion_length"):
        run.wait(SOON)
    assert all(words in run.error for words in ("load_in_4bit", "adamw_8bit", "lora_rank"))
    assert [event["data"]["tokens_per_micro_batch"] for event in events(run, "out of memory")] == [64, 32]
    assert checkpoints(run.directory)[-1].name == "step-000002"
    assert all(parameter.grad is None for parameter in model.trainable().values())
    assert isinstance(model.generate("2 + 2?", max_tokens=4), str)
    memory.rows = 1
    model.engine.before = lambda asked: None
    again = resume(run.directory, model=model, rewards=letters)
    again.wait(SOON)
    assert [row["step"] for row in again.record.steps()] == [1, 2, 3, 4]
