"""PPO: a critic (a value head on the same backbone) says of each token whether things got better than expected."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import clipped_surrogate
from grpo_kit.algorithms.weights import per_token


def ppo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, equation 7 of the paper; all [B, T], advantages of each token included."""
    return clipped_surrogate((logprobs - old_logprobs).exp(), advantages, epsilon, epsilon_high)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float) -> Tensor:
    """½·max((V − R)², (clip(V, V_old ± ε_v) − R)²) per token, all [B, T].

    Clipped as the policy is, so that one batch can't throw the critic off. Equation 9 of the paper, the clip as in its
    authors' code (https://github.com/openai/baselines, ppo2).
    """
    near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)


register(
    Algorithm(
        name="ppo",
        summary="A critic's advantage for each token (GAE), KL inside the reward.",
        formula=r"L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \left[ \min\left( w_{it} \hat A_{it},\; "
        r"\mathrm{clip}(w_{it}, 1-\varepsilon, 1+\varepsilon) \hat A_{it} \right) - c_v\, \tfrac12 (V_{it} - R_{it})^2 "
        r"\right], \quad \hat A_{it} = \sum_{l \ge 0} (\gamma\lambda)^l \delta_{i,t+l}, \quad \delta_{it} = r_{it} + "
        r"\gamma V_{i,t+1} - V_{it}",
        source="PPO, https://arxiv.org/abs/1707.06347, equations 7 and 9; GAE, https://arxiv.org/abs/1506.02438; for "
        "language models, https://arxiv.org/abs/2009.01325",
        when="Rewards that come in the middle of an answer, one answer a prompt (num_generations=1), or a comparison "
        "with the classic. The critic has to learn first, so it starts slower.",
        loss=ppo_loss,
        weights=per_token,
        advantages="gae",
        defaults={"beta": 0.05, "num_iterations": 4},
        kl_in_reward=True,
    )
)
