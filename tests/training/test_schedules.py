"""The learning rate's factor, against transformers' own scheduler stepped along."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from grpo_kit.training.schedules import SCHEDULES, check_schedule, check_warmup, learning_rate_factor

WITH_WARMUP = [name for name in SCHEDULES if name != "constant"]


def stepped(name, steps, warmup_steps):
    """The factor of each optimizer step of the Trainer: transformers' scheduler is stepped after it."""
    options = {}
    if name == "cosine_with_min_lr":
        options = {"min_lr_rate": 0.1}
    elif name == "warmup_stable_decay":
        options = {"num_decay_steps": 2}  # a tenth of the 20 or 21 below
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(name, optimizer, warmup_steps, steps, scheduler_specific_kwargs=options)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def factors(name, steps, warmup_steps=0):
    return [learning_rate_factor(name, step, steps, warmup_steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_it_is_what_the_trainer_does(name):
    assert factors(name, 20) == pytest.approx(stepped(name, 20, 0), rel=1e-12)


@pytest.mark.parametrize("name", WITH_WARMUP)
def test_with_warmup_it_is_that_of_one_step_more_without_the_first(name):
    theirs = stepped(name, 21, 4)
    assert theirs[0] == 0
    assert factors(name, 20, 4) == pytest.approx(theirs[1:], rel=1e-12)
    assert factors(name, 20, 4)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("name", WITH_WARMUP)
@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 1), (2, 1), (7, 7), (100, 10), (1000, 0)])
def test_no_step_is_wasted(name, steps, warmup_steps):
    values = factors(name, steps, warmup_steps)
    assert all(0 < value <= 1 for value in values)
    assert max(values) == 1


def test_by_hand():
    assert factors("constant", 3) == [1, 1, 1]
    assert factors("linear", 4) == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4])
    assert factors("linear", 5, 2) == pytest.approx([1 / 2, 1, 3 / 4, 2 / 4, 1 / 4])
    assert factors("cosine", 4) == pytest.approx([(1 + math.cos(math.pi * n / 4)) / 2 for n in range(4)])
    assert factors("cosine_with_min_lr", 2)[1] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors("inverse_sqrt", 9, 4)[7:] == pytest.approx([math.sqrt(4 / 8), math.sqrt(4 / 9)])
    assert factors("warmup_stable_decay", 20) == pytest.approx([1] * 19 + [0.5])


def test_transformers_calls_them_so():
    assert set(SCHEDULES) <= {kind.value for kind in SchedulerType}


def test_unknown_names_get_a_hint():
    with pytest.raises(
        ValueError, match=r"unknown lr_scheduler_type 'cosin'; there are constant, .*; did you mean 'cosine'\?"
    ):
        check_schedule("cosin")
    with pytest.raises(ValueError, match=r"warmup_stable_decay$"):
        learning_rate_factor("zzz", 1, 2, 0)


@pytest.mark.parametrize("warmup_steps", [11, -1])
def test_warmup_must_fit_into_the_run(warmup_steps):
    with pytest.raises(ValueError, match=rf"warmup_steps must be from 0 to the run's 10 steps, got {warmup_steps}"):
        learning_rate_factor("linear", 1, 10, warmup_steps)


def test_a_warmup_that_would_be_ignored_is_refused():
    with pytest.raises(ValueError, match="choose 'constant_with_warmup', or warmup_steps=0"):
        check_warmup("constant", 10, 1)


@pytest.mark.parametrize("step", [0, 11])
def test_steps_outside_the_run_have_no_factor(step):
    with pytest.raises(ValueError, match=rf"step must be from 1 to the run's 10 steps, got {step}"):
        learning_rate_factor("linear", step, 10, 0)
