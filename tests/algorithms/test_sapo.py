"""SAPO: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms.sapo import sapo_loss

TAU_POS, TAU_NEG = 2.0, 4.0


# (ratio, advantage) → loss = −(4/τ)·σ(τ(w − 1))·A; σ(ln 3) = 3/4
@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 3.0, -2 * 0.5 * 3),
        (1.0, -3.0, 1 * 0.5 * 3),
        (1 + math.log(3) / TAU_POS, 3.0, -2 * 0.75 * 3),
        (1 - math.log(3) / TAU_POS, 3.0, -2 * 0.25 * 3),
        (1 + math.log(3) / TAU_NEG, -3.0, 1 * 0.75 * 3),
        (2.0, 0.0, 0.0),
    ],
)
def test_value_and_gradient(ratio: float, advantage: float, expected: float) -> None:
    """The gradient is −4·σ·(1 − σ)·w·A."""
    old = torch.tensor([[-1.0]])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, clipped = sapo_loss(
        logprobs,
        old,
        torch.tensor([advantage]),
        torch.ones(1, 1),
        sapo_temperature_pos=TAU_POS,
        sapo_temperature_neg=TAU_NEG,
    )
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert not clipped.any()
    tau = TAU_POS if advantage > 0 else TAU_NEG
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage, rel=1e-5)


def test_at_ratio_one_it_is_the_policy_gradient() -> None:
    logprobs = torch.zeros(2, 1, requires_grad=True)
    loss, _ = sapo_loss(
        logprobs,
        torch.zeros(2, 1),
        torch.tensor([1.5, -0.5]),
        torch.ones(2, 1),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    )
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.flatten().tolist() == pytest.approx([-1.5, 0.5])
