"""Weights on tokens that have nothing to do with how good an answer was: where the sampler's probabilities differ from
the trainer's, where the policy has moved on, where there was nothing to decide. Pure functions on tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kit.algorithms.surrogate import column

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_correction(
    old_logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, mode: str, clip_max: float, clip_min: float | None
) -> Tensor:
    """π_old / π_sampler, bounded: [B, T] for the token modes, [B, 1] (the product over the answer) for the others.

    All inputs [B, T]. "truncate" clamps into [clip_min, clip_max], "mask" makes a weight outside of it 0. A sampled
    logprob that is NaN counts as equal. Truncated and masked importance sampling: Yao et al., 2025,
    https://fengyao.notion.site/off-policy-rl. Raises ValueError for another mode.
    """
    if mode not in CORRECTIONS:
        raise ValueError(f"importance_sampling_correction must be one of {', '.join(CORRECTIONS)}; got {mode!r}")
    level, how = mode.split("_")
    gap = ((old_logprobs - sampled_logprobs) * mask).nan_to_num(nan=0.0)
    ratio = (gap.sum(-1, keepdim=True) if level == "sequence" else gap).exp()
    if how == "truncate":
        return ratio.clamp(min=clip_min, max=clip_max)
    lowest = -math.inf if clip_min is None else clip_min
    return ratio.masked_fill((ratio < lowest) | (ratio > clip_max), 0.0)


def off_policy_mask(
    advantages: Tensor, logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Which answers are kept, float [B, 1]: all but bad ones that the policy has moved away from already.

    Kept where A ≥ 0 or mean_t(sampled − logprob) ≤ threshold. All [B, T], advantages [B] or [B, T]. DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, equation 9.
    """
    gap = (sampled_logprobs - logprobs.detach()).nan_to_num(nan=0.0) * mask
    moved = gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return ((column(advantages) >= 0) | (moved <= threshold)).to(mask.dtype)


def high_entropy_mask(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """The share `quantile` of a step's tokens at which the policy was least sure, float [N, T].

    entropy, mask [N, T] over the whole step. "Beyond the 80/20 rule", https://arxiv.org/abs/2506.01939.
    """
    real = entropy[mask.bool()].float()
    if not len(real):
        return torch.zeros_like(mask)
    threshold = torch.quantile(real, 1 - quantile)
    return ((entropy >= threshold) & mask.bool()).to(mask.dtype)
