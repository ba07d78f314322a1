"""CISPO: the importance weight is capped, not the token dropped: every token keeps its gradient."""

from __future__ import annotations

from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import column
from grpo_kit.algorithms.weights import per_token


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """−sg(min(w, 1 + ε_high)) · A · logprob, with w = exp(logprob − old) and sg = stop gradient.

    All [B, T], advantages [B] or [B, T]. Returns `(loss, capped)`; a capped token still has a gradient. Equations 4
    and 5 of the paper, which leaves the lower bound open.
    """
    ratio = (logprobs - old_logprobs).exp().detach()
    return -ratio.clamp(max=1 + epsilon_high) * column(advantages) * logprobs, ratio > 1 + epsilon_high


register(
    Algorithm(
        name="cispo",
        summary="Group advantages, capped importance weights, no token left out.",
        formula=r"L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \mathrm{sg}\left[ \min(w_{it}, "
        r"1+\varepsilon_{\mathrm{high}}) \right] A_i \log \pi_\theta(o_{it})",
        source="MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5; the cap of 5 as in ScaleRL, "
        "https://arxiv.org/abs/2510.13786",
        when="Several updates on one batch, when the rare tokens that turn an argument ('wait', 'however') should not "
        "be clipped away.",
        loss=cispo_loss,
        weights=per_token,
        defaults={"epsilon_high": 4.0},
    )
)
