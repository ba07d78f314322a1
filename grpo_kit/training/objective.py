"""The loss of one micro-batch: an algorithm's loss, with what the options add to it. Pure functions on tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kit.algorithms import Algorithm, kl_estimate, off_policy_mask, sampler_correction, value_loss
from grpo_kit.model import TokenOutputs
from grpo_kit.training.options import TrainOptions


@dataclass(frozen=True)
class Known:
    """What is fixed while a micro-batch is learned from; [B, T] unless said otherwise, None where not needed.

    weights [B]: of each answer's tokens in the step's loss. token_weight, entropy_weight: 1 / tokens of the step, for
    what counts each token once whatever the algorithm (critic; entropy bonus over `chosen`). advantages [B] or [B, T].
    mask: 1 where a token is trained. chosen: 1 where the policy's loss looks (the least sure tokens). old_values,
    returns: the critic's.
    """

    weights: Tensor
    token_weight: float
    entropy_weight: float
    advantages: Tensor
    mask: Tensor
    old: Tensor
    sampled: Tensor
    reference: Tensor | None
    chosen: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None


@dataclass(frozen=True)
class Loss:
    """value: this micro-batch's part of the step's loss. clipped [B, T] bool. parts: [B, T] each ([P] for pairs),
    for the metrics."""

    value: Tensor
    clipped: Tensor
    parts: dict[str, Tensor]


def policy_objective(algorithm: Algorithm, options: TrainOptions, outputs: TokenOutputs, known: Known) -> Loss:
    """Σ_i weights_i · Σ_t loss_it over the trained tokens of a micro-batch, in this order: the algorithm's loss, what
    silences or weighs it, the pull to the reference (which nothing silences), the entropy bonus, the critic."""
    parts: dict[str, Tensor] = {}
    per_token, clipped, correction = _policy_loss(algorithm, options, outputs.logprobs, known)
    if correction is not None:
        parts["correction"] = correction.expand_as(per_token)
    if options.off_policy_mask_threshold is not None:
        per_token = per_token * off_policy_mask(
            known.advantages, outputs.logprobs, known.sampled, known.mask, options.off_policy_mask_threshold
        )
    if known.chosen is not None:
        per_token = per_token * known.chosen
    if correction is not None and not algorithm.corrects_itself:
        per_token = per_token * correction
    if options.beta and not algorithm.kl_in_reward:
        per_token = per_token + options.beta * _kl(options, outputs.logprobs, known)
    value = (known.weights[:, None] * per_token * known.mask).sum()
    if options.entropy_coef:
        looked_at = known.mask if known.chosen is None else known.mask * known.chosen
        value = value - options.entropy_coef * known.entropy_weight * (outputs.entropy * looked_at).sum()
    if algorithm.value_head:
        parts["value_loss"] = _critic(options, outputs, known)
        assert options.vf_coef is not None
        value = value + options.vf_coef * known.token_weight * (parts["value_loss"] * known.mask).sum()
    return Loss(value, clipped, parts)


def pair_objective(
    algorithm: Algorithm, options: TrainOptions, outputs: TokenOutputs, known: Known, pairs_of_step: int
) -> Loss:
    """Mean over the step's pairs. Rows are better, worse, better, worse, …"""
    assert known.reference is not None
    ratios = ((outputs.logprobs - known.reference) * known.mask).sum(-1)  # [B]
    each = algorithm.loss(ratios[0::2], ratios[1::2], **_options_of(algorithm, options))
    margin = (ratios[0::2] - ratios[1::2]).detach()
    parts = {"pair_accuracy": (margin > 0).float()}
    return Loss(each.sum() / pairs_of_step, torch.zeros_like(known.mask, dtype=torch.bool), parts)


def _policy_loss(
    algorithm: Algorithm, options: TrainOptions, logprobs: Tensor, known: Known
) -> tuple[Tensor, Tensor, Tensor | None]:
    correction = None
    if options.importance_sampling_correction is not None:
        assert options.importance_sampling_clip_max is not None
        correction = sampler_correction(
            known.old,
            known.sampled,
            known.mask,
            options.importance_sampling_correction,
            options.importance_sampling_clip_max,
            options.importance_sampling_clip_min,
        )
    extra = (correction,) if algorithm.corrects_itself else ()
    per_token, clipped = algorithm.loss(
        logprobs, known.old, known.advantages, known.mask, *extra, **_options_of(algorithm, options)
    )
    return per_token, clipped, correction


def _options_of(algorithm: Algorithm, options: TrainOptions) -> dict[str, float]:
    return {name: getattr(options, name) for name in algorithm.loss_options}


def _kl(options: TrainOptions, logprobs: Tensor, known: Known) -> Tensor:
    assert known.reference is not None and options.kl_estimator is not None
    kl = kl_estimate(logprobs, known.reference, options.kl_estimator)
    return kl * (logprobs - known.old).exp() if options.use_bias_correction_kl else kl


def _critic(options: TrainOptions, outputs: TokenOutputs, known: Known) -> Tensor:
    assert outputs.values is not None and known.old_values is not None and known.returns is not None
    assert options.cliprange_value is not None
    return value_loss(outputs.values, known.old_values, known.returns, options.cliprange_value)
