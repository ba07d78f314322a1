"""vLLM's start-up in a few lines, one a stage, instead of its log; and its log quiet afterwards."""

from __future__ import annotations

import logging
import os
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


def clock(say: Callable[[str], None]) -> Callable[[str], None]:
    """Returns what says a stage with the seconds since now."""
    begun = time.monotonic()

    def tell(stage: str) -> None:
        say(f"vLLM, {time.monotonic() - begun:.0f} s: {stage}")

    return tell


@contextmanager
def followed(tell: Callable[[str], None]) -> Iterator[None]:
    """Within the block each stage that vLLM's log enters is told once, and of the log only errors are shown; from then
    on warnings too, but those of NOISE. To be entered once vLLM is imported: that sets its log up anew. Who chose a
    level by VLLM_LOGGING_LEVEL keeps it."""
    logger, stages = logging.getLogger(LOGGER), _Stages(tell)
    own = list(logger.handlers) if "VLLM_LOGGING_LEVEL" not in os.environ else []
    for name in NOISE:
        logging.getLogger(name).setLevel(logging.ERROR)
    for handler in own:
        handler.setLevel(logging.ERROR)
    logger.addHandler(stages)
    try:
        yield
    finally:
        logger.removeHandler(stages)
        for handler in own:
            handler.setLevel(logging.WARNING)


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
