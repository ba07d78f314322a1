"""The clipped surrogate: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms import clipped_surrogate
from grpo_kit.algorithms.surrogate import token_surrogate

# ε = 0.2, ε_high = 0.3. (ratio, advantage) → (loss, clipped)
CASES = {
    "good and grown too far": ((1.5, 2.0), (-2.6, True)),
    "good and shrunk": ((0.5, 2.0), (-1.0, False)),
    "bad and grown": ((1.5, -2.0), (3.0, False)),
    "bad and shrunk too far": ((0.5, -2.0), (1.6, True)),
    "within the bounds": ((1.1, 2.0), (-2.2, False)),
    "no advantage": ((5.0, 0.0), (0.0, False)),
}
# The same with δ = 1.8: it bounds what a bad token can pull, and changes nothing for good ones.
WITH_DELTA = {
    **CASES,
    "bad and grown beyond δ": ((4.0, -2.0), (3.6, True)),
    "good and grown beyond δ": ((4.0, 2.0), (-2.6, True)),
}


@pytest.mark.parametrize(("case", "delta"), [*((case, None) for case in CASES), *((case, 1.8) for case in WITH_DELTA)])
def test_value_clip_and_gradient(case: str, delta: float | None) -> None:
    (ratio, advantage), (value, is_clipped) = WITH_DELTA[case]
    logprobs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    old = torch.tensor([[-1.0]])
    loss, clipped = token_surrogate(
        logprobs, old, torch.tensor([advantage]), torch.ones(1, 1), epsilon=0.2, epsilon_high=0.3, delta=delta
    )
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert clipped.item() is is_clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage, rel=1e-6)


def test_each_sequence_has_its_advantage_on_all_its_tokens() -> None:
    loss, clipped = clipped_surrogate(torch.ones(2, 3), torch.tensor([1.0, -2.0]), 0.2, 0.2)
    assert loss.tolist() == [[-1.0] * 3, [2.0] * 3]
    assert not clipped.any()


def test_a_ratio_for_each_answer_and_advantages_for_each_token_go_together() -> None:
    ratio, advantages = torch.tensor([[1.1], [2.0]]), torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    loss, clipped = clipped_surrogate(ratio, advantages, 0.2, 0.3)
    torch.testing.assert_close(loss, torch.tensor([[-1.1, 1.1], [-1.3, 2.0]]))
    assert clipped.tolist() == [[False, False], [True, False]]
