"""A forward and backward pass that can be given up between two layers, so that a pause need not wait for its end.

A pass over a long micro-batch takes seconds; a person who clicks Pause, or asks the model something, should not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_kit.model import Model


class PassGivenUp(Exception):
    """Raised out of a pass, which has moved no weights. In backward it may have added gradients of some layers: only
    the same pass may be made again, which adds the rest."""


@contextmanager
def can_be_given_up(model: Model, unwanted: Callable[[], bool]) -> Iterator[None]:
    """Within the block a pass of the training loop through the model, forwards or backwards, raises PassGivenUp once
    `unwanted()` is true."""

    def check() -> None:
        if unwanted():
            raise PassGivenUp

    with model.trunk.watched(check):
        yield
