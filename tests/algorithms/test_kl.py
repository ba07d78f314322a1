"""Estimates of the KL to the reference: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms import kl_estimate

LN2 = math.log(2)
# reference / policy = 2, 1, 1/2, so log r = ln 2, 0, −ln 2. The gradient by the policy's logprob: k1 = −log r has 1,
# k2 = (log r)²/2 has −log r, k3 = r − 1 − log r has 1 − r.
BY_HAND = {
    "k1": ([-LN2, 0.0, LN2], [1.0, 1.0, 1.0]),
    "k2": ([LN2**2 / 2, 0.0, LN2**2 / 2], [-LN2, 0.0, LN2]),
    "k3": ([1 - LN2, 0.0, LN2 - 0.5], [-1.0, 0.0, 0.5]),
}


@pytest.mark.parametrize("estimator", BY_HAND)
def test_value_and_gradient(estimator: str) -> None:
    values, gradient = BY_HAND[estimator]
    logprobs = torch.full((1, 3), -1.5, requires_grad=True)
    found = kl_estimate(logprobs, logprobs.detach() + torch.tensor([[LN2, 0.0, -LN2]]), estimator)
    found.sum().backward()
    assert found.tolist()[0] == pytest.approx(values, abs=1e-6)
    assert logprobs.grad is not None and logprobs.grad.tolist()[0] == pytest.approx(gradient, abs=1e-6)


def test_k3_unless_told_otherwise_and_never_negative() -> None:
    policy, reference = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kl_estimate(policy, reference), kl_estimate(policy, reference, "k3"))
    assert (kl_estimate(policy, reference) >= 0).all()


def test_the_expectation_is_the_kl() -> None:
    """Over a policy of three tokens, each sampled as often as it is likely: k1 and k3 are unbiased, k2 nearly."""
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator, tolerance in {"k1": 1e-6, "k3": 1e-6, "k2": 0.02 * exact}.items():
        assert float((policy.exp() * kl_estimate(policy, reference, estimator)).sum()) == pytest.approx(
            exact, abs=tolerance
        )


def test_another_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="kl_estimator must be one of k1, k2, k3; got 'kl'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "kl")
