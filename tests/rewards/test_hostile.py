"""What a reward may do to a run: nothing. Each kind of misbehaviour gives its reason, and the batch ends in time."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time

import pytest

from grpo_kit.rewards import RewardSet, Score, reward

N = 8


def scores(function, **options) -> list[Score]:
    table = RewardSet(reward(function, name="some", **options)).score(["p"] * N, [str(n) for n in range(N)], [{}] * N)
    return table.column("some")


def test_one_that_raises():
    def some(completion):
        if completion == "2":
            raise ValueError("no number\n  in it")
        return 1.0

    got = scores(some)
    assert got[2] == Score(None, "error", "ValueError: no number in it (line 3 of some)")
    assert got[:2] + got[3:] == [Score(1.0)] * (N - 1)


def test_the_line_is_the_users_even_when_a_library_raises():
    def helper(completion):
        import json

        return json.loads("{" + completion)

    def some(completion):
        return helper(completion)

    assert scores(some)[0].detail.endswith("(line 4 of helper)")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), RecursionError("deep")])
def test_one_that_wants_to_end_everything(error):
    def some(completion):
        raise error

    got = scores(some)
    assert [score.reason for score in got] == ["error"] * N
    assert got[0].detail.startswith(type(error).__name__)


def test_one_whose_error_cannot_be_shown():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def some(completion):
        raise Mute

    assert scores(some)[0].detail.startswith("Mute: (it cannot be shown as text)")


def test_one_with_a_very_long_error():
    def some(completion):
        raise ValueError("x" * 10**6)

    assert len(scores(some)[0].detail) < 400


def sleeps(completion):
    time.sleep(60)


def spins(completion):
    while True:
        pass


def spins_and_catches(completion):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.001)


@pytest.mark.parametrize("function", [sleeps, spins, spins_and_catches])
def test_one_that_hangs(function):
    start = time.monotonic()
    got = scores(function, time_limit=0.2)
    assert time.monotonic() - start < 20
    assert [score.reason for score in got] == ["timeout"] * N
    assert got[0].detail == "took more than 0.2 s"
    assert got[-1].detail.startswith("not tried")


def test_one_that_hangs_once_spoils_only_that_completion():
    def some(completion):
        return spins(completion) if completion == "3" else 1.0

    assert [score.reason for score in scores(some, time_limit=0.3)] == ["ok"] * 3 + ["timeout"] + ["ok"] * 4


def test_a_batched_one_that_hangs():
    def some(completions):
        time.sleep(60)

    start = time.monotonic()
    assert scores(some, time_limit=0.2) == [Score(None, "timeout", "took more than 0.2 s")] * N
    assert time.monotonic() - start < 20


def test_hangs_of_one_reward_do_not_touch_the_next():
    table = RewardSet(reward(spins, time_limit=0.1), reward(lambda completion: 1.0, name="fine")).score(
        ["p"] * N, ["c"] * N, [{}] * N
    )
    assert table.values == [[None, 1.0]] * N
    assert table.totals == [1.0] * N


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "not applicable"),
        (math.nan, "not finite"),
        (-math.inf, "not finite"),
        (10**400, "not finite"),
        ("1.0", "wrong shape"),
        ([1.0], "wrong shape"),
        ({"score": 1.0}, "wrong shape"),
    ],
)
def test_one_that_returns_no_usable_number(returned, reason):
    assert [(s.value, s.reason) for s in scores(lambda completion: returned)] == [(None, reason)] * N


@pytest.mark.parametrize("count", [0, 1, N - 1, N + 1])
def test_a_batched_one_of_the_wrong_length(count):
    wrong = Score(None, "wrong shape", f"returned {count} values for {N} completions")
    assert scores(lambda completions: [1.0] * count) == [wrong] * N


@pytest.mark.parametrize(
    ("returned", "kind"), [(None, "NoneType"), (1.0, "float"), ("12345678", "str"), ({n: n for n in range(N)}, "dict")]
)
def test_a_batched_one_that_returns_no_list(returned, kind):
    wrong = Score(None, "wrong shape", f"returned {kind}, expected a list of {N} numbers")
    assert scores(lambda completions: returned) == [wrong] * N


def test_a_batched_ones_bad_elements_spoil_only_themselves():
    got = scores(lambda completions: [1, "2", None, math.nan, [3], Score(0.0, "unparseable"), True, 4.5])
    assert [score.reason for score in got] == [
        *("ok", "wrong shape", "not applicable", "not finite", "wrong shape", "unparseable", "ok", "ok")
    ]
    assert [score.value for score in got] == [1.0, None, None, None, None, 0.0, 1.0, 4.5]


def test_a_batched_one_that_raises():
    def some(completions):
        return [1.0 / len(c[1:]) for c in completions]

    wrong = Score(None, "error", "ZeroDivisionError: float division by zero (line 2 of some)")
    assert scores(some) == [wrong] * N


def test_one_that_returns_an_unusable_object():
    class Bad:
        def item(self):
            raise OSError("gone")

    assert scores(lambda completion: Bad())[0].reason == "error"
    assert scores(lambda completions: [Bad()] * N)[0].reason == "error"


def test_nothing_is_printed_and_no_hook_is_called(capsys, monkeypatch):
    called: list = []
    monkeypatch.setattr(threading, "excepthook", called.append)
    monkeypatch.setattr(sys, "excepthook", lambda *what: called.append(what))
    scores(spins, time_limit=0.05)
    scores(lambda completion: 1 / 0)
    time.sleep(0.2)
    assert capsys.readouterr() == ("", "")
    assert called == []
