from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from grpo_kit.rewards.time_limit import call_each


def said(detail: str) -> str:
    return f"timeout: {detail}"


def spin() -> str:
    while True:
        pass


def reward_threads() -> int:
    return sum(thread.name == "reward" for thread in threading.enumerate())


def wait_for_threads(count: int) -> None:
    until = time.monotonic() + 20
    while reward_threads() > count and time.monotonic() < until:
        time.sleep(0.02)
    assert reward_threads() <= count


def test_results_come_in_order_from_one_thread_that_is_not_this_one():
    def where(number: int) -> tuple[int, int]:
        return number, threading.get_ident()

    results = call_each([partial(where, n) for n in range(4)], 5.0, lambda detail: (-1, -1))
    assert [number for number, _ in results] == [0, 1, 2, 3]
    idents = {ident for _, ident in results}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_no_calls_no_thread():
    before = reward_threads()
    assert call_each([], 5.0, said) == []
    assert reward_threads() <= before  # one of an earlier test may just have ended


def test_a_call_that_never_ends_costs_its_limit_and_its_thread_is_ended():
    before = reward_threads()
    start = time.monotonic()
    assert call_each([spin, lambda: "next"], 0.2, said) == ["timeout: took more than 0.2 s", "next"]
    assert 0.2 <= time.monotonic() - start < 10
    wait_for_threads(before)


def test_after_three_timeouts_the_rest_is_not_tried():
    tried = []

    def hang(number: int) -> str:
        tried.append(number)
        return spin()

    start = time.monotonic()
    results = call_each([partial(hang, n) for n in range(50)], 0.1, said)
    assert time.monotonic() - start < 10  # fifty limits would be the least otherwise, and a spin never ends
    assert tried == [0, 1, 2]
    assert results[:3] == ["timeout: took more than 0.1 s"] * 3
    assert results[3:] == ["timeout: not tried, because 3 calls before it took more than 0.1 s each"] * 47


def test_it_works_off_the_main_thread():
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.extend(call_each([spin, lambda: "fine"], 0.1, said)))
    thread.start()
    thread.join(20)
    assert results == ["timeout: took more than 0.1 s", "fine"]


def test_an_unlimited_call_is_possible():
    assert call_each([lambda: "fine"], float("inf"), said) == ["fine"]


def test_an_interrupt_while_waiting_leaves_no_thread_behind():
    before = reward_threads()

    class Interrupting:
        """Stands for the result queue of a wait that Ctrl-C ends."""

        def get(self, timeout: float) -> None:
            raise KeyboardInterrupt

    from grpo_kit.rewards.time_limit import _Worker

    worker: _Worker[str] = _Worker()
    worker._results = Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        worker.call(spin, 5.0)
    wait_for_threads(before)
