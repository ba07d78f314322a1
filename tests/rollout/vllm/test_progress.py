"""vLLM's start is told in stages, and its log is quiet meanwhile."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from grpo_kit.rollout.vllm import progress


@pytest.fixture
def logger() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """As vLLM sets its own up."""
    made, written = logging.getLogger(progress.LOGGER), io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setLevel(logging.INFO)
    level, propagate = made.level, made.propagate
    made.addHandler(handler)
    made.setLevel(logging.INFO)
    made.propagate = False
    yield made, written
    made.removeHandler(handler)
    made.setLevel(level)
    made.propagate = propagate


def test_stages_are_said_once_and_the_log_is_not(logger: tuple[logging.Logger, io.StringIO]) -> None:
    log, written = logger
    said: list[str] = []
    with progress.shown(said.append), progress.quiet():
        for message in ("Loading model from scratch...", "something else", "Loading model from scratch..."):
            logging.getLogger("vllm.v1.worker").info(message)
        log.info("GPU KV cache size: %s tokens", 488)
        log.warning("a warning")
        log.error("an error")
    assert [line.split(": ")[1] for line in said] == [
        "importing it",
        "loading the weights",
        "warming up, and capturing CUDA graphs",
        "ready",
    ]
    assert written.getvalue() == "an error\n"
    log.info("afterwards")
    assert written.getvalue().endswith("afterwards\n") and len(said) == 4


def test_a_start_that_fails_is_not_ready(logger: tuple[logging.Logger, io.StringIO]) -> None:
    said: list[str] = []
    with pytest.raises(KeyError), progress.shown(said.append):
        raise KeyError
    assert len(said) == 1 and not [h for h in logger[0].handlers if type(h) is progress._Stages]
