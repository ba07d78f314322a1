"""DAPO: every token of the batch counts the same, good rare tokens may grow further (clip-higher), and groups that
teach nothing are replaced (dynamic sampling).

Its fourth part, the soft penalty on overlong answers, is a reward: `rewards.length_penalty`.
"""

from __future__ import annotations

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import token_surrogate
from grpo_kit.algorithms.weights import per_token

register(
    Algorithm(
        name="dapo",
        summary="Group advantages, each token weighs the same, clip-higher, dead groups replaced.",
        formula=r"L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \min\left( w_{it} A_i,\; "
        r"\mathrm{clip}(w_{it}, 1-\varepsilon, 1+\varepsilon_{\mathrm{high}}) A_i \right), \quad "
        r"\text{groups with } \mathrm{std}(r) = 0 \text{ drawn anew}",
        source="DAPO, https://arxiv.org/abs/2503.14476, equation 8 (clip-higher: 10, dynamic sampling: 11)",
        when="Long reasoning, when entropy falls too early, or when many groups are all right or all wrong. Each "
        "replaced group costs another rollout. Add rewards.length_penalty for its penalty on overlong answers.",
        loss=token_surrogate,
        weights=per_token,
        defaults={"epsilon_high": 0.28, "dynamic_sampling_rounds": 2},
    )
)
