"""The pieces that policy losses are made of: the clipped surrogate and the KL estimate. Pure functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective as a loss to minimise: −min(w·A, clip(w, 1−ε, 1+ε_high)·A) with w = exp(logprob − old).

    logprobs, old_logprobs [B, T]; advantages [B]. Returns `(loss [B, T], clipped [B, T] bool)`, where clipped marks the
    tokens that get no gradient. Schulman et al., https://arxiv.org/abs/1707.06347, equation 7; ε_high apart from ε is
    DAPO's clip-higher (https://arxiv.org/abs/2503.14476, equation 10).
    """
    ratio = (logprobs - old_logprobs).exp()
    advantage = advantages[:, None]
    loss = -torch.min(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantage)
    clipped = ((ratio < 1 - epsilon) & (advantage < 0)) | ((ratio > 1 + epsilon_high) & (advantage > 0))
    return loss, clipped


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy ‖ reference) per token, never negative: exp(ref − lp) − (ref − lp) − 1.

    Both [B, T]; http://joschu.net/blog/kl-approx.html. DeepSeekMath, equation 4, uses it in GRPO's loss.
    """
    gap = ref_logprobs - logprobs
    return gap.exp() - gap - 1
