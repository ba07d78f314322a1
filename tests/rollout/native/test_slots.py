"""Slots without tensors: who starts when, and who moves where."""

from __future__ import annotations

import pytest

from grpo_kit.rollout.native.slots import BUCKETS, Slots, bucket_for


def filled(size: int, taken: list[int]) -> Slots[str]:
    slots: Slots[str] = Slots(size)
    for slot in taken:
        slots.take(slot, f"row {slot}")
    return slots


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (256, 256), (1000, 256)])
def test_a_bucket_is_the_smallest_with_room(count: int, bucket: int) -> None:
    assert bucket_for(count) == bucket and bucket in BUCKETS


def test_an_empty_table_starts_whoever_fits() -> None:
    assert filled(8, []).due(100) == 8
    assert filled(8, []).due(3) == 3
    assert filled(8, []).due(0) == 0


@pytest.mark.parametrize(
    ("size", "free", "waiting", "start"),
    [
        (8, 1, 9, 0),  # a single one waits for a second one
        (8, 2, 9, 2),
        (8, 1, 1, 1),  # unless it is the last
        (8, 0, 1, 0),
        (64, 7, 30, 0),  # an eighth of 64
        (64, 8, 30, 8),
        (64, 7, 7, 7),
        (1, 0, 4, 0),
    ],
)
def test_the_others_are_interrupted_when_it_is_worth_it(size: int, free: int, waiting: int, start: int) -> None:
    assert filled(size, list(range(free, size))).due(waiting) == start


def test_a_smaller_bucket_takes_the_high_slots_into_free_ones() -> None:
    slots = filled(8, [1, 5, 7])
    assert slots.shrink() == [(5, 0), (7, 2)]
    assert slots.bucket == 4 and slots.free() == [3]
    assert slots.taken() == [(0, "row 5"), (1, "row 1"), (2, "row 7")]


def test_nothing_moves_where_all_are_low_and_nothing_shrinks_where_they_are_too_many() -> None:
    low = filled(16, [0, 1, 3])
    assert low.shrink() == [] and low.bucket == 4
    many = filled(8, [0, 2, 4, 6, 7])
    assert many.shrink() == [] and many.bucket == 8
    assert low.free() == [2]


def test_who_leaves_makes_room() -> None:
    slots = filled(2, [0, 1])
    slots.leave(0)
    assert len(slots) == 1 and slots.free() == [0]
    empty = filled(4, [])
    assert empty.shrink() == [] and empty.bucket == 1
