"""What vLLM changes around it while it starts, kept or put back: random state, precision of products, standard output,
and the few environment variables that it can be told things by in no other way. Those that it sets itself stay."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Read by vLLM while it starts, and set for that long only; what the user has set stays. Nothing is sent anywhere; the
# sampler that would be compiled first is never used, since every request has a seed; and Triton doesn't print what it
# tunes.
DURING_START = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "TRITON_PRINT_AUTOTUNING": "0"}


@contextmanager
def kept() -> Iterator[None]:
    """Within the block vLLM may start; afterwards all is as it was."""
    precision = torch.get_float32_matmul_precision()
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), variables(DURING_START), stdout_with_a_file():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_float32_matmul_precision(precision)


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that are set within the block, unless they are set already."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextmanager
def stdout_with_a_file() -> Iterator[None]:
    """vLLM silences the C libraries by the file behind `sys.stdout`. In some notebooks there is none: there it gets one
    that leads nowhere, while what is written goes on to the notebook."""
    if _has_file(sys.stdout):
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(_WithFile(sys.stdout, nowhere.fileno())):
        yield


class _WithFile(io.TextIOBase):
    def __init__(self, stream: Any, file: int):
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        written: int = self._stream.write(text)
        return written

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._file


def _has_file(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, AttributeError):  # io.UnsupportedOperation is an OSError
        return False
    return True
