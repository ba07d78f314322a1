"""Estimates of KL(policy ‖ reference) from the tokens that the policy sampled. http://joschu.net/blog/kl-approx.html"""

from __future__ import annotations

from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Per token, of the shape of both, with r = reference / policy:

    - k1 = −log r: unbiased, may be negative. What is taken off a reward (RLOO, PPO). As a loss its gradient is 0 on
      average, so a penalty in the loss is one of the others.
    - k2 = (log r)² / 2: biased a little, but its gradient is the KL's own.
    - k3 = r − 1 − log r: unbiased and never negative; in GRPO's loss (DeepSeekMath, https://arxiv.org/abs/2402.03300,
      equation 4).

    Raises ValueError for another name.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    if estimator == "k3":
        return log_ratio.exp() - 1 - log_ratio
    raise ValueError(f"kl_estimator must be one of {', '.join(KL_ESTIMATORS)}; got {estimator!r}")
