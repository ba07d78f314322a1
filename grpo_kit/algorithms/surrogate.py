"""The pieces that policy losses are made of: importance ratios and the clipped surrogate. Pure functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def column(advantages: Tensor) -> Tensor:
    """[B] as [B, 1]; [B, T] as it is."""
    return advantages[:, None] if advantages.dim() == 1 else advantages


def mean_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(1/|o_i|) Σ_t (logprob − old): the log of GSPO's length-normalised sequence ratio, [B, 1]. All [B, T]."""
    total = ((logprobs - old_logprobs) * mask).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective as a loss to minimise: −min(w·A, clip(w, 1−ε, 1+ε_high)·A).

    ratio w [B, T] or [B, 1]; advantages [B] or [B, T]. Returns `(loss, clipped)` of the broadcast shape, where clipped
    marks what gets no gradient. Schulman et al., https://arxiv.org/abs/1707.06347, equation 7; ε_high apart from ε is
    DAPO's clip-higher (https://arxiv.org/abs/2503.14476, equation 10). `delta` bounds w itself from above, so that a
    bad token that has become likely can't pull without limit: two-sided clipping, INTELLECT-2,
    https://arxiv.org/abs/2505.07291 (δ above 1 + ε_high).
    """
    advantage = column(advantages)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.min(bounded * advantage, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantage)
    clipped = ((ratio < 1 - epsilon) & (advantage < 0)) | ((ratio > 1 + epsilon_high) & (advantage > 0))
    if delta is not None:
        clipped = clipped | ((ratio > delta) & (advantage < 0))
    return loss, clipped


def token_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate with a ratio for each token, w_it = exp(logprob − old). All [B, T]; see
    `clipped_surrogate`."""
    return clipped_surrogate((logprobs - old_logprobs).exp(), advantages, epsilon, epsilon_high, delta)
