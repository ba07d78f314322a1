"""What an algorithm is, and the one table of all of them.

To add one: write a file that calls `register`, name it in `algorithms/__init__.py`, and add its test.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Algorithm:
    """A policy loss over tokens and the options it comes with.

    weights:       (lengths [N] of trained tokens, max_completion_length) → [N], the weight of each sequence's tokens
                   in the loss of one optimizer step. The step's loss is Σ_i weights_i · Σ_t loss_it, however it is cut
                   into micro-batches.
    scale_rewards: which std divides the group's advantages unless the user says otherwise.
    epsilon_high:  upper clip unless the user says otherwise; None means the same as epsilon.
    """

    name: str
    summary: str
    source: str
    weights: Callable[[Tensor, int], Tensor]
    scale_rewards: str = "group"
    epsilon_high: float | None = None


ALGORITHMS: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> None:
    """Add to the table. Raises ValueError if the name is taken."""
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"an algorithm named {algorithm.name!r} is registered already")
    ALGORITHMS[algorithm.name] = algorithm


def get_algorithm(name: str) -> Algorithm:
    """Look an algorithm up by name; ValueError names those there are."""
    if name not in ALGORITHMS:
        close = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown algorithm {name!r}; there are {', '.join(ALGORITHMS)}{hint}")
    return ALGORITHMS[name]
