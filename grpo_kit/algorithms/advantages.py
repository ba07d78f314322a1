"""Advantages: how much better an answer was than its group's others. Pure functions on tensors.

A score that is None arrives here as NaN: its completion is left out of every mean and gets advantage 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
STD_FLOOR = 1e-4


def group_advantages(rewards: Tensor, num_generations: int, scale: str = "group") -> Tensor:
    """GRPO's advantage: A_i = (r_i − mean of its group) / (std + 1e-4), float32 [N].

    rewards [N], ordered by group: the `num_generations` completions of one prompt stand together. `scale` says which
    std divides: "group" (DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2), "batch" (the whole step's;
    Lite PPO, https://arxiv.org/abs/2508.08221) or "none" (Dr. GRPO, https://arxiv.org/abs/2503.20783, equation 3).
    Stds are unbiased (n−1). A group that was scored alike, or with fewer than two scored completions, teaches nothing
    and gets 0.

    Raises ValueError for an unknown scale or a number of rewards that is not a multiple of `num_generations`.
    """
    if scale not in SCALES:
        raise ValueError(f"scale_rewards must be one of {', '.join(SCALES)}; got {scale!r}")
    groups = _grouped(rewards, num_generations)  # [P, G]
    centred = groups - groups.nanmean(-1, keepdim=True)
    if scale == "group":
        centred = centred / (_nanstd(groups, -1) + STD_FLOOR)
    elif scale == "batch":
        centred = centred / (_nanstd(groups.flatten(), 0) + STD_FLOOR)
    # Equal rewards leave rounding of their mean behind, and an optimizer that ignores a gradient's size would follow.
    dead = dead_groups(rewards, num_generations)[:, None]
    return centred.nan_to_num(0.0).masked_fill(dead, 0.0).flatten()


def leave_one_out(rewards: Tensor, num_generations: int, normalize: bool = False) -> Tensor:
    """RLOO's advantage: A_i = r_i − mean of the other scored completions of its group, float32 [N].

    rewards [N], ordered by group, KL penalty included. `normalize` brings the step's advantages to mean 0 and std 1. A
    group that was scored alike, or with fewer than two scored completions, gets 0. RLOO,
    https://arxiv.org/abs/2402.14740, section 3.2. Raises ValueError for a number of rewards that is not a multiple of
    `num_generations`.
    """
    groups = _grouped(rewards, num_generations)  # [P, G]
    others = (~groups.isnan()).sum(-1, keepdim=True) - 1
    baseline = (groups.nansum(-1, keepdim=True) - groups) / others
    dead = dead_groups(rewards, num_generations)[:, None]  # equal rewards leave rounding behind
    advantages = (groups - baseline).masked_fill(dead, 0.0)
    advantages = advantages.masked_fill(groups.isnan() | (others < 1), torch.nan)  # not counted in the step's mean
    if normalize:
        advantages = (advantages - advantages.nanmean()) / (_nanstd(advantages.flatten(), 0) + STD_FLOOR)
    return advantages.nan_to_num(0.0).masked_fill(dead, 0.0).flatten()


def normalized_per_reward(scores: Tensor, weights: Tensor, num_generations: int) -> Tensor:
    """GDPO's advantage: each reward brought to mean 0 and std 1 within its group, then weighed and summed, then the
    step's sums brought to mean 0 and std 1; float32 [N].

    scores [N, K], ordered by group, NaN where a reward did not apply; weights [K]. So two rewards that split a group
    differently stay apart, where their plain sums would be equal. A group in which no reward varies gets 0. GDPO,
    https://arxiv.org/abs/2601.05242, section 3. Raises ValueError as `group_advantages`.
    """
    columns = scores.float().unbind(-1)
    each = torch.stack([_standardized(column, num_generations) for column in columns], -1)  # [N, K]
    total = (each * weights.to(each)).nansum(-1)
    total = total.masked_fill(scores.isnan().all(-1), torch.nan)
    advantages = (total - total.nanmean()) / (_nanstd(total, 0) + STD_FLOOR)
    dead = dead_groups(scores, num_generations)  # [P]
    return advantages.nan_to_num(0.0).masked_fill(dead.repeat_interleave(num_generations), 0.0)


def dead_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Which groups hold no signal, bool [P]: all scored alike, or fewer than two scored. rewards [N] ordered by
    group, or [N, K], where that holds for each of the K columns."""
    groups = rewards.float().reshape(-1, num_generations, rewards[0].numel())  # [P, G, K]
    lowest = groups.nan_to_num(torch.inf).amin(1)
    highest = groups.nan_to_num(-torch.inf).amax(1)
    return (highest - lowest < 1e-6).all(-1)


def _grouped(rewards: Tensor, num_generations: int) -> Tensor:
    """[N] as float32 [P, G]."""
    if len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards can't be split into groups of {num_generations}")
    return rewards.float().view(-1, num_generations)


def _standardized(rewards: Tensor, num_generations: int) -> Tensor:
    """Mean 0 and std 1 within each group, NaN kept; [N]."""
    advantages = group_advantages(rewards, num_generations)
    return advantages.masked_fill(rewards.isnan(), torch.nan)


def _nanstd(values: Tensor, dim: int) -> Tensor:
    """Unbiased std along `dim` over what is not NaN, keeping the dimension; NaN with fewer than two values."""
    known = ~values.isnan()
    squares = (values - values.nanmean(dim, keepdim=True)).nan_to_num(0.0) ** 2
    count = known.sum(dim, keepdim=True)
    return torch.where(count > 1, squares.sum(dim, keepdim=True) / (count - 1), torch.nan).sqrt()
