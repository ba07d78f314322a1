"""Packed sequences, laid out by hand, and what comes back to tokens that several share."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.kernels import gather, pack
from grpo_kit.kernels.packing import bucketed

GROUP = [([7, 8], [1, 2]), ([7, 8], [3]), ([9], [4, 5, 6])]


def test_a_common_beginning_is_there_once():
    packed = pack(GROUP)
    assert packed.ids.tolist() == [7, 8, 1, 2, 3, 9, 4, 5, 6]
    assert packed.positions.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3]
    assert packed.rows.tolist() == [[0, 1, 2, 3], [0, 1, 4, 0], [5, 6, 7, 8]]
    assert packed.mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert packed.shared and not packed.in_order and len(packed) == 9


def test_every_sequence_can_be_read_back():
    packed = pack(GROUP)
    for row, mask, (beginning, own) in zip(packed.rows, packed.mask, GROUP, strict=True):
        assert packed.ids[row[mask.bool()]].tolist() == beginning + own


def test_each_token_is_owned_by_the_first_sequence_that_has_it():
    packed = pack(GROUP)
    (bucket,) = packed.buckets  # 4, 4 and 3 tokens: even enough
    assert packed.ids[bucket].tolist() == [[7, 8, 1, 2], [9, 4, 5, 6], [7, 8, 3, 7]]
    assert packed.owner.tolist() == [0, 1, 2, 3, 10, 4, 5, 6, 7]
    assert packed.places().tolist() == [0, 1, 2, 3, 6, 8, 9, 10, 11]


def test_equal_lengths_with_nothing_shared_lie_in_order():
    assert pack([([1], [2, 3]), ([4, 5], [6])]).in_order
    assert not pack([([1], [2, 3]), ([1], [6, 7])]).in_order  # a shared prompt
    assert not pack([([1], [2, 3]), ([4, 5], [6, 7])]).in_order


def test_buckets_hold_sequences_of_similar_length():
    assert bucketed([100, 4000, 3900, 74, 2999]) == [[1, 2], [4], [0], [3]]  # 2999 < 0.75·4000, 74 < 0.75·100
    assert bucketed([5]) == [[0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_asked_for_twice_gets_both_gradients(dtype):
    x = torch.arange(6.0, dtype=dtype).view(3, 2).requires_grad_()
    y = gather(x, torch.tensor([[0, 2], [2, 2]]), True)
    assert y.tolist() == [[[0, 1], [4, 5]], [[4, 5], [4, 5]]]
    y.backward(torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [0.5, 0.25]]], dtype=dtype))
    assert x.grad.tolist() == [[1, 2], [0, 0], [8.5, 10.25]]


def test_many_small_gradients_of_a_shared_token_are_not_lost_in_16_bits():
    """256 + 1 + 1 + … in bfloat16, one after the other, stays 256."""
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gather(x, torch.zeros(65, dtype=torch.int64), True).backward(torch.tensor([[256.0]] + [[1.0]] * 64).bfloat16())
    assert x.grad == 320
