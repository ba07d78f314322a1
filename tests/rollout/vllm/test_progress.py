"""vLLM's start is told in stages, and its log is quiet meanwhile and afterwards."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from grpo_kit.rollout.vllm import progress

Log = tuple[logging.Logger, io.StringIO]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """As vLLM sets its own up when it is imported."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
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
    for name in progress.NOISE:
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_stages_are_told_once_and_the_log_is_not_shown(log: Log) -> None:
    logger, written = log
    told: list[str] = []
    with progress.followed(told.append):
        for message in ("Loading model from scratch...", "something else", "Loading model from scratch..."):
            logging.getLogger("vllm.v1.worker").info(message)
        logger.info("GPU KV cache size: %s tokens", 488)
        logger.warning("a warning")
        logger.error("an error")
    assert told == ["loading the weights", "warming up, and capturing CUDA graphs"]
    assert written.getvalue() == "an error\n"


def test_afterwards_only_warnings_are_shown_that_mean_something(log: Log) -> None:
    logger, written = log
    with progress.followed(print):
        pass
    logger.info("Successfully reset prefix cache")
    logging.getLogger("vllm.utils.jit_monitor").warning("a kernel of the trainer's was compiled")
    logger.warning("a warning")
    assert written.getvalue() == "a warning\n"


def test_a_level_that_the_user_chose_stays(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, written = log
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with progress.followed(print):
        logger.info("wanted")
    logger.info("still")
    assert written.getvalue() == "wanted\nstill\n"


def test_a_start_that_fails_leaves_no_handler(log: Log) -> None:
    with pytest.raises(KeyError), progress.followed(print):
        raise KeyError
    assert not [handler for handler in log[0].handlers if type(handler) is progress._Stages]


def test_the_clock_says_the_seconds() -> None:
    said: list[str] = []
    progress.clock(said.append)("loading the weights")
    assert said == ["vLLM, 0 s: loading the weights"]
