"""`gate` of a token step: the twin and its Triton kernel against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels.decode_gate import gate
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


def reference(parts: Parts) -> Tensor:
    """z·sigmoid(z), rounded, times u; in float64, in nibble order."""
    z, u = finished64(parts).chunk(2, 1)
    return nibbles_by_hand(rounded(z / (1 + torch.exp(-z)), parts.dtype) * u)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_equals_float64(case: Case) -> None:
    parts = unfinished(case, (192, 192))
    assert gate(parts).dtype == case.dtype
    assert_near(gate(parts), reference(parts))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_float64(case: Case) -> None:
    skip_what_the_interpreter_cannot(case)
    parts = unfinished(case, (192, 192))
    got = launch("decode_gate.gate", parts)
    assert got.dtype == case.dtype
    assert_near(got, reference(parts), in_interpreter=True)


def test_far_ends_stay_finite() -> None:
    ends = torch.tensor([-60000.0, -100.0, 100.0, 60000.0]).repeat(16)
    parts = Parts(torch.cat([ends, torch.ones(64)]).view(1, 1, 128), (64, 64), torch.float16)
    expected = torch.tensor([0.0, 0.0, 100.0, 60000.0], dtype=torch.float16).repeat_interleave(16)[None]
    assert torch.equal(gate(parts), expected)
    assert torch.equal(launch("decode_gate.gate", parts), expected)


def test_refuses_what_is_not_a_gate_and_its_up() -> None:
    with pytest.raises(ValueError, match=r"\(64, 128\)"):
        gate(Parts(torch.zeros(1, 1, 192), (64, 128), torch.float16))
    with pytest.raises(ValueError, match=r"\(32, 32\)"):
        gate(Parts(torch.zeros(1, 1, 64), (32, 32), torch.float16))
    with pytest.raises(ValueError, match=r"\(64,\)"):
        gate(Parts(torch.zeros(1, 1, 64), (64,), torch.float16))
