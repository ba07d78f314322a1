"""VESPO: a smooth weight on the whole sequence's ratio that fades stale answers out, derived from a variational
view of off-policy data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import column
from grpo_kit.algorithms.weights import per_token

LARGEST, SMALLEST = 20.0, math.log(1e-8)  # of a log-ratio; keeps exp finite


def vespo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    correction: Tensor | None = None,
    *,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> tuple[Tensor, Tensor]:
    """−sg(φ(W)) · A · logprob with W = Π_t exp(logprob − old) and φ(W) = W^k · exp(λ·(1 − W)), so that φ(1) = 1.

    logprobs, old_logprobs, mask [B, T]; advantages [B]; k and λ by the sign of A. `correction` [B, T] is the gap
    of old to sampler (`sampler_correction`, token modes), which belongs into W. Nothing is clipped.
    """
    advantage = column(advantages)
    with torch.no_grad():
        log_w = ((logprobs - old_logprobs).clamp(-LARGEST, LARGEST) * mask).sum(-1, keepdim=True)  # [B, 1]
        if correction is not None:
            log_w = log_w + (correction.log().clamp(SMALLEST, LARGEST) * mask).sum(-1, keepdim=True)
        log_w = log_w.clamp(SMALLEST, LARGEST)
        good = advantage >= 0
        k = torch.where(good, vespo_k_pos, vespo_k_neg)
        lam = torch.where(good, vespo_lambda_pos, vespo_lambda_neg)
        phi = (lam + k * log_w - lam * log_w.exp()).exp()
    loss = -phi * advantage * logprobs
    return loss, torch.zeros_like(loss, dtype=torch.bool)


register(
    Algorithm(
        name="vespo",
        summary="Group advantages, a smooth weight on the sequence's ratio that fades stale answers out.",
        formula=r"L = -\frac{1}{\sum_i |o_i|} \sum_i \mathrm{sg}\left[ W_i^{k} e^{\lambda (1 - W_i)} \right] A_i "
        r"\sum_t \log \pi_\theta(o_{it}), \quad W_i = \frac{\pi_\theta(o_i)}{\pi_{\mathrm{old}}(o_i)}, \quad "
        r"k, \lambda \text{ by the sign of } A_i",
        source="VESPO, https://arxiv.org/abs/2602.10693",
        when="Batches used many times, or sampled by a stale policy. With one update a batch φ is 1.",
        loss=vespo_loss,
        weights=per_token,
        defaults={"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    )
)
