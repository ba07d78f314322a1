"""RLOO's loss on whole answers: numbers by hand."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.algorithms.rloo import rloo_loss

# Products of two ratios; ε = 0.2, ε_high = 0.3. (ratios, advantage) → (loss of the answer, clipped)
CASES = {
    "within": ([2.0, 0.6], 2.0, -2.4, False),
    "good and grown too far": ([2.0, 1.0], 2.0, -2.6, True),
    "good and shrunk": ([0.5, 0.5], 2.0, -0.5, False),
    "bad and grown": ([2.0, 1.0], -2.0, 4.0, False),
    "bad and shrunk too far": ([0.5, 0.5], -2.0, 1.6, True),
}


@pytest.mark.parametrize("case", CASES)
def test_value_clip_and_gradient(case: str) -> None:
    """The ratio is the product, not the mean; the answer's loss is the sum over its tokens; the gradient at each of
    them is −W·A. The third token is none."""
    ratios, advantage, value, is_clipped = CASES[case]
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    old = torch.full((1, 3), -1.0)
    logprobs = (old + torch.tensor([[*ratios, 9.0]]).log()).requires_grad_()
    loss, clipped = rloo_loss(logprobs, old, torch.tensor([advantage]), mask, epsilon=0.2, epsilon_high=0.3)
    (loss * mask).sum().backward()
    assert loss.shape == clipped.shape == (1, 3)
    assert (loss * mask).sum().item() == pytest.approx(value, rel=1e-6)
    assert clipped.tolist() == [[is_clipped] * 3]
    gradient = 0.0 if is_clipped else -ratios[0] * ratios[1] * advantage
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([gradient, gradient, 0.0], rel=1e-6)


def test_an_answer_without_a_trained_token_is_finite() -> None:
    zeros = torch.zeros(1, 2)
    loss, _ = rloo_loss(zeros, zeros, torch.tensor([1.0]), zeros, epsilon=0.2, epsilon_high=0.2)
    assert loss.isfinite().all()
