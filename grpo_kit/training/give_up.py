"""A forward and backward pass that can be given up between two layers, so that a pause need not wait for its end.

A pass over a long micro-batch takes seconds; a person who clicks Pause, or asks the model something, should not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PassGivenUp(Exception):
    """Raised out of a pass; it has changed nothing and can be made again."""


@contextmanager
def can_be_given_up(layers: Iterable[torch.nn.Module], unwanted: Callable[[], bool]) -> Iterator[None]:
    """Within the block a pass through `layers`, forwards or backwards, raises PassGivenUp once `unwanted()` is true."""

    def check(*_: Any) -> None:
        if unwanted():
            raise PassGivenUp

    def after_forward(layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(check)

    handles = [handle for layer in layers for handle in _hooks(layer, check, after_forward)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(layer: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]) -> tuple[Any, Any]:
    return layer.register_forward_pre_hook(before), layer.register_forward_hook(after)
