"""SAPO: a soft gate in place of the hard clip: the further a ratio is from 1, the less its token pulls."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import column
from grpo_kit.algorithms.weights import per_answer


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sapo_temperature_pos: float,
    sapo_temperature_neg: float,
) -> tuple[Tensor, Tensor]:
    """−(4/τ) · sigmoid(τ·(w − 1)) · A, with w = exp(logprob − old) and τ by the sign of A.

    All [B, T], advantages [B] or [B, T]. At w = 1 the gradient is that of the plain policy gradient. Nothing is
    clipped. SAPO, https://arxiv.org/abs/2511.20347.
    """
    advantage = column(advantages)
    ratio = (logprobs - old_logprobs).exp()
    tau = torch.where(advantage > 0, sapo_temperature_pos, sapo_temperature_neg)
    loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    return loss, torch.zeros_like(loss, dtype=torch.bool)


register(
    Algorithm(
        name="sapo",
        summary="Group advantages, a soft gate on the ratio instead of a clip.",
        formula=r"L = -\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t \frac{4}{\tau_i} \sigma\left( \tau_i (w_{it} - 1) "
        r"\right) A_i, \quad \tau_i = \tau_{\mathrm{pos}} \text{ if } A_i > 0 \text{ else } \tau_{\mathrm{neg}}",
        source="SAPO, https://arxiv.org/abs/2511.20347",
        when="Several updates on one batch, when hard clipping makes learning jerky. With one update a batch it is "
        "the same as grpo.",
        loss=sapo_loss,
        weights=per_answer,
        defaults={"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    )
)
