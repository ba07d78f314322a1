"""The learning rate over a run, by transformers' names: a factor that follows from the step's number alone.

Nothing is kept between steps, so a resumed run needs no state of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import lru_cache

import torch

MIN_LR_RATE = 0.1  # where cosine_with_min_lr ends, of the full learning rate
DECAY_SHARE = 0.1  # how much of a run warmup_stable_decay lowers the rate in: Hu et al. 2024, arXiv 2404.06395

# transformers' name → what it does after the warm-up.
SCHEDULES: dict[str, str] = {
    "constant": "the full rate at every step, without warm-up",
    "constant_with_warmup": "the full rate",
    "linear": "down to nothing in a straight line",
    "cosine": "down to nothing along half a cosine wave",
    "cosine_with_restarts": "as cosine: transformers' one cycle has no restart",
    "polynomial": "as linear: transformers' power is 1",
    "inverse_sqrt": "down with one over the square root of the step, never to nothing",
    "cosine_with_min_lr": f"along half a cosine wave down to {MIN_LR_RATE:g} of the full rate",
    "warmup_stable_decay": f"the full rate, then as cosine in the last {DECAY_SHARE:.0%} of the run",
}


def check_schedule(name: str) -> None:
    """Raises ValueError if there is no such schedule; it names those there are."""
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown lr_scheduler_type {name!r}; there are {', '.join(SCHEDULES)}{hint}")


def check_warmup(name: str, steps: int, warmup_steps: int) -> None:
    """Raises ValueError if a run of `steps` can't warm up that long, or the schedule would ignore it."""
    if not 0 <= warmup_steps <= steps:
        raise ValueError(f"warmup_steps must be from 0 to the run's {steps} steps, got {warmup_steps}")
    if name == "constant" and warmup_steps:
        raise ValueError(
            f"the schedule 'constant' has no warm-up, and warmup_steps is {warmup_steps}: "
            "choose 'constant_with_warmup', or warmup_steps=0"
        )


def learning_rate_factor(name: str, step: int, steps: int, warmup_steps: int) -> float:
    """What the learning rate of step `step`, counted from 1 to `steps`, is multiplied by.

    Without warm-up it is what transformers' scheduler gives the Trainer. With warm-up that one begins with a factor of
    0, which would waste a rollout on a step that can't move: the factors are then those of a run of one step more,
    without its first, so that w steps of warm-up go 1/w, 2/w, … 1. Either way the last step's factor is above 0. Raises
    ValueError for an unknown schedule, a step outside the run, and as `check_warmup` does.
    """
    check_schedule(name)
    check_warmup(name, steps, warmup_steps)
    if not 1 <= step <= steps:
        raise ValueError(f"step must be from 1 to the run's {steps} steps, got {step}")
    left_out = int(warmup_steps > 0)
    return float(_factors(name, steps + left_out, warmup_steps)(step - 1 + left_out))


@lru_cache
def _factors(name: str, steps: int, warmup_steps: int) -> Callable[[int], float]:
    """transformers' function from a step, counted from 0, to its factor."""
    from transformers import get_scheduler

    options: dict[str, float] = {}
    if name == "cosine_with_min_lr":
        options = {"min_lr_rate": MIN_LR_RATE}
    elif name == "warmup_stable_decay":
        options = {"num_decay_steps": min(max(1, round(DECAY_SHARE * steps)), steps - warmup_steps)}
    dummy = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(name, dummy, warmup_steps, steps, scheduler_specific_kwargs=options)
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor
