"""PPO's two losses: numbers by hand. `test_ppo_reference` holds whole updates."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms import value_loss
from grpo_kit.algorithms.ppo import ppo_loss


def test_policy_loss() -> None:
    """Ratio 1.5 with ε = 0.2, ε_high = 0.3 at four tokens with advantages of their own."""
    old = torch.full((1, 4), -1.0)
    logprobs = (old + math.log(1.5)).requires_grad_()
    advantages = torch.tensor([[2.0, -2.0, 0.0, -0.5]])
    loss, clipped = ppo_loss(logprobs, old, advantages, torch.ones(1, 4), epsilon=0.2, epsilon_high=0.3)
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([-2.6, 3.0, 0.0, 0.75], rel=1e-6)
    assert clipped.tolist() == [[True, False, False, False]]
    assert logprobs.grad is not None and logprobs.grad[0].tolist() == pytest.approx([0.0, 3.0, 0.0, 0.75], rel=1e-6)


# (V, V_old, R) → (½·max((V − R)², (V_old ± 0.2 − R)²), its gradient by V); the clip is 0.2
VALUES = {
    "near the old one": ((1.1, 1.0, 2.0), (0.405, -0.9)),
    "gone too far towards the return": ((1.5, 1.0, 2.0), (0.32, 0.0)),  # held at 1.2: no more to gain
    "gone too far beyond the return": ((3.0, 1.0, 1.1), (0.5 * 1.9**2, 1.9)),  # and still pulled back
    "gone the wrong way": ((0.0, 1.0, 2.0), (2.0, -2.0)),
    "nothing to do": ((1.0, 1.0, 1.0), (0.0, 0.0)),
}


@pytest.mark.parametrize("case", VALUES)
def test_value_loss(case: str) -> None:
    (value, old, target), (expected, gradient) = VALUES[case]
    values = torch.tensor([[value]], requires_grad=True)
    loss = value_loss(values, torch.tensor([[old]]), torch.tensor([[target]]), cliprange_value=0.2)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert values.grad is not None and values.grad.item() == pytest.approx(gradient, rel=1e-5)
