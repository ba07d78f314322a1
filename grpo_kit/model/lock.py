"""One lock around the model, that the training loop gives up between micro-batches and tokens when somebody waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class ModelLock:
    """A reentrant lock that is handed on in the order of arrival: `with lock: …; lock.give_way(); …`.

    A plain lock released and taken again at once would starve the waiter; here whoever came first goes first, the
    training loop included.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._queue: deque[object] = deque()

    def __enter__(self) -> None:
        with self._condition:
            if not self.held:
                self._take(depth=0)
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._condition:
            self._depth -= 1
            if self._depth == 0:
                self._give_up()

    @property
    def held(self) -> bool:
        """Whether the thread that asks holds it."""
        return self._owner == threading.get_ident()

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self._queue)

    def give_way(self) -> None:
        """Called by the holder: let those who wait now have their turn, then go on."""
        with self._condition:
            if self._queue:
                self._take(self._give_up())

    @contextmanager
    def released(self) -> Iterator[None]:
        """Called by the holder: others may use the model for as long as the block lasts."""
        with self._condition:
            depth = self._give_up()
        try:
            yield
        finally:
            with self._condition:
                self._take(depth)

    def _take(self, depth: int) -> None:
        ticket = object()
        self._queue.append(ticket)
        try:
            self._condition.wait_for(lambda: self._owner is None and self._queue[0] is ticket)
            self._owner, self._depth = threading.get_ident(), depth
        finally:  # an interrupted waiter leaves the queue, and those behind it move up
            self._queue.remove(ticket)
            self._condition.notify_all()

    def _give_up(self) -> int:
        depth, self._owner, self._depth = self._depth, None, 0
        self._condition.notify_all()
        return depth
