"""`finish_heads` of a token step: the twin and its Triton kernel against float64, and what they leave in the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels.decode_heads import finish_heads
from grpo_kit.kernels.decode_parts import Parts
from grpo_kit.kernels.int8_tokens import Int8Tokens, hadamard_matrix
from tests.kernels.launching import skip_products_in, where_kernels_run
from tests.kernels.unfinished import (
    CASES,
    Case,
    assert_near,
    finished64,
    rounded,
    skip_what_the_interpreter_cannot,
    unfinished,
)

EPS = 1e-6
LENGTH = 7


@dataclass(frozen=True)
class Heads:
    """turned: how many of a head's numbers, None for all. single: q, k and v are one matrix."""

    heads: int
    kv_heads: int
    width: int
    norms: bool
    turned: int | None = None
    single: bool = False
    zero_centered: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes = (self.heads * self.width, *(self.kv_heads * self.width,) * 2)
        return (sum(sizes),) if self.single else sizes


SHAPES = [
    Heads(4, 2, 64, False),
    Heads(3, 1, 80, True),
    Heads(2, 1, 64, False, turned=48, single=True),
    Heads(2, 2, 80, True, turned=24, zero_centered=True),
    Heads(1, 1, 64, False, turned=0),
]


def inputs(case: Case, shape: Heads) -> dict[str, Any]:
    """The arguments of `finish_heads`; keys and values are views, of three slots more than there are rows."""
    g = torch.Generator().manual_seed(2)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(case.dtype)

    turned = shape.width if shape.turned is None else shape.turned
    angle = (2 * math.pi * torch.rand(case.rows, turned // 2, generator=g)).repeat(1, 2)
    caches = random(2, shape.kv_heads, case.rows + 3, LENGTH, shape.width + 8)[..., :-8].transpose(1, 2)
    return {
        "parts": unfinished(case, shape.sizes),
        "cos": angle.cos().to(case.dtype),
        "sin": angle.sin().to(case.dtype),
        "query_norm": 1 + 0.3 * random(shape.width) if shape.norms else None,
        "key_norm": 1 + 0.3 * random(shape.width) if shape.norms else None,
        "eps": EPS,
        "positions": torch.arange(case.rows) * 5 % LENGTH,
        "keys": caches[0],
        "values": caches[1],
        "zero_centered": shape.zero_centered,
    }


def normed64(x: Tensor, weight: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    if weight is None:
        return x
    normal = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    if zero_centered:
        return rounded(normal * (1 + weight.double()), dtype)
    return rounded(rounded(normal, dtype) * weight.double(), dtype)


def turned64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A pair as a complex number, times the unit number of its angle; what no angle belongs to as it is."""
    width = cos.shape[1]
    half = width // 2
    unit = torch.complex(cos.double(), sin.double())[:, None, :half]
    turned = torch.complex(x[..., :half], x[..., half:width]) * unit
    return torch.cat([turned.real, turned.imag, x[..., width:]], -1)


def reference(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) [B, heads, D] in float64, before the last rounding."""
    parts: Parts = given["parts"]
    kv_heads, width = given["keys"].shape[1], given["keys"].shape[3]
    y = finished64(parts).unflatten(1, (-1, width))
    q, k, v = y[:, : -2 * kv_heads], y[:, -2 * kv_heads : -kv_heads], y[:, -kv_heads:]
    q = normed64(q, given["query_norm"], parts.dtype, given["zero_centered"])
    k = normed64(k, given["key_norm"], parts.dtype, given["zero_centered"])
    return turned64(q, given["cos"], given["sin"]), turned64(k, given["cos"], given["sin"]), v


def run(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the caches after the call; they come back from where kernels run by copy."""
    return finish_heads(**given), given["keys"], given["values"]


def assert_right(got: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], in_interpreter: bool) -> None:
    """`given` still has the caches as they were."""
    q, k, v = reference(given)
    assert got[0].dtype == given["parts"].dtype
    assert_near(got[0], q, in_interpreter)
    for cache, before, expected in [(got[1], given["keys"], k), (got[2], given["values"], v)]:
        row = torch.arange(len(expected))
        assert_near(cache[row, :, given["positions"]], expected, in_interpreter)
        rest = cache.clone()
        rest[row, :, given["positions"]] = before[row, :, given["positions"]]
        assert torch.equal(rest, before)


@pytest.mark.parametrize("shape", [*SHAPES, Heads(1, 1, 256, True)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_equals_float64(case: Case, shape: Heads) -> None:
    given = inputs(case, shape)
    copies = {**given, "keys": given["keys"].clone(), "values": given["values"].clone()}
    assert_right(run(copies), given, in_interpreter=False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_float64(case: Case, shape: Heads) -> None:
    skip_what_the_interpreter_cannot(case)
    given = inputs(case, shape)
    assert_right(where_kernels_run(run, given), given, in_interpreter=True)


@pytest.mark.parametrize("width", [96, 128, 256])
def test_kernel_takes_heads_of_other_widths(width: int) -> None:
    given = inputs(Case(torch.float16, 2, 2, 8, True), Heads(2, 1, width, norms=True))
    assert_right(where_kernels_run(run, given), given, in_interpreter=True)


def test_kernel_takes_float32_angles_of_16_bit_numbers() -> None:
    given = inputs(Case(torch.float16, 2, 1, 0, False), Heads(2, 1, 64, norms=False))
    given |= {"cos": given["cos"].float() + 1e-5, "sin": given["sin"].float() - 1e-5}
    assert_right(where_kernels_run(run, given), given, in_interpreter=True)


def in_8_bits(given: dict[str, Any]) -> dict[str, Any]:
    """The same with caches in 8 bits that hold the same numbers."""
    shape, dtype = tuple(given["keys"].shape), given["parts"].dtype
    hadamard = hadamard_matrix(shape[3], dtype, torch.device("cpu"))
    held = {}
    for name, matrix in (("keys", hadamard), ("values", None)):
        held[name] = Int8Tokens.zeros(shape, matrix, torch.device("cpu"))
        held[name][:] = given[name]
    return {**given, **held}


def assert_right_in_8_bits(got: Any, given: dict[str, Any]) -> None:
    """Off by half a step, and for keys by their rounding to the compute format before they are turned."""
    q, k, v = reference(given)
    hadamard = given["keys"].hadamard.double()
    turn = hadamard / hadamard[0].square().sum().sqrt()
    eps = max(torch.finfo(given["parts"].dtype).eps, 1e-5)
    assert (got[0].double() - q @ turn).abs().le(2 * eps * q.norm(dim=-1, keepdim=True)).all()
    for cache, before, expected in [(got[1], given["keys"], k @ turn), (got[2], given["values"], v)]:
        row = torch.arange(len(expected))
        new = cache[row, :, given["positions"]]
        rounding = eps * expected.norm(dim=-1, keepdim=True)
        step = new.scales[..., None].double()
        assert ((step - expected.abs().amax(-1, keepdim=True) / 127).abs() <= rounding).all()
        assert ((new.stored(torch.float64) - expected).abs() <= 0.5001 * step + rounding).all()
        assert (new.stored(torch.float64) - expected).norm() > 0.1 * (step.square().sum() * cache.shape[3] / 12).sqrt()
        cache[row, :, given["positions"]] = before[row, :, given["positions"]]
        assert torch.equal(cache.numbers, before.numbers) and torch.equal(cache.scales, before.scales)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_writes_8_bits(case: Case, shape: Heads) -> None:
    given, copies = (in_8_bits(inputs(case, shape)) for _ in range(2))
    assert_right_in_8_bits(run(copies), given)


@pytest.mark.parametrize("shape", [*SHAPES, Heads(1, 1, 128, False)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_writes_8_bits(case: Case, shape: Heads) -> None:
    skip_products_in(case.dtype)
    given = in_8_bits(inputs(case, shape))
    assert_right_in_8_bits(where_kernels_run(run, given), given)


def test_a_head_of_zeros_in_8_bits() -> None:
    given = in_8_bits(inputs(Case(torch.float32, 2, 1, 0, False), Heads(2, 1, 64, norms=False)))
    given["parts"].sums.zero_()
    _, keys, values = where_kernels_run(run, given)
    for cache in (keys, values):
        new = cache[torch.arange(2), :, given["positions"]]
        assert not new.numbers.any() and (new.scales > 0).all()


def test_refuses_what_does_not_fit_together() -> None:
    given = inputs(Case(torch.float32, 4, 1, 0, False), Heads(2, 1, 64, norms=False))
    for wrong in [
        {"cos": given["cos"][:2]},
        {"cos": given["cos"][:, :63], "sin": given["sin"][:, :63]},
        {"cos": given["cos"].repeat(1, 2), "sin": given["sin"].repeat(1, 2)},
        {"positions": given["positions"][:2]},
        {"keys": given["keys"][:3], "values": given["values"][:3]},
        {"values": given["values"][:, :, 1:]},
        {"keys": given["keys"].half(), "values": given["values"].half()},
        {"parts": Parts(given["parts"].sums, (64, 128, 64), torch.float32)},
        {"query_norm": torch.ones(63)},
    ]:
        with pytest.raises(ValueError, match="finish_heads needs"):
            finish_heads(**given | wrong)
    held = in_8_bits(given)
    with pytest.raises(ValueError, match=r"caches in torch\.int8 and torch\.float32"):
        finish_heads(**given | {"keys": held["keys"]})
    cut = {name: held[name][:, :, :-1] for name in ("keys", "values")}
    with pytest.raises(ValueError, match="8 bits to be contiguous"):
        where_kernels_run(run, held | cut)
    strange = given | {"values": given["values"].contiguous()}
    with pytest.raises(ValueError, match="equal strides"):
        where_kernels_run(run, strange)
