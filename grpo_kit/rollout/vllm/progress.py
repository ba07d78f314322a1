"""vLLM's start-up in a few lines, one a stage, instead of its log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = "vllm"
# What these warn of is meant so: kernels that the trainer compiles, and that there is no tokenizer.
NOISE = ("vllm.utils.jit_monitor", "vllm.renderers.base")
# What vLLM logs when a stage begins, and what it is.
STAGES = (
    ("Initializing a V1 LLM engine", "preparing"),
    ("Loading model from scratch", "loading the weights"),
    ("Model loading took", "trying the longest step"),
    ("GPU KV cache size", "warming up, and capturing CUDA graphs"),
)


@contextmanager
def shown(say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Within the block each stage that vLLM enters is said, with the seconds so far. Gives what says a stage that the
    log does not know."""
    begun = time.monotonic()

    def tell(stage: str) -> None:
        say(f"vLLM, {time.monotonic() - begun:.0f} s: {stage}")

    logger, stages = logging.getLogger(LOGGER), _Stages(tell)
    tell("importing it")
    logger.addHandler(stages)
    try:
        yield tell
    finally:
        logger.removeHandler(stages)
    tell("ready")


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block vLLM's own handlers show errors only, and afterwards all but NOISE. To be entered once vLLM is
    imported: that makes them."""
    logger = logging.getLogger(LOGGER)
    for name in NOISE:
        logging.getLogger(name).setLevel(logging.ERROR)
    levels = [(handler, handler.level) for handler in logger.handlers if not isinstance(handler, _Stages)]
    for handler, level in levels:
        handler.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)


class _Stages(logging.Handler):
    def __init__(self, tell: Callable[[str], None]):
        super().__init__(logging.INFO)
        self._tell, self._left = tell, list(STAGES)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        for stage in self._left:
            if message.startswith(stage[0]):
                self._left.remove(stage)
                self._tell(stage[1])
                return
