"""GSPO's sequence ratio and its token form: numbers by hand. TRL ships no token form any more, so what is here is all
that holds it; GSPO itself is compared with TRL in `test_trl_parity`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import get_algorithm
from grpo_kit.algorithms.gspo import sequence_surrogate, sequence_token_surrogate
from grpo_kit.algorithms.surrogate import mean_log_ratio

CLIP = {"epsilon": 0.2, "epsilon_high": 0.3, "delta": None}
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def of(ratios: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Logprobs with these ratios to the old ones."""
    old = torch.full((len(ratios), len(ratios[0])), -1.0)
    return (old + torch.tensor(ratios).log()).requires_grad_(), old


def test_the_ratio_is_the_geometric_mean_over_an_answers_own_tokens() -> None:
    logprobs, old = of([[1.6, 0.9], [1.1, 50.0]])
    assert mean_log_ratio(logprobs, old, MASK).exp().flatten().tolist() == pytest.approx([1.2, 1.1])
    assert mean_log_ratio(logprobs, old, torch.zeros(2, 2)).exp().flatten().tolist() == [1.0, 1.0]


# √(1.6·0.9) = 1.2 within the bounds, √(2·0.9) = 1.34… beyond, √(0.4·0.9) = 0.6 beyond.
# (ratios, advantage) → (loss of each token, clipped)
CASES = {
    "within": ([1.6, 0.9], 2.0, -2.4, False),
    "good and grown too far": ([2.0, 0.9], 2.0, -2.6, True),
    "bad and shrunk too far": ([0.4, 0.9], -2.0, 1.6, True),
    "bad and grown": ([2.0, 0.9], -2.0, 2 * math.sqrt(1.8), False),
}


@pytest.mark.parametrize("loss_function", [sequence_surrogate, sequence_token_surrogate])
@pytest.mark.parametrize("case", CASES)
def test_value_clip_and_gradient(case: str, loss_function) -> None:
    """With one advantage an answer both forms have the same value and the same gradient: −A·s/|o| at each token."""
    ratios, advantage, value, is_clipped = CASES[case]
    logprobs, old = of([ratios])
    loss, clipped = loss_function(logprobs, old, torch.tensor([advantage]), torch.ones(1, 2), **CLIP)
    loss.mean().backward()
    assert loss.shape == clipped.shape == (1, 2)
    assert loss.tolist()[0] == pytest.approx([value] * 2, rel=1e-6)
    assert clipped.tolist() == [[is_clipped] * 2]
    gradient = 0.0 if is_clipped else value / 2
    assert logprobs.grad is not None and logprobs.grad.tolist()[0] == pytest.approx([gradient] * 2, rel=1e-6)


def test_the_token_form_has_a_gradient_for_each_token() -> None:
    """s = 1.2 at both tokens; A = 2 and −0.5: losses −2.4 and 0.6, gradients −s·A = −2.4 and 0.6."""
    logprobs, old = of([[1.6, 0.9]])
    loss, clipped = sequence_token_surrogate(logprobs, old, torch.tensor([[2.0, -0.5]]), torch.ones(1, 2), **CLIP)
    loss.sum().backward()
    assert loss.tolist()[0] == pytest.approx([-2.4, 0.6], rel=1e-6)
    assert not clipped.any()
    assert logprobs.grad is not None and logprobs.grad.tolist()[0] == pytest.approx([-2.4, 0.6], rel=1e-6)


def test_in_a_step_the_token_form_has_gspos_gradient() -> None:
    """Ragged answers, weighed as the updater does it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 1, 3, 6, 2])
    mask = (torch.arange(6) < lengths[:, None]).float()
    old, advantages = torch.randn(5, 6, generator=generator), torch.randn(5, generator=generator)
    start = old + 0.4 * torch.randn(5, 6, generator=generator)
    found = []
    for name in ("gspo", "gspo_token"):
        algorithm, logprobs = get_algorithm(name), start.clone().requires_grad_()
        loss, clipped = algorithm.loss(logprobs, old, advantages, mask, **CLIP)
        (algorithm.weights(lengths, 10)[:, None] * loss * mask).sum().backward()
        found.append((logprobs.grad, clipped * mask))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]) and 0 < found[0][1].sum() < mask.sum()


@pytest.mark.parametrize("loss_function", [sequence_surrogate, sequence_token_surrogate])
def test_delta_bounds_the_ratio_of_bad_answers(loss_function) -> None:
    logprobs, old = of([[4.0, 4.0]])
    loss, clipped = loss_function(
        logprobs, old, torch.tensor([-2.0]), torch.ones(1, 2), epsilon=0.2, epsilon_high=0.3, delta=1.5
    )
    loss.sum().backward()
    assert loss.tolist() == [[3.0, 3.0]] and clipped.all()
    assert logprobs.grad is not None and not logprobs.grad.any()
