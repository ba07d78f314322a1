"""One process at a time works on a run's folder. The operating system gives the lock back when the process dies.

Windows has no flock: there nothing keeps two processes apart.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class RunLock:
    """Held from creation until `release`. Raises ValueError, naming the process, if one works on the run already."""

    def __init__(self, directory: Path):
        self._file = open(directory / "run.lock", "a+")  # noqa: SIM115  (it is held open)
        try:
            _lock(self._file.fileno())
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise ValueError(
                f"{directory} is being trained by process {holder or '?'} already: stop that run first "
                "(run.stop(), or end its kernel)"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Safe to call twice."""
        self._file.close()


def refuse_if_elsewhere(directory: Path) -> None:
    """ValueError if another process works on the run. One of this process is no reason: it may be stopped first."""
    try:
        RunLock(directory).release()
    except ValueError as error:
        if f"process {os.getpid()} " not in str(error):
            raise


def _lock(file: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
