"""`add_norm` of a token step: the twin and its Triton kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels.decode_norm import add_norm
from grpo_kit.kernels.decode_parts import Parts
from tests.kernels.launching import launch
from tests.kernels.unfinished import (
    CASES,
    Case,
    assert_near,
    finished64,
    nibbles_by_hand,
    rounded,
    skip_what_the_interpreter_cannot,
    unfinished,
)

EPS = 1e-5
WIDTHS = {True: 192, False: 72}  # H where h is ordered and where not; neither is a power of two


def inputs(case: Case, width: int) -> tuple[Tensor, Parts, Tensor]:
    """(x, parts, weight); x is a view with a wider row stride."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(case.rows, width + 8, generator=g).to(case.dtype)[:, 4:-4]
    return x, unfinished(case, (width,)), (1 + 0.3 * torch.randn(width, generator=g)).to(case.dtype)


def norm64(x: Tensor, weight: Tensor | None, dtype: torch.dtype, ordered: bool, zero_centered: bool = False) -> Tensor:
    """The norm of x [B, H], float64 numbers of the format `dtype`, rounded before the product with weight."""
    h = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    if zero_centered and weight is not None:
        h = h * (1 + weight.double())
    else:
        h = rounded(h, dtype) * (1 if weight is None else weight.double())
    return nibbles_by_hand(h) if ordered else h


def assert_both_near(got: tuple[Tensor, Tensor], x: Tensor, parts: Parts, weight: Tensor, ordered: bool) -> None:
    total = x.double() + finished64(parts)
    assert got[0].dtype == got[1].dtype == x.dtype
    assert_near(got[0], total, in_interpreter=True)
    # From the sum that was returned: a rounding of it that fell the other way is not counted again.
    assert_near(got[1], norm64(got[0].double(), weight, x.dtype, ordered), in_interpreter=True)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_equals_float64(case: Case, ordered: bool) -> None:
    x, parts, weight = inputs(case, WIDTHS[ordered])
    before = x.clone()
    assert_both_near(add_norm(x, parts, weight, EPS, ordered), x, parts, weight, ordered)
    assert torch.equal(x, before)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_float64(case: Case, ordered: bool) -> None:
    skip_what_the_interpreter_cannot(case)
    x, parts, weight = inputs(case, WIDTHS[ordered])
    assert_both_near(launch("decode_norm.add_norm", x, parts, weight, EPS, ordered), x, parts, weight, ordered)


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_norm_alone(dtype: torch.dtype, with_weight: bool) -> None:
    x, _, weight = inputs(Case(dtype, 5, 1, 0, False), 192)
    given = weight if with_weight else None
    expected = norm64(x.double(), given, dtype, ordered=True)
    same, h = add_norm(x, None, given, EPS, True)
    assert same is x
    assert_near(h, expected)
    same, h = launch("decode_norm.add_norm", x, None, given, EPS, True)
    assert torch.equal(same, x)
    assert_near(h, expected, in_interpreter=True)


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_norm_of_its_own_before_the_sum(case: Case, zero_centered: bool) -> None:
    skip_what_the_interpreter_cannot(case)
    x, parts, weight = inputs(case, 192)
    inner, before = weight.flip(0) / 2, x.clone()
    y = rounded(norm64(finished64(parts), inner, case.dtype, False, zero_centered), case.dtype)
    given = (x, parts, weight, EPS, True, inner, zero_centered)
    for total, h in (add_norm(*given), launch("decode_norm.add_norm", *given)):
        assert total.dtype == h.dtype == case.dtype
        assert_near(total, x.double() + y, in_interpreter=True)
        assert_near(h, norm64(total.double(), weight, case.dtype, True, zero_centered), in_interpreter=True)
    assert torch.equal(x, before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_around_zero_are_rounded_once(case: Case) -> None:
    skip_what_the_interpreter_cannot(case)
    x, parts, weight = inputs(case, 72)
    given = (x, parts, weight - 1, EPS, False, None, True)
    for total, h in (add_norm(*given), launch("decode_norm.add_norm", *given)):
        assert_near(total, x.double() + finished64(parts), in_interpreter=True)
        assert_near(h, norm64(total.double(), weight - 1, case.dtype, False, True), in_interpreter=True)


def test_float32_weight_of_16_bit_numbers() -> None:
    x, _, weight = inputs(Case(torch.float16, 5, 1, 0, False), 192)
    weight = weight.float() + 1e-4  # between two numbers of 16 bits
    expected = norm64(x.double(), weight, torch.float16, ordered=True)
    for h in (add_norm(x, None, weight, EPS, True)[1], launch("decode_norm.add_norm", x, None, weight, EPS, True)[1]):
        assert h.dtype == torch.float16
        assert_near(h, expected)


def test_refuses_what_does_not_fit_together() -> None:
    x, weight = torch.ones(2, 96), torch.ones(96)
    parts = Parts(torch.zeros(1, 2, 96), (96,), torch.float32)
    with pytest.raises(ValueError, match="multiple of 64"):
        add_norm(x, parts, weight, EPS, ordered=True)
    with pytest.raises(ValueError, match=r"weights \[\(95,\)\]"):
        add_norm(x, parts, weight[1:], EPS, ordered=False)
    with pytest.raises(ValueError, match=r"weights \[\(96,\), \(95,\)\]"):
        add_norm(x, parts, weight, EPS, ordered=False, inner=weight[1:])
    with pytest.raises(ValueError, match=r"\(2, 96\) torch\.float16 and \(96,\)"):
        add_norm(x.half(), parts, weight, EPS, ordered=False)
    with pytest.raises(ValueError, match="of 2 rows"):
        add_norm(x[:1], parts, weight, EPS, ordered=False)
    with pytest.raises(ValueError, match=r"\(48, 48\)"):
        add_norm(x, Parts(parts.sums, (48, 48), torch.float32), weight, EPS, ordered=False)
