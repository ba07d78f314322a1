from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from grpo_kit.rewards import HumanReward, Rating, RewardSet, from_spec, human
from grpo_kit.rewards.human import MOST_OPEN, chosen

PROMPTS = ["p", "p", "q", "q"]
TEXTS = ["a", "b", "c", "d"]
PATIENCE = 20.0  # seconds that a test waits for another thread before it fails


def score(asked: HumanReward, prompts: list[Any] = PROMPTS, texts: list[str] = TEXTS, step: int = 1) -> list[Any]:
    """The values that a run would get."""
    table = RewardSet(asked).score(prompts, texts, [{}] * len(texts), step=step)
    assert {s.reason for s in table.column(asked.name)} <= {"ok", "not applicable"}
    return [row[0] for row in table.values]


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def scoring(asked: HumanReward, *batch: Any, **options: Any) -> Iterator[list[list[Any]]]:
    """Scores in another thread, as a run does; the list holds the values once the block has ended."""
    results: list[list[Any]] = []
    thread = threading.Thread(target=lambda: results.append(score(asked, *batch, **options)))
    thread.start()
    until(lambda: asked.progress().waits)
    yield results
    thread.join(PATIENCE)
    assert not thread.is_alive()


def ids(asked: HumanReward) -> dict[str, int]:
    return {question.text: question.id for question in asked.open()}


def reward_threads() -> set[threading.Thread]:
    """Not their number: threads that other tests left may end meanwhile."""
    return {thread for thread in threading.enumerate() if thread.name == "reward"}


def test_training_waits_until_all_is_rated():
    asked = human()
    with scoring(asked, step=7) as results:
        questions = asked.open()
        assert [(q.step, q.prompt, q.text) for q in questions] == [
            (7, p, t) for p, t in zip(PROMPTS, TEXTS, strict=True)
        ]
        asked.rate(questions[0].id, True)
        asked.rate(questions[1].id, False)
        progress = asked.progress()
        assert (progress.waits, progress.rated, progress.asked) == (True, 2, 4)
        assert progress.seconds_left is not None and 0 < progress.seconds_left <= 600
        asked.prefer(questions[3].id, questions[2].id)
    assert results == [[1.0, 0.0, 0.0, 1.0]]
    assert asked.open() == [] and not asked.progress().waits


def test_what_is_skipped_does_not_apply():
    asked = human()
    with scoring(asked, ["p", "p"], ["a", "b"]) as results:
        asked.skip(ids(asked)["a"])
        asked.rate(ids(asked)["b"], True)
    assert results == [[None, 1.0]]


def test_after_the_time_limit_the_rest_does_not_apply_and_is_withdrawn():
    asked = human(time_limit=0.3)
    before = reward_threads()
    assert score(asked) == [None] * 4
    assert asked.open() == []
    until(lambda: reward_threads() <= before)
    assert asked.time_limit > asked.patience == 0.3


def test_a_wait_that_scoring_gives_up_ends_its_thread_and_withdraws_the_questions():
    asked = human()
    asked.time_limit = 0.2  # shorter than the reward's own patience, as never in a run
    before = reward_threads()
    assert RewardSet(asked).score(["p"], ["a"], [{}]).scores[0][0].reason == "timeout"
    until(lambda: reward_threads() <= before)
    assert asked.open() == [] and not asked.progress().waits


def test_a_run_that_is_stopped_ends_the_waiting_until_it_is_attached_again():
    asked = human()
    with scoring(asked) as results:
        asked.rate(ids(asked)["b"], True)
        asked.give_up()
    assert results == [[None, 1.0, None, None]]
    assert score(asked) == [None, 1.0, None, None]  # does not wait
    asked.attach(lambda rating: None, [])
    with scoring(asked) as results:
        for number in ids(asked).values():
            asked.skip(number)
    assert results == [[None, 1.0, None, None]]


def test_without_waiting_training_goes_on_and_equal_answers_count_later():
    asked = human(wait=False)
    assert score(asked) == [None] * 4
    asked.rate(ids(asked)["a"], True)
    asked.prefer(ids(asked)["d"], ids(asked)["c"])
    assert list(ids(asked)) == ["b"]
    assert score(asked, ["q", "p", "q", "p"], ["d", "a", "a", "b"], step=2) == [1.0, 1.0, None, None]
    assert [(q.prompt, q.text, q.step) for q in asked.open()] == [("p", "b", 1), ("q", "a", 2)]
    progress = asked.progress()
    assert (progress.waits, progress.rated, progress.asked, progress.seconds_left) == (False, 2, 2, None)


def test_without_waiting_the_newest_questions_stay():
    asked = human(wait=False)
    for step in range(3):
        score(asked, ["p"] * 100, [f"{step}/{index}" for index in range(100)], step=step)
    texts = list(ids(asked))
    assert len(texts) == MOST_OPEN == 200
    assert (texts[0], texts[-1]) == ("1/0", "2/99")


def test_equal_answers_are_asked_about_once():
    asked = human()
    with scoring(asked, ["p", "p", "p"], ["a", "b", "a"]) as results:
        assert list(ids(asked)) == ["a", "b"]
        asked.rate(ids(asked)["a"], True)
        asked.rate(ids(asked)["b"], False)
    assert results == [[1.0, 0.0, 1.0]]


def test_only_different_answers_to_the_same_prompt_are_compared():
    asked = human(wait=False)
    score(asked)
    of = ids(asked)
    with pytest.raises(ValueError, match="same prompt"):
        asked.prefer(of["a"], of["c"])
    with pytest.raises(ValueError, match="the same answer"):
        asked.prefer(of["a"], of["a"])
    for call in (lambda: asked.rate(99, True), lambda: asked.skip(99), lambda: asked.prefer(of["a"], 99)):
        with pytest.raises(ValueError, match="no question 99"):
            call()
    assert len(asked.open()) == 4 and asked.ratings == []


def test_comparisons_are_offered_two_by_two_and_the_last_one_beside_a_rated_one():
    asked = human(wait=False)
    score(asked, ["p", "q", "p", "p", "r"], ["a", "b", "c", "d", "e"])

    def offered() -> list[tuple[str, str]]:
        return [(one.text, other.text) for one, other in asked.pairs()]

    assert offered() == [("a", "c")]
    of = ids(asked)
    asked.skip(of["a"])
    assert offered() == [("c", "d")]
    asked.prefer(of["d"], of["c"])
    assert offered() == []
    score(asked, ["p"], ["z"])
    assert offered() == [("z", "c")]


def test_an_answer_may_be_changed():
    asked = human(wait=False)
    score(asked)
    number = ids(asked)["a"]
    asked.rate(number, True)
    asked.rate(number, False)
    assert score(asked)[0] == 0.0
    assert [rating.value for rating in asked.ratings] == [1.0, 0.0]


def test_a_question_withdrawn_and_asked_anew_is_answered_by_either():
    asked = human(time_limit=0.3)
    old = []
    asked.subscribe(lambda: old.extend(asked.open()))
    score(asked, ["p"], ["a"])
    asked.patience = 600.0
    with scoring(asked, ["p"], ["a"]) as results:
        asked.rate(old[0].id, True)
    assert results == [[1.0]]


def test_ratings_say_all_that_a_record_needs():
    asked = human(wait=False, name="taste")
    before = time.time()
    score(asked, [[{"role": "user", "content": "3 + 5?"}]] * 2, ["8", "9"], step=4)
    of = ids(asked)
    asked.prefer(of["8"], of["9"])
    asked.rate(of["9"], False)
    first, second = asked.ratings
    assert (first.kind, first.prompt, first.text, first.other, first.value) == ("pair", "user: 3 + 5?", "8", "9", 1.0)
    assert (second.kind, second.text, second.other, second.value) == ("thumb", "9", None, 0.0)
    assert {(r.step, r.reward) for r in asked.ratings} == {(4, "taste")}
    assert before <= first.time <= second.time <= time.time()


def test_an_attached_run_knows_and_keeps_ratings():
    asked = human(wait=False)
    score(asked)
    asked.rate(ids(asked)["a"], True)  # before any run
    kept: list[Rating] = []
    known = [Rating("thumb", "p", "b", 0.0, time=5.0), Rating("thumb", "p", "c", 1.0, reward="another")]
    asked.attach(kept.append, known)
    assert [rating.text for rating in kept] == ["a"]
    assert [rating.text for rating in asked.ratings] == ["b", "a"]
    assert score(asked) == [1.0, 0.0, None, None]
    asked.rate(ids(asked)["c"], True)
    later: list[Rating] = []
    asked.attach(later.append, [*known, *kept])  # the next run
    asked.rate(ids(asked)["d"], True)
    assert [rating.text for rating in kept] == ["a", "c"]
    assert [rating.text for rating in later] == ["d"]
    assert len(asked.ratings) == 4


def test_a_rating_that_could_not_be_kept_counts_and_is_handed_over_again():
    asked = human(wait=False)
    score(asked)
    kept: list[Rating] = []

    def keep(rating: Rating) -> None:
        if not kept and rating.text == "a" and len(asked.ratings) == 1:
            raise OSError("the disk is full")
        kept.append(rating)

    asked.attach(keep, [])
    with pytest.raises(OSError, match="the disk is full"):
        asked.rate(ids(asked)["a"], True)
    assert score(asked)[0] == 1.0
    asked.rate(ids(asked)["b"], True)
    assert [rating.text for rating in kept] == ["a", "b"]


def test_subscribers_hear_of_everything_and_one_that_fails_is_dropped(caplog):
    asked = human(wait=False)
    heard: list[int] = []

    def broken() -> None:
        raise OSError("the socket is gone")

    asked.subscribe(broken)
    leave = asked.subscribe(lambda: heard.append(len(asked.open())))
    with caplog.at_level(logging.WARNING):
        score(asked)
        asked.rate(ids(asked)["a"], True)
        asked.skip(ids(asked)["b"])
    assert heard == [4, 3, 2]
    assert sum("the socket is gone" in record.message for record in caplog.records) == 1
    leave()
    leave()
    asked.skip(ids(asked)["c"])
    assert heard == [4, 3, 2]


def test_many_people_may_rate_at_once():
    asked = human(time_limit=60)
    kept: list[Rating] = []
    asked.attach(kept.append, [])
    count = 40
    with scoring(asked, [f"p{i // 8}" for i in range(count)], [f"t{i}" for i in range(count)]) as results:
        questions = asked.open()
        people = [
            threading.Thread(target=lambda mine=questions[i::4]: [asked.rate(q.id, q.id % 2 == 0) for q in mine])
            for i in range(4)
        ]
        for person in people:
            person.start()
        for person in people:
            person.join(PATIENCE)
    assert results == [[float(q.id % 2 == 0) for q in questions]]
    assert sorted(kept, key=lambda r: r.text) == sorted(asked.ratings, key=lambda r: r.text)


def keys(*sizes: int) -> list[tuple[str, str]]:
    return [(f"p{group}", f"t{nth}") for group, size in enumerate(sizes) for nth in range(size)]


def names(found: list[tuple[str, str]]) -> str:
    return " ".join(f"{prompt[1:]}{text[1:]}" for prompt, text in found)


@pytest.mark.parametrize(
    ("sizes", "wanted", "expected"),
    [
        ((4, 4, 4, 4), None, "00 01 02 03 10 11 12 13 20 21 22 23 30 31 32 33"),
        ((4, 4, 4, 4), 8, "00 01 02 03 20 21 22 23"),
        ((4, 4, 4, 4), 6, "00 01 02 03 20 22"),
        ((4, 4, 4, 4), 4, "00 01 02 03"),
        ((4, 4, 4, 4), 2, "00 02"),
        ((2, 2, 2), 5, "00 01 10 11 20"),
        ((1, 3, 1, 3), 4, "00 10 11 12"),  # two groups (0 and 2) hold two answers, three (0, 1 and 2) five
        ((3,), 99, "00 01 02"),
    ],
)
def test_whole_groups_are_chosen_evenly(sizes, wanted, expected):
    assert names(chosen(keys(*sizes), wanted)) == expected


def test_only_those_chosen_are_waited_for():
    asked = human(per_step=2)
    with scoring(asked) as results:
        assert list(ids(asked)) == ["a", "b"]
        asked.prefer(ids(asked)["a"], ids(asked)["b"])
    assert results == [[1.0, 0.0, None, None]]


@pytest.mark.parametrize("limit", [0, -1, math.inf, math.nan, True, "600"])
def test_a_bad_time_limit_is_refused(limit):
    with pytest.raises(ValueError, match="time_limit must be a finite number"):
        human(time_limit=limit)


@pytest.mark.parametrize("count", [0, -2, 1.5, True])
def test_a_bad_number_per_step_is_refused(count):
    with pytest.raises(ValueError, match="per_step must be a whole number"):
        human(per_step=count)


def test_it_is_built_again_from_its_spec():
    made = human(time_limit=60.0, per_step=8, weight=0.5)
    again = from_spec(json.loads(json.dumps(made.spec)))
    assert isinstance(again, HumanReward)
    assert (again.wait, again.patience, again.per_step) == (True, 60.0, 8)
    assert (again.name, again.weight, again.time_limit) == ("human", 0.5, made.time_limit)


def test_it_says_that_people_are_asked():
    assert repr(human()) == "HumanReward('human', weight=1, 0 ratings, training waits up to 600 s)"
    assert "training goes on" in repr(human(wait=False))


def test_an_empty_batch_asks_nothing():
    assert score(human(), [], []) == []
