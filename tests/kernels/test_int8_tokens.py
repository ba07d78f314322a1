"""Vectors in 8 bits: how far they are from what was put in, with and without a Hadamard matrix, and their indexing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels.int8_tokens import Int8Tokens, hadamard_matrix

CPU = torch.device("cpu")
WIDTHS = [2, 12, 64, 80, 96, 128, 256]


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(size[-1])).to(dtype)


def keys(*size: int, dtype: torch.dtype = torch.float32) -> Int8Tokens:
    return Int8Tokens.zeros(size, hadamard_matrix(size[-1], dtype, CPU), CPU)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_hadamard_matrix_is_symmetric_and_its_own_inverse(width: int) -> None:
    matrix = hadamard_matrix(width, torch.float64, CPU)
    power = math.gcd(width, 2**20)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, power * torch.eye(width, dtype=torch.float64))
    assert (matrix != 0).sum() == width * power and set(matrix.unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_a_width_of_128_is_sylvesters_matrix() -> None:
    parity = [[(i & j).bit_count() % 2 for j in range(128)] for i in range(128)]
    assert torch.equal(hadamard_matrix(128, torch.float32, CPU), 1 - 2 * torch.tensor(parity).float())


def test_values_are_off_by_half_a_step_at_most() -> None:
    x = random(3, 5, 80)
    held = Int8Tokens.zeros((3, 5, 80), None, CPU)
    held[:] = x
    step = x.abs().amax(-1, keepdim=True) / 127
    assert held.numbers.abs().amax(-1).eq(127).all()
    assert ((held.dense(torch.float32) - x).abs() <= 0.5001 * step).all()
    assert (held.dense(torch.float32) - x).square().mean() > (step**2).mean() / 24  # 1/12 where errors are even


@pytest.mark.parametrize("width", WIDTHS)
def test_turned_queries_have_the_scores_of_what_is_dense(width: int) -> None:
    held, q = keys(7, width, dtype=torch.float64), random(3, width, dtype=torch.float64)
    held[:] = random(7, width, dtype=torch.float64)
    scores = held.turned(q) @ held.stored(torch.float64).T
    torch.testing.assert_close(scores, q @ held.dense(torch.float64).T)


def test_one_large_channel_does_not_spoil_the_others() -> None:
    """A channel 50 times as large as the rest: scores of random queries that do not look at it."""
    x, q = random(64, 128), random(16, 128)
    x[:, 5], q[:, 5] = 50 * x[:, 5].sign(), 0
    plain, spread = Int8Tokens.zeros((64, 128), None, CPU), keys(64, 128)
    for held in (plain, spread):
        held[:] = x
    off = [(q @ (held.dense(torch.float32) - x).T).square().mean().sqrt() for held in (plain, spread)]
    assert off[1] < 0.2 * off[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_rounded_once_where_nothing_is_turned(dtype: torch.dtype) -> None:
    held = Int8Tokens.zeros((9, 64), None, CPU)
    held[:] = random(9, 64)
    assert torch.equal(held.dense(dtype), (held.numbers * held.scales[:, None]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_near_what_was_put_in(dtype: torch.dtype) -> None:
    x, held = random(9, 128, dtype=dtype), keys(9, 128, dtype=dtype)
    held[:] = x
    off = (held.dense(dtype) - x).float().norm() / x.float().norm()
    assert off < 0.012 and (held.turned(x).dtype, held.dense(dtype).dtype) == (dtype, dtype)


def test_zeros_stay_zeros() -> None:
    held = keys(2, 64)
    held[:] = torch.zeros(2, 64)
    assert not held.dense(torch.float32).any() and held.scales.min() > 0


def test_it_is_indexed_like_a_tensor() -> None:
    """As a cache [slots, heads, columns, D] is: a column a row, the first columns of some slots, slots to others."""
    held, plain = keys(4, 2, 6, 64), torch.zeros(4, 2, 6, 64)
    row, columns = torch.arange(3), torch.tensor([5, 0, 2])
    for own in (held, plain):
        own[row, :, columns] = random(3, 2, 64)
        own[torch.tensor([3, 1]), :, 1:4] = random(2, 3, 64)
        own[torch.tensor([0]), :, :5] = own[torch.tensor([3]), :, :5]  # type: ignore[assignment]
    assert held.shape == plain.shape
    torch.testing.assert_close(held.dense(torch.float32), plain, rtol=0, atol=0.04)
    assert torch.equal(held[1:3, :, 2].dense(torch.float32), held.dense(torch.float32)[1:3, :, 2])
    assert held.is_contiguous() and not held[:, :, :2].is_contiguous()


def test_keys_of_an_odd_width_are_refused() -> None:
    with pytest.raises(ValueError, match="even width, got 7"):
        hadamard_matrix(7, torch.float32, CPU)
