"""GSPO: one importance ratio a sequence, because the reward is one a sequence. And its token form, whose value is the
same while advantages may differ from token to token."""

from __future__ import annotations

from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import clipped_surrogate, mean_log_ratio
from grpo_kit.algorithms.weights import per_answer


def sequence_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
) -> tuple[Tensor, Tensor]:
    """−min(s·A, clip(s, 1−ε, 1+ε_high)·A) with s_i = exp((1/|o_i|) Σ_t (logprob − old)), the same at each token.

    All [B, T], advantages [B]. Equations 6 and 7 of the paper.
    """
    ratio = mean_log_ratio(logprobs, old_logprobs, mask).exp()  # [B, 1]
    loss, clipped = clipped_surrogate(ratio, advantages, epsilon, epsilon_high, delta)
    return loss.expand_as(logprobs), clipped.expand_as(logprobs)


def sequence_token_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
) -> tuple[Tensor, Tensor]:
    """The same with s_it = sg(s_i) · π_t / sg(π_t), sg = stop gradient: each token has a gradient of its own.

    All [B, T], advantages [B] or [B, T]. Equations 13 and 14 of the paper.
    """
    level = mean_log_ratio(logprobs, old_logprobs, mask).detach()
    ratio = (level + logprobs - logprobs.detach()).exp()
    return clipped_surrogate(ratio, advantages, epsilon, epsilon_high, delta)


SOURCE = "GSPO, https://arxiv.org/abs/2507.18071"
CLIP = {"epsilon": 3e-4, "epsilon_high": 4e-4}  # section 5.1

register(
    Algorithm(
        name="gspo",
        summary="Group advantages, one importance ratio for the whole answer.",
        formula=r"L = -\frac{1}{N} \sum_i \min\left( s_i A_i,\; \mathrm{clip}(s_i, 1-\varepsilon, "
        r"1+\varepsilon_{\mathrm{high}}) A_i \right), \quad s_i = \left( \frac{\pi_\theta(o_i)}"
        r"{\pi_{\mathrm{old}}(o_i)} \right)^{1/|o_i|}",
        source=f"{SOURCE}, equations 5 to 7",
        when="Several updates on one batch, mixture-of-experts models, long answers: single tokens' ratios are noise. "
        "With one update a batch it is the same as grpo.",
        loss=sequence_surrogate,
        weights=per_answer,
        defaults=CLIP,
        whole_answers=True,
    )
)
register(
    Algorithm(
        name="gspo_token",
        summary="GSPO's sequence ratio, with a gradient for each token by itself.",
        formula=r"L = -\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t \min\left( s_{it} A_{it},\; \mathrm{clip}(s_{it}, "
        r"1-\varepsilon, 1+\varepsilon_{\mathrm{high}}) A_{it} \right), \quad s_{it} = \mathrm{sg}[s_i] \cdot "
        r"\frac{\pi_\theta(o_{it})}{\mathrm{sg}[\pi_\theta(o_{it})]}",
        source=f"{SOURCE}, equations 13 and 14",
        when="As gspo, where advantages differ within an answer; with one advantage an answer it has gspo's gradient.",
        loss=sequence_token_surrogate,
        weights=per_answer,
        defaults=CLIP,
    )
)
