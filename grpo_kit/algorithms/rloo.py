"""RLOO: REINFORCE on whole answers; the baseline of each is the mean of the others of its group."""

from __future__ import annotations

from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import clipped_surrogate
from grpo_kit.algorithms.weights import answer_sum


def rloo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
) -> tuple[Tensor, Tensor]:
    """−min(W·A, clip(W, 1−ε, 1+ε_high)·A) with W = Π_t exp(logprob − old), the whole answer as one action.

    All [B, T], advantages [B]. The answer's loss is spread evenly over its tokens: their sum is what it says above.
    The clip matters only from the second update on a batch on; in the first one this is the paper's REINFORCE.
    """
    ratio = ((logprobs - old_logprobs) * mask).sum(-1, keepdim=True).exp()  # [B, 1]
    loss, clipped = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
    each = loss / mask.sum(-1, keepdim=True).clamp(min=1)
    return each.expand_as(logprobs), clipped.expand_as(logprobs)


register(
    Algorithm(
        name="rloo",
        summary="Leave-one-out baseline, the whole answer is one action, KL inside the reward.",
        formula=r"L = -\frac{1}{N} \sum_i \min\left( W_i A_i,\; \mathrm{clip}(W_i, 1-\varepsilon, 1+\varepsilon) A_i "
        r"\right), \quad A_i = R_i - \frac{1}{G-1} \sum_{j \ne i} R_j, \quad R_i = r_i - \beta \sum_t \log "
        r"\frac{\pi_{\mathrm{old}}(o_{it})}{\pi_{\mathrm{ref}}(o_{it})}",
        source="RLOO, https://arxiv.org/abs/2402.14740, section 3.2",
        when="Noisy rewards (reward models, human ratings): an unbiased gradient, nothing divided by a std. The pull "
        "to the reference is part of the reward, so each step costs a pass of the reference.",
        loss=rloo_loss,
        weights=answer_sum,
        advantages="leave_one_out",
        defaults={"beta": 0.05},
        kl_in_reward=True,
        whole_answers=True,
    )
)
