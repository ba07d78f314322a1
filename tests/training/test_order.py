"""Which rows a step takes, and how sequences share a micro-batch."""

from __future__ import annotations

import random

import pytest

from grpo_kit.training.order import Tokens, micro_batches, padded_micro_batches, rows_of_step, rows_to_refill


@pytest.mark.parametrize("per_step", [1, 3, 10, 25])  # 3 and 25 do not divide the epoch of 10
def test_every_epoch_visits_each_row_once(per_step):
    drawn = [row for step in range(1, 31) for row in rows_of_step(step, 10, per_step, seed=4)]
    for start in range(0, len(drawn) - 9, 10):
        assert sorted(drawn[start : start + 10]) == list(range(10))


def test_the_order_depends_on_seed_and_epoch_alone():
    first = rows_of_step(1, 50, 50, seed=1)
    assert first == rows_of_step(1, 50, 50, seed=1)
    assert first != rows_of_step(1, 50, 50, seed=2)
    assert first != rows_of_step(2, 50, 50, seed=1)
    assert first != list(range(50))


def test_how_a_run_is_cut_into_steps_does_not_change_the_order():
    by_two = [row for step in range(1, 13) for row in rows_of_step(step, 7, 2, seed=0)]
    assert by_two == [row for step in range(1, 5) for row in rows_of_step(step, 7, 6, seed=0)]


def test_one_row_is_enough():
    assert rows_of_step(3, 1, 4, seed=0) == [0, 0, 0, 0]


def alone(*lengths):
    """Units of one sequence each, of which no two have a prompt in common."""
    return [[Tokens(i, 0, length)] for i, length in enumerate(lengths)]


@pytest.mark.parametrize("budget", [1, 30, 64, 200, 100_000])
def test_packed_batches_hold_the_budget_and_every_index_once(budget):
    draw = random.Random(budget)
    units = [[Tokens(i // 4, 10 + i // 4, draw.randint(1, 60))] for i in range(40)]
    batches = micro_batches(units, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(40))
    for batch in batches:
        tokens = [units[i][0] for i in batch]
        prompts = {t.prompt: t.before for t in tokens}
        assert len(batch) == 1 or sum(prompts.values()) + sum(t.own for t in tokens) <= budget


@pytest.mark.parametrize("budget", [1, 30, 64, 200, 100_000])
def test_padded_batches_hold_the_budget_with_padding_and_every_index_once(budget):
    lengths = [random.Random(budget).randint(1, 60) for _ in range(40)]
    batches = padded_micro_batches(alone(*lengths), budget)
    assert sorted(index for batch in batches for index in batch) == list(range(40))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@pytest.mark.parametrize("cut", [micro_batches, padded_micro_batches])
def test_a_sequence_longer_than_the_budget_goes_alone(cut):
    assert cut(alone(3, 50, 4), 10) == [[1], [2, 0]]


@pytest.mark.parametrize("cut", [micro_batches, padded_micro_batches])
def test_the_longest_come_first_and_equal_ones_in_order(cut):
    assert cut(alone(2, 5, 2, 5), 10) == [[1, 3], [0, 2]]


@pytest.mark.parametrize("cut", [micro_batches, padded_micro_batches])
def test_no_sequences_no_batches(cut):
    assert cut([], 10) == []


def test_a_prompt_counts_once_so_its_answers_follow_each_other():
    units = [[Tokens("a", 5, 3)], [Tokens("b", 5, 9)], [Tokens("a", 5, 2)], [Tokens("b", 5, 1)]]
    assert micro_batches(units, 15) == [[1, 3], [0, 2]]
    assert micro_batches(units, 25) == [[1, 3, 0, 2]]  # 5 + 9 + 1 and 5 + 3 + 2
    assert padded_micro_batches(units, 28) == [[1, 0], [2, 3]]


def test_rows_that_come_in_for_dead_groups_follow_from_step_and_round():
    drawn = rows_to_refill(3, 1, 1000, [], 5, seed=2)
    assert drawn == rows_to_refill(3, 1, 1000, [], 5, seed=2)
    others = [rows_to_refill(*place, 1000, [], 5, seed) for place, seed in [((3, 2), 2), ((4, 1), 2), ((3, 1), 3)]]
    assert len({tuple(rows) for rows in [drawn, *others]}) == 4
    assert sorted(set(rows_to_refill(1, 1, 4, [], 200, seed=0))) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_they_are_none_of_those_asked_already_as_long_as_there_are_others(seed):
    taken = [7, 2, 2, 5]
    assert sorted(rows_to_refill(1, 1, 10, taken, 7, seed)) == [0, 1, 3, 4, 6, 8, 9]
    more = rows_to_refill(1, 1, 10, taken, 10, seed)
    assert sorted(more[:7]) == [0, 1, 3, 4, 6, 8, 9]
    assert sorted(more[7:]) == [2, 5, 7]
    assert sorted(rows_to_refill(1, 1, 3, [0, 1, 2], 3, seed)) == [0, 1, 2]  # there are no others


def test_units_of_several_sequences_count_with_all_of_them():
    pairs = [[Tokens(i, 5, 5), Tokens(i, 5, 4)] for i in range(3)]
    assert micro_batches(pairs, 28) == [[0, 1], [2]]
    assert padded_micro_batches(pairs, 40) == [[0, 1], [2]]
    assert micro_batches(pairs[:1], 5) == [[0]]  # never cut
