"""One model in memory is `load_model`'s rule; here none stays behind after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_kit.model import load


@pytest.fixture(autouse=True)
def no_model_left() -> Iterator[None]:
    yield
    if load._loaded is not None:
        load._loaded.unload()
        load._loaded = None
