"""Calls that end in bounded time, from any thread.

`signal.alarm` works on the main thread only, and training runs off it. So calls are made one after another in a
daemon worker thread while the caller waits for each with a deadline. A worker that misses its deadline is abandoned,
asked to end, and a fresh one does the rest.

Deliberately not a sandbox: the calls share the process with everything else. A thread that is inside C code cannot be
asked and is left behind until that code returns; C code that also keeps the interpreter lock (a regular expression
that backtracks without end, `9**9**9**9`) stops the whole process, and only a process of its own would help.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Result = TypeVar("Result")

MOST_TIMEOUTS = 3  # of one list of calls; what is left after them is not tried, which bounds the total wait


class _Abandoned(BaseException):
    """Raised inside a worker that missed its deadline; no Exception, so that `except Exception` lets it through."""


class TimedOut(Exception):
    """A call missed its deadline."""


class _Worker(Generic[Result]):
    """A daemon thread that makes calls one after another. The calls must not raise."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Result] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="reward", daemon=True)
        self._thread.start()

    def call(self, call: Callable[[], Result], limit: float) -> Result:
        """What `call` returns; TimedOut, with the worker abandoned, if that takes more than `limit` seconds."""
        self._calls.put(call)
        try:
            return self._results.get(timeout=min(limit, threading.TIMEOUT_MAX))
        except queue.Empty:
            self.abandon()
            raise TimedOut from None
        except BaseException:  # the waiting thread was interrupted; nobody will wait for the worker any more
            self.abandon()
            raise

    def close(self) -> None:
        """Lets the idle worker end."""
        self._calls.put(None)

    def abandon(self) -> None:
        """Asks the busy worker to end at its next Python instruction."""
        # Only then close: until it reads the None it is alive, so its ident cannot belong to another thread yet.
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Abandoned))
        self.close()

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                self._results.put(call())
        except _Abandoned:
            return


def call_each(calls: Sequence[Callable[[], Result]], limit: float, timed_out: Callable[[str], Result]) -> list[Result]:
    """The results of `calls`, made one after another in a worker thread, each within `limit` seconds.

    `timed_out(detail)` makes the result of a call that missed its deadline. After three such calls the rest
    are not tried and get one as well, so hanging calls cost at most 3 · limit seconds. The calls must not raise.
    """
    results: list[Result] = []
    worker: _Worker[Result] | None = None
    missed = 0
    for call in calls:
        if missed == MOST_TIMEOUTS:
            results.append(timed_out(f"not tried, because {missed} calls before it took more than {limit:g} s each"))
            continue
        worker = worker or _Worker()
        try:
            results.append(worker.call(call, limit))
        except TimedOut:
            worker = None
            missed += 1
            results.append(timed_out(f"took more than {limit:g} s"))
    if worker is not None:
        worker.close()
    return results
