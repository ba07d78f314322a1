"""The cache: its size in bytes, what is written where, and what a move leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_kit.kernels.int8_tokens import Int8Tokens
from grpo_kit.rollout.native.cache import CacheShape, LayerShape, SlotCache, columns_for, slots_within

SHAPE = CacheShape((LayerShape(2, 8, 8), LayerShape(1, 4, 6)), torch.float16, torch.device("cpu"))
PER_TOKEN = (2 * (8 + 8) + 1 * (4 + 6)) * 2
IN_8_BITS = replace(SHAPE, int8=True)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (64, 64), (65, 128)])
def test_columns_come_in_steps_of_64(tokens: int, columns: int) -> None:
    assert columns_for(tokens) == columns


def test_its_size_is_what_its_tensors_take() -> None:
    cache = SlotCache(SHAPE, 4, 64)
    assert cache.bytes == 4 * 64 * PER_TOKEN
    assert cache.bytes == sum(own.nbytes for own in (*cache.keys, *cache.values) if isinstance(own, torch.Tensor))


def test_in_8_bits_a_vector_takes_a_scale_more() -> None:
    cache = SlotCache(IN_8_BITS, 4, 64)
    assert cache.bytes == 4 * 64 * (PER_TOKEN // 2 + 4 * 2 * (2 + 1))
    held = [own for own in (*cache.keys, *cache.values) if isinstance(own, Int8Tokens)]
    assert len(held) == 4
    assert cache.bytes == sum(tensor.nbytes for own in held for tensor in (own.numbers, own.scales))


def test_8_bits_hold_twice_the_slots() -> None:
    """8 heads of 128 numbers: 2,048 bytes in 16 bits, 1,024 and 32 for the scales."""
    shape = replace(SHAPE, layers=(LayerShape(8, 128, 128),) * 3)
    limit = 17 * shape.bytes_for(1024)
    assert slots_within(shape, 1024, limit, most=256) == 16
    assert slots_within(replace(shape, int8=True), 1024, limit, most=256) == 32


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


def test_a_prompt_is_quantized_as_it_is_written_and_moves_as_it_is() -> None:
    cache = SlotCache(IN_8_BITS, 4, 64)
    keys, values = ([torch.rand(2, 3, 8).half(), torch.rand(1, 3, last).half()] for last in (4, 6))
    cache.write(torch.tensor([3, 1]), keys, values)
    cache.move(torch.tensor([3]), torch.tensor([0]), columns=2)
    for own, new in zip([*cache.keys, *cache.values], [*keys, *values], strict=True):
        assert isinstance(own, Int8Tokens)
        dense = own.dense(torch.float32)
        assert (dense[[3, 1], :, :3] - new).abs().max() < 0.02 and torch.equal(dense[0, :, :2], dense[3, :, :2])
        assert not dense[2].any() and not dense[:, :, 3:].any() and not dense[0, :, 2:].any()


def test_a_move_copies_the_columns_in_use() -> None:
    cache = SlotCache(SHAPE, 4, 64)
    for own in (*cache.keys, *cache.values):
        own.copy_(torch.rand(own.shape))
    before = [own.clone() for own in (*cache.keys, *cache.values)]
    cache.move(torch.tensor([2, 3]), torch.tensor([1, 0]), columns=10)
    for own, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(own[[1, 0], :, :10], old[[2, 3], :, :10])
        assert torch.equal(own[:, :, 10:], old[:, :, 10:]) and torch.equal(own[2:], old[2:])
