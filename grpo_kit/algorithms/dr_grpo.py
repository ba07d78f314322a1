"""Dr. GRPO: GRPO without its two biases: no division by the answer's length, none by the group's std."""

from __future__ import annotations

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import token_surrogate
from grpo_kit.algorithms.weights import constant

register(
    Algorithm(
        name="dr_grpo",
        summary="Group mean only, constant length normaliser: no bias by length or difficulty.",
        formula=r"L = -\frac{1}{N L_{\max}} \sum_i \sum_t \min\left( w_{it} A_i,\; "
        r"\mathrm{clip}(w_{it}, 1-\varepsilon, 1+\varepsilon) A_i \right), \quad A_i = r_i - \mathrm{mean}(r)",
        source="Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2",
        when="When GRPO's wrong answers grow longer and longer. Advantages have the reward's scale, and short answers "
        "give small gradients: the learning rate may need to be higher.",
        loss=token_surrogate,
        weights=constant,
        defaults={"scale_rewards": "none"},
    )
)
