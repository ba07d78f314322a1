"""The model's lock: reentrant, handed on in order, given up and taken back. Threads wait on events, never on time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from grpo_kit.model.lock import ModelLock

LIMIT = 10.0  # seconds after which a waiting thread counts as stuck


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until_queued(lock: ModelLock, waiters: int) -> None:
    """Return when so many threads wait for the lock."""
    with lock._condition:
        pass
    tick = threading.Event()
    for _ in range(1000):
        if len(lock._queue) == waiters:
            return
        tick.wait(0.01)
    raise AssertionError(f"{len(lock._queue)} threads wait, not {waiters}")


def taker(lock: ModelLock, log: list[str], name: str) -> threading.Thread:
    def take() -> None:
        with lock:
            log.append(name)

    return started(take)


def test_it_is_reentrant_and_free_after_the_outer_block() -> None:
    lock, log = ModelLock(), []
    with lock:
        with lock:
            pass
        waiter = taker(lock, log, "other")
        until_queued(lock, 1)
        assert log == []
    waiter.join(LIMIT)
    assert log == ["other"]


def test_give_way_lets_those_who_wait_go_first_in_order() -> None:
    lock, log = ModelLock(), []
    with lock, lock:  # the depth survives the turn of others
        waiters = []
        for number in range(3):
            waiters.append(taker(lock, log, f"waiter {number}"))
            until_queued(lock, number + 1)
        lock.give_way()
        log.append("holder")
    assert log == ["waiter 0", "waiter 1", "waiter 2", "holder"]
    waiters.append(taker(lock, log, "later"))
    for waiter in waiters:
        waiter.join(LIMIT)
    assert log[-1] == "later"


def test_give_way_with_nobody_waiting_keeps_the_lock() -> None:
    lock = ModelLock()
    with lock:
        lock.give_way()
        assert lock._owner == threading.get_ident()


def test_the_holder_is_not_starved_by_those_who_come_back_at_once() -> None:
    """Two threads that take the lock again and again: each `give_way` costs one turn of each at most."""
    lock, stop, turns = ModelLock(), threading.Event(), []

    def hog() -> None:
        while not stop.is_set():
            with lock:
                turns.append(threading.get_ident())

    with lock:
        hogs = [started(hog), started(hog)]
        until_queued(lock, 2)
        for _ in range(20):
            before = len(turns)
            lock.give_way()
            assert 1 <= len(turns) - before <= 2
            until_queued(lock, 2)
        stop.set()
    for thread in hogs:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_a_waiter_is_not_starved_by_a_holder_that_only_leaves_and_returns() -> None:
    lock, log = ModelLock(), []
    with lock:
        waiter = taker(lock, log, "waiter")
        until_queued(lock, 1)
    with lock:
        log.append("holder again")
    waiter.join(LIMIT)
    assert log == ["waiter", "holder again"]


def test_released_gives_the_lock_away_for_the_block() -> None:
    lock, log = ModelLock(), []
    with lock, lock:
        with lock.released():
            taker(lock, log, "other").join(LIMIT)
            assert log == ["other"]
        assert (lock._owner, lock._depth) == (threading.get_ident(), 2)


def test_released_takes_the_lock_back_after_an_exception() -> None:
    lock = ModelLock()
    with lock:
        with pytest.raises(KeyError), lock.released():
            raise KeyError
        assert lock._owner == threading.get_ident()
    assert lock._owner is None


def test_an_exception_inside_frees_the_lock() -> None:
    lock, log = ModelLock(), []
    with pytest.raises(KeyError), lock:
        raise KeyError
    taker(lock, log, "other").join(LIMIT)
    assert log == ["other"]


class InterruptedCondition(threading.Condition):
    """A condition whose first wait is interrupted, as Ctrl-C does in the main thread."""

    interrupts = 1

    def wait(self, timeout: float | None = None) -> bool:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_an_interrupted_waiter_leaves_the_queue() -> None:
    lock, log, hold, held = ModelLock(), [], threading.Event(), threading.Event()

    def holder() -> None:
        with lock:
            held.set()
            hold.wait(LIMIT)

    thread = started(holder)
    held.wait(LIMIT)
    lock._condition = InterruptedCondition()
    with pytest.raises(KeyboardInterrupt), lock:
        raise AssertionError("must not be reached")
    hold.set()
    thread.join(LIMIT)
    taker(lock, log, "other").join(LIMIT)
    assert log == ["other"]
