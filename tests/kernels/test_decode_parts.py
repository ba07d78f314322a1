"""The nibble order element by element, and what `Parts` amount to against a linear layer with LoRA in float64."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.kernels.decode_parts import Parts, natural_order, nibble_order
from tests.kernels.unfinished import CASES, Case, assert_near, finished64, nibbles_by_hand, unfinished


@pytest.mark.parametrize("inner", [128, 320, 384, 512])
def test_nibble_order_of_every_span(inner: int) -> None:
    x = torch.arange(2.0 * inner).view(2, inner)
    assert torch.equal(nibble_order(x), nibbles_by_hand(x))
    assert torch.equal(natural_order(nibble_order(x)), x)


def test_nibble_order_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match="multiple of 64; got 96"):
        nibble_order(torch.zeros(1, 96))


def test_nibble_order_element_by_element() -> None:
    x = torch.arange(2 * 192.0).view(2, 192)
    assert torch.equal(nibble_order(x), nibbles_by_hand(x))
    assert nibble_order(x)[1, 64:68].tolist() == [192 + 64, 192 + 68, 192 + 72, 192 + 76]


def test_natural_order_is_the_inverse() -> None:
    x = torch.arange(3 * 2 * 128).view(3, 2, 128)
    assert torch.equal(natural_order(nibble_order(x)), x)
    assert torch.equal(nibble_order(natural_order(x)), x)


@pytest.mark.parametrize("bias", [False, True])
def test_finished_is_a_linear_layer_with_lora(bias: bool) -> None:
    # Two matrices with 5 and 3 outputs, x of 12 columns cut into 3 parts, rank 2.
    g = torch.Generator().manual_seed(0)
    x, weight, a, b = (torch.randn(*s, generator=g).double() for s in [(4, 12), (8, 12), (4, 12), (8, 2)])
    shift = torch.randn(8, generator=g)
    low = x @ a.T
    expected = x @ weight.T + torch.cat([low[:, :2] @ b[:5].T, low[:, 2:] @ b[5:].T], 1) + bias * shift.double()

    both = torch.cat([weight, a])
    sums = torch.stack([x[:, k : k + 4] @ both[:, k : k + 4].T for k in (0, 4, 8)]).float()
    parts = Parts(sums, (5, 3), torch.float32, b.float(), shift if bias else None)
    torch.testing.assert_close(parts.finished().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_finished_rounds_twice(case: Case) -> None:
    parts = unfinished(case, (40, 24, 24))
    assert parts.finished().dtype == case.dtype
    assert_near(parts.finished(), finished64(parts))


def test_refuses_what_does_not_fit_together() -> None:
    sums, half = torch.zeros(2, 3, 8), torch.float16
    with pytest.raises(ValueError, match=r"rank 0 needs float32 sums \[S, B, 7\]; got \(2, 3, 8\)"):
        Parts(sums, (4, 3), half)
    with pytest.raises(ValueError, match=r"rank 2 needs float32 sums \[S, B, 11\]"):
        Parts(sums, (4, 3), half, torch.zeros(7, 2).half())
    with pytest.raises(ValueError, match=r"torch\.float16"):
        Parts(sums.half(), (4, 4), half)
    with pytest.raises(ValueError, match=r"lora_b \[6, r\].*got \(6, 1\) torch\.float32"):
        Parts(sums, (3, 3), half, torch.zeros(6, 1))
    with pytest.raises(ValueError, match=r"bias \[8\]; got \(4,\)"):
        Parts(sums, (4, 4), half, bias=torch.zeros(4).half())
