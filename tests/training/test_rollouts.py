"""Dynamic sampling: groups that teach nothing give their places to others, in order, as often as asked."""

from __future__ import annotations

import math

import pytest

from grpo_kit.rewards import ScoreTable
from grpo_kit.rewards.score import Score
from grpo_kit.rollout import Completion
from grpo_kit.training.rollouts import Rollouts, with_live_groups

DEAD, ALIVE = (1.0, 1.0), (0.0, 1.0)


def rollouts(groups, names=None):
    """Of {row: its two scores}; texts say row and place."""
    rows = [row for row, _ in groups]
    completions = [Completion([row, i], [-1.0, -1.0], "eos", f"{row}.{i}") for row in rows for i in range(2)]
    scores = [
        [Score(value)] if value is not None else [Score(None, "error", "oh")] for _, pair in groups for value in pair
    ]
    return Rollouts(rows, completions, ScoreTable(["r"], [2.0], scores))


class Drawn:
    """Gives what was prepared for each round, and keeps what was asked."""

    def __init__(self, *rounds):
        self.rounds, self.asked = rounds, []

    def __call__(self, number, count):
        self.asked.append((number, count))
        found = rollouts(self.rounds[number - 1])
        assert len(found.rows) == count
        return found


def texts(found):
    return [completion.text for completion in found.completions]


def test_nothing_is_drawn_while_all_groups_teach():
    first, draw = rollouts([(0, ALIVE), (1, ALIVE)]), Drawn()
    assert with_live_groups(first, 3, draw) is first
    assert draw.asked == []
    assert first.replaced == 0


def test_without_rounds_dead_groups_stay():
    first = rollouts([(0, DEAD), (1, ALIVE)])
    assert with_live_groups(first, 0, Drawn()) is first


def test_a_dead_group_gives_its_place_to_a_new_one():
    first = rollouts([(0, ALIVE), (1, DEAD), (2, ALIVE)])
    draw = Drawn([(7, ALIVE)])
    found = with_live_groups(first, 2, draw)
    assert draw.asked == [(1, 1)]
    assert found.rows == [0, 7, 2]
    assert texts(found) == ["0.0", "0.1", "7.0", "7.1", "2.0", "2.1"]
    assert found.totals.tolist() == [0, 2, 0, 2, 0, 2]
    assert found.replaced == 1
    assert (found.group_size, found.table.names, found.table.weights) == (2, ["r"], [2.0])
    assert texts(first) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]  # what was drawn first is still known


def test_only_new_groups_that_teach_are_taken_and_the_rest_is_drawn_again():
    first = rollouts([(0, DEAD), (1, ALIVE), (2, DEAD), (3, DEAD)])
    draw = Drawn([(7, DEAD), (8, ALIVE), (9, DEAD)], [(10, ALIVE), (11, DEAD)])
    found = with_live_groups(first, 2, draw)
    assert draw.asked == [(1, 3), (2, 2)]
    assert found.rows == [8, 1, 10, 3]  # the last one is still dead, and stays
    assert found.dead() == [False, False, False, True]
    assert found.replaced == 2


def test_rounds_end_as_soon_as_all_teach():
    draw = Drawn([(7, ALIVE)])
    with_live_groups(rollouts([(0, DEAD)]), 5, draw)
    assert draw.asked == [(1, 1)]


def test_when_no_draw_helps_the_step_is_as_it_was():
    first = rollouts([(0, DEAD), (1, ALIVE)])
    draw = Drawn([(7, DEAD)], [(8, DEAD)])
    found = with_live_groups(first, 2, draw)
    assert draw.asked == [(1, 1), (2, 1)]
    assert (found.rows, texts(found), found.replaced) == ([0, 1], texts(first), 0)


def test_a_group_with_fewer_than_two_scores_is_dead():
    first = rollouts([(0, (1.0, None)), (1, (None, None)), (2, ALIVE)])
    assert first.dead() == [True, True, False]
    found = with_live_groups(first, 1, Drawn([(7, ALIVE), (8, ALIVE)]))
    assert (found.rows, found.replaced) == ([7, 8, 2], 2)


def test_scores_stay_with_their_answers_reasons_included():
    first = rollouts([(0, (None, None)), (1, ALIVE)])
    found = with_live_groups(first, 1, Drawn([(7, (3.0, 4.0))]))
    assert [row[0].value for row in found.table.scores] == [3.0, 4.0, 0.0, 1.0]
    unscored = rollouts([(0, (None, 1.0))])
    assert math.isnan(unscored.totals[0])
    assert unscored.groups([0]).table.scores[0][0].detail == "oh"


def test_some_groups():
    found = rollouts([(0, DEAD), (1, ALIVE), (2, (5.0, 6.0))]).groups([2, 0])
    assert found.rows == [2, 0]
    assert texts(found) == ["2.0", "2.1", "0.0", "0.1"]
    assert found.totals.tolist() == pytest.approx([10, 12, 2, 2])


# ---- each reward by itself ----

SPLIT = [(1.0, 0.0), (0.0, 1.0)]  # two rewards that disagree: the sums are alike


def two_rewards(groups):
    """Of {row: the two answers' two scores}."""
    rows = [row for row, _ in groups]
    completions = [Completion([row, i], [-1.0, -1.0], "eos", f"{row}.{i}") for row in rows for i in range(2)]
    scores = [[Score(value) for value in answer] for _, answers in groups for answer in answers]
    return Rollouts(rows, completions, ScoreTable(["one", "other"], [1.0, 1.0], scores))


def test_a_group_teaches_as_long_as_one_reward_tells_its_answers_apart():
    found = two_rewards([(0, SPLIT), (1, [(1.0, 0.0)] * 2), (2, [(1.0, 0.0), (1.0, 0.5)]), (3, [(None, 1.0)] * 2)])
    assert found.dead() == [True, True, False, True]
    assert found.dead(each_reward=True) == [False, True, False, True]


def test_then_it_is_not_replaced():
    first, draw = two_rewards([(0, SPLIT), (1, [(1.0, 1.0)] * 2)]), []

    def drawn(number, count):
        draw.append((number, count))
        return two_rewards([(7 + i, SPLIT) for i in range(count)])

    found = with_live_groups(first, 2, drawn, each_reward=True)
    assert (found.rows, found.replaced, draw) == ([0, 7], 1, [(1, 1)])
    draw.clear()
    found = with_live_groups(first, 2, drawn)  # by their sums all of them are alike
    assert (found.rows, found.replaced, draw) == ([0, 1], 0, [(1, 2), (2, 2)])
