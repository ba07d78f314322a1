"""What PPO learns from: rewards spread over tokens, advantages and returns estimated with a critic. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """−β·KL at each token and the answer's score at its last one, [N, T].

    scores [N] (NaN counts as 0), kl and mask [N, T]. Ziegler et al., https://arxiv.org/abs/1909.08593, equation 2.
    """
    rewards = -beta * kl * mask
    last = (mask.sum(-1).long() - 1).clamp(min=0)
    scored = scores.nan_to_num(0.0) * (mask.sum(-1) > 0)
    return rewards.scatter_add(1, last[:, None], scored[:, None].to(rewards.dtype))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, `(advantages, returns)`, [N, T] each, 0 beyond an answer's end.

    δ_t = r_t + γ·V_{t+1} − V_t and A_t = δ_t + γλ·A_{t+1}, where V and A after the last real token are 0; returns are
    A + V. rewards, values, mask [N, T]. Schulman et al., https://arxiv.org/abs/1506.02438, equation 16.
    """
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(values)
    later = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t + 1 < values.shape[1] else torch.zeros_like(later)
        delta = rewards[:, t] + gamma * following - values[:, t]
        later = (delta + gamma * lam * later) * mask[:, t]
        advantages[:, t] = later
    return advantages, (advantages + values) * mask


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x − mean) / √(var + 1e-8) over the real tokens, [N, T], 0 elsewhere; variance unbiased (n−1).

    shift_mean=False puts the mean back. Fewer than two tokens are returned as they are.
    """
    real = values[mask.bool()]
    if len(real) < 2:
        return values * mask
    mean, scale = real.mean(), torch.rsqrt(real.var() + 1e-8)
    whitened = (values - mean) * scale
    return (whitened if shift_mean else whitened + mean) * mask
