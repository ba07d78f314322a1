"""The cache: its size in bytes, what is written where, and what a move leaves alone."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.rollout.native.cache import CacheShape, LayerShape, SlotCache, columns_for, slots_within

SHAPE = CacheShape((LayerShape(2, 8, 8), LayerShape(1, 4, 6)), torch.float16, torch.device("cpu"))
PER_TOKEN = (2 * (8 + 8) + 1 * (4 + 6)) * 2


@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (64, 64), (65, 128)])
def test_columns_come_in_steps_of_64(tokens: int, columns: int) -> None:
    assert columns_for(tokens) == columns


def test_its_size_is_what_its_tensors_take() -> None:
    cache = SlotCache(SHAPE, 4, 64)
    assert cache.bytes == 4 * 64 * PER_TOKEN
    assert cache.bytes == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))


def test_slots_are_a_bucket_within_the_limit() -> None:
    one = 64 * PER_TOKEN
    assert slots_within(SHAPE, 64, limit=7 * one, most=256) == 4
    assert slots_within(SHAPE, 64, limit=8 * one, most=256) == 8
    assert slots_within(SHAPE, 64, limit=100 * one, most=16) == 16
    assert slots_within(SHAPE, 64, limit=one - 1, most=16) == 0
    assert slots_within(SHAPE, 64, limit=-5, most=16) == 0


def test_a_prompt_is_written_to_its_slots_only() -> None:
    cache = SlotCache(SHAPE, 4, 64)
    keys, values = ([torch.rand(2, 3, 8).half(), torch.rand(1, 3, last).half()] for last in (4, 6))
    cache.write(torch.tensor([3, 1]), keys, values)
    for own, new in zip([*cache.keys, *cache.values], [*keys, *values], strict=True):
        for slot in (1, 3):
            assert torch.equal(own[slot, :, :3], new)
        assert own[:, :, 3:].abs().sum() == 0 and own[[0, 2]].abs().sum() == 0


def test_a_move_copies_the_columns_in_use() -> None:
    cache = SlotCache(SHAPE, 4, 64)
    for own in (*cache.keys, *cache.values):
        own.copy_(torch.rand(own.shape))
    before = [own.clone() for own in (*cache.keys, *cache.values)]
    cache.move(torch.tensor([2, 3]), torch.tensor([1, 0]), columns=10)
    for own, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(own[[1, 0], :, :10], old[[2, 3], :, :10])
        assert torch.equal(own[:, :, 10:], old[:, :, 10:]) and torch.equal(own[2:], old[2:])
