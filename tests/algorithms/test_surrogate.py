"""The clipped surrogate and the KL estimate: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms import clipped_surrogate, kl_k3

# ε = 0.2, ε_high = 0.3. (ratio, advantage) → (loss, clipped)
CASES = {
    "good and grown too far": ((1.5, 2.0), (-2.6, True)),
    "good and shrunk": ((0.5, 2.0), (-1.0, False)),
    "bad and grown": ((1.5, -2.0), (3.0, False)),
    "bad and shrunk too far": ((0.5, -2.0), (1.6, True)),
    "within the bounds": ((1.1, 2.0), (-2.2, False)),
    "no advantage": ((5.0, 0.0), (0.0, False)),
}


@pytest.mark.parametrize("case", CASES)
def test_value_clip_and_gradient(case: str) -> None:
    (ratio, advantage), (value, is_clipped) = CASES[case]
    logprobs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    loss, clipped = clipped_surrogate(logprobs, torch.tensor([[-1.0]]), torch.tensor([advantage]), 0.2, 0.3)
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert clipped.item() is is_clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage, rel=1e-6)


def test_each_sequence_has_its_advantage_on_all_its_tokens() -> None:
    zeros = torch.zeros(2, 3)
    loss, clipped = clipped_surrogate(zeros, zeros, torch.tensor([1.0, -2.0]), 0.2, 0.2)
    assert loss.tolist() == [[-1.0] * 3, [2.0] * 3]
    assert not clipped.any()


def test_k3() -> None:
    # ref − lp = ln 2, 0, −ln 2  →  2 − ln 2 − 1, 0, 1/2 + ln 2 − 1
    gap = torch.tensor([[math.log(2), 0.0, -math.log(2)]])
    found = kl_k3(torch.zeros(1, 3), gap)
    assert found.tolist()[0] == pytest.approx([1 - math.log(2), 0.0, math.log(2) - 0.5], abs=1e-6)
    assert (kl_k3(torch.randn(50), torch.randn(50)) >= 0).all()
