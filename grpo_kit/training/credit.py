"""From scores to what each answer, or each of its tokens, is praised or blamed for: the advantage half of an
algorithm, fed with a step's scores and, where it needs them, estimates of the models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kit.algorithms import (
    Algorithm,
    gae,
    group_advantages,
    kl_estimate,
    leave_one_out,
    normalized_per_reward,
    rank_pairs,
    token_rewards,
    whiten,
)
from grpo_kit.rewards import ScoreTable
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.rollouts import score_tensor


@dataclass(frozen=True)
class Estimates:
    """What the models say of a step's N answers of up to T tokens before anything is learned; float32 [N, T] each.

    mask: 1 where a token is trained; tokens: 1 where there is one. reference: None with beta = 0;
    values: None without a critic.
    """

    mask: Tensor
    tokens: Tensor
    logprobs: Tensor
    entropy: Tensor
    reference: Tensor | None
    values: Tensor | None


@dataclass(frozen=True)
class Credit:
    """advantages: [N], or [N, T] from a critic, with its returns [N, T]. pairs: indices (better, worse), for
    algorithms that learn from pairs; there an advantage is 1, −1 or 0. metrics: what belongs into the step's row."""

    advantages: Tensor
    returns: Tensor | None
    pairs: list[tuple[int, int]] | None
    metrics: dict[str, float | None]

    def of_answers(self) -> list[float]:
        """One number an answer, for people: its advantage, or the mean over its tokens."""
        each = self.advantages
        return (each if each.dim() == 1 else each.sum(-1) / (each != 0).sum(-1).clamp(min=1)).tolist()


def give_credit(
    algorithm: Algorithm, options: TrainOptions, totals: Tensor, table: ScoreTable, estimates: Estimates | None
) -> Credit:
    """totals [N]: the weighted sums of `table`'s scores, NaN where nothing applied, ordered by group."""
    if algorithm.advantages == "gae":
        assert estimates is not None
        return _with_critic(options, totals, estimates)
    if algorithm.advantages == "pairs":
        return _in_pairs(options, totals)
    if algorithm.advantages == "leave_one_out":
        return _against_the_others(options, totals, estimates)
    return Credit(_within_groups(options, totals, table), None, None, {})


def _within_groups(options: TrainOptions, totals: Tensor, table: ScoreTable) -> Tensor:
    if options.multi_objective_aggregation == "normalize_then_sum":
        return normalized_per_reward(score_tensor(table), torch.tensor(table.weights), options.num_generations)
    assert options.scale_rewards is not None
    return group_advantages(totals, options.num_generations, options.scale_rewards)


def _against_the_others(options: TrainOptions, totals: Tensor, estimates: Estimates | None) -> Credit:
    metrics: dict[str, float | None] = {}
    if estimates is not None and estimates.reference is not None:
        penalty = _penalty(options, estimates)
        totals = totals - penalty
        metrics = {"kl_penalty": float(penalty.mean())}
    return Credit(
        leave_one_out(totals, options.num_generations, bool(options.normalize_advantages)), None, None, metrics
    )


def _in_pairs(options: TrainOptions, totals: Tensor) -> Credit:
    pairs, ties = rank_pairs(totals, options.num_generations)
    advantages = torch.zeros(len(totals))
    for better, worse in pairs:
        advantages[better], advantages[worse] = 1.0, -1.0
    return Credit(advantages, None, pairs, {"pairs": float(len(pairs)), "tied_pairs": float(ties)})


def _with_critic(options: TrainOptions, totals: Tensor, estimates: Estimates) -> Credit:
    assert estimates.values is not None and options.gamma is not None and options.lam is not None
    mask, values = estimates.mask, estimates.values
    kl = torch.zeros_like(mask) if estimates.reference is None else _kl(options, estimates)
    rewards = token_rewards(totals.to(mask.device), kl, mask, options.beta or 0.0)
    if options.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = gae(rewards, values, mask, options.gamma, options.lam)
    spread = returns[mask.bool()].var() if mask.sum() > 1 else torch.zeros(())
    missed = (returns - values)[mask.bool()].var() if mask.sum() > 1 else torch.zeros(())
    metrics: dict[str, float | None] = {"explained_variance": float(1 - missed / spread) if spread > 0 else None}
    if estimates.reference is not None:
        metrics["kl_penalty"] = float(_penalty(options, estimates).mean())
    return Credit(whiten(advantages, mask), returns, None, metrics)


def _penalty(options: TrainOptions, estimates: Estimates) -> Tensor:
    """β·KL of each whole answer, [N], on the CPU."""
    assert options.beta is not None
    return options.beta * (_kl(options, estimates) * estimates.tokens).sum(-1).cpu()


def _kl(options: TrainOptions, estimates: Estimates) -> Tensor:
    assert estimates.reference is not None and options.kl_estimator is not None
    return kl_estimate(estimates.logprobs, estimates.reference, options.kl_estimator)
