"""VESPO: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms.vespo import vespo_loss

SHAPE = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


def phi(w: float, k: float, lam: float) -> float:
    return w**k * math.exp(lam * (1 - w))


def loss_and_gradient(
    ratios: list[float], advantage: float, mask: Tensor | None = None, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of an answer at whose every token the logprob is −1."""
    logprobs = torch.full((1, len(ratios)), -1.0, requires_grad=True)
    old = -1 - torch.tensor([ratios]).log()
    mask = torch.ones(1, len(ratios)) if mask is None else mask
    loss, clipped = vespo_loss(logprobs, old, torch.tensor([advantage]), mask, correction, **SHAPE)
    loss.sum().backward()
    assert not clipped.any() and logprobs.grad is not None
    return loss.detach()[0], logprobs.grad[0]


@pytest.mark.parametrize(("advantage", "k", "lam"), [(1.5, 2.0, 3.0), (0.0, 2.0, 3.0), (-1.5, 3.0, 2.0)])
@pytest.mark.parametrize("ratios", [[1.0, 1.0], [2.0, 0.75], [0.5, 0.5]])
def test_value_and_gradient(ratios: list[float], advantage: float, k: float, lam: float) -> None:
    """W is the product. loss = −φ·A·logprob = φ·A here, its gradient −φ·A: φ itself has none."""
    weight = phi(ratios[0] * ratios[1], k, lam)
    loss, gradient = loss_and_gradient(ratios, advantage)
    assert loss.tolist() == pytest.approx([weight * advantage] * 2, rel=1e-5)
    assert gradient.tolist() == pytest.approx([-weight * advantage] * 2, rel=1e-5)


def test_without_a_gap_the_weight_is_one() -> None:
    assert loss_and_gradient([1.0, 1.0, 1.0], 2.0)[0].tolist() == [2.0] * 3


def test_what_is_masked_is_not_in_the_product() -> None:
    loss, _ = loss_and_gradient([1.5, 40.0], 1.0, mask=torch.tensor([[1.0, 0.0]]))
    assert loss[0].item() == pytest.approx(phi(1.5, 2.0, 3.0), rel=1e-5)


def test_the_gap_to_the_sampler_belongs_into_the_product() -> None:
    loss, _ = loss_and_gradient([2.0, 0.75], 1.0, correction=torch.tensor([[0.5, 2.5]]))
    assert loss[0].item() == pytest.approx(phi(1.5 * 1.25, 2.0, 3.0), rel=1e-5)


def test_the_gap_where_there_is_no_token_is_not_in_the_product() -> None:
    """Padding has a ratio of 1, which a bound below 1 would clamp."""
    correction, mask = torch.tensor([[0.5, 0.8]]), torch.tensor([[1.0, 0.0]])
    loss, _ = loss_and_gradient([2.0, 1.0], 1.0, mask=mask, correction=correction)
    assert loss[0].item() == pytest.approx(phi(1.0, 2.0, 3.0), rel=1e-5)


def test_a_token_that_the_correction_drops_silences_the_answer() -> None:
    loss, gradient = loss_and_gradient([1.0, 1.0], 1.0, correction=torch.tensor([[0.0, 1.0]]))
    assert loss.tolist() == pytest.approx([0.0, 0.0], abs=1e-12) and gradient.abs().max() < 1e-12


@pytest.mark.parametrize("ratio", [1e-30, 1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_answers_from_far_away_fade_out_and_stay_finite(ratio: float, advantage: float) -> None:
    loss, gradient = loss_and_gradient([ratio, ratio], advantage)
    assert loss.isfinite().all() and loss.abs().max() < 1e-12 and gradient.abs().max() < 1e-12


def test_a_product_below_1e_minus_8_counts_as_that() -> None:
    """As in the authors' code: with a small k such an answer still pulls a little."""
    logprobs, mask = torch.full((1, 2), -1.0), torch.ones(1, 2)
    shape = {**SHAPE, "vespo_k_pos": 0.1}
    loss, _ = vespo_loss(logprobs, logprobs + 30.0, torch.tensor([1.0]), mask, **shape)
    assert loss[0].tolist() == pytest.approx([1e-8**0.1 * math.exp(3.0)] * 2, rel=1e-5)
