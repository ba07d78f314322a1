"""A look between two layers of a model made of modules, forwards and backwards, while a block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def watched(layers: Iterable[torch.nn.Module], check: Callable[[], None]) -> Iterator[None]:
    """Within the block `check()` is called before each layer in both directions; what it raises ends the pass."""

    def before(*_: Any) -> None:
        check()

    def after_forward(layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(before)

    handles = [handle for layer in layers for handle in _hooks(layer, before, after_forward)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(layer: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]) -> tuple[Any, Any]:
    return layer.register_forward_pre_hook(before), layer.register_forward_hook(after)
