"""`gate` of a token step: the twin and its Triton kernel against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels.decode_gate import ACTIVATIONS, gate
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

SIZES = [(192, 192), (384,)]  # gate and up as two matrices, and as one


def reference(parts: Parts, activation: str) -> Tensor:
    """z·sigmoid(z), or z/2·(1 + tanh(√(2/π)·(z + 0.044715·z³))), rounded, times u; in float64, in nibble order."""
    z, u = finished64(parts).chunk(2, 1)
    active = z / (1 + torch.exp(-z))
    if activation == "gelu_tanh":
        active = z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return nibbles_by_hand(rounded(active, parts.dtype) * u)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_equals_float64(case: Case, activation: str, sizes: tuple[int, ...]) -> None:
    parts = unfinished(case, sizes)
    got, exact = gate(parts, activation), reference(parts, activation)
    assert got.dtype == case.dtype
    if activation == "gelu_tanh":  # torch adds 1 to a tanh near -1 in float32: small numbers have few digits
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-6)
        got = got.where(exact.abs() > 1e-3, exact.to(got.dtype))
    assert_near(got, exact)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_float64(case: Case, activation: str, sizes: tuple[int, ...]) -> None:
    skip_what_the_interpreter_cannot(case)
    parts = unfinished(case, sizes)
    got = launch("decode_gate.gate", parts, activation)
    assert got.dtype == case.dtype
    assert_near(got, reference(parts, activation), in_interpreter=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_ends_stay_finite(activation: str) -> None:
    ends = torch.tensor([-60000.0, -100.0, 100.0, 60000.0]).repeat(16)
    parts = Parts(torch.cat([ends, torch.ones(64)]).view(1, 1, 128), (64, 64), torch.float16)
    expected = torch.tensor([0.0, 0.0, 100.0, 60000.0], dtype=torch.float16).repeat_interleave(16)[None]
    assert torch.equal(gate(parts, activation), expected)
    assert torch.equal(launch("decode_gate.gate", parts, activation), expected)


def test_refuses_what_is_not_a_gate_and_its_up() -> None:
    with pytest.raises(ValueError, match=r"\(64, 128\)"):
        gate(Parts(torch.zeros(1, 1, 192), (64, 128), torch.float16))
    with pytest.raises(ValueError, match=r"\(32, 32\)"):
        gate(Parts(torch.zeros(1, 1, 64), (32, 32), torch.float16))
    with pytest.raises(ValueError, match=r"\(64,\)"):
        gate(Parts(torch.zeros(1, 1, 64), (64,), torch.float16))
    with pytest.raises(ValueError, match=r"\(64, 64, 64\)"):
        gate(Parts(torch.zeros(1, 1, 192), (64, 64, 64), torch.float16))
    with pytest.raises(ValueError, match="silu, gelu_tanh; got 'relu'"):
        gate(Parts(torch.zeros(1, 1, 128), (64, 64), torch.float16), "relu")
