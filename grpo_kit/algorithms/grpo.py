"""GRPO: every answer counts the same, however long. Loss = mean over sequences of the mean over their tokens."""

from __future__ import annotations

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import token_surrogate
from grpo_kit.algorithms.weights import per_answer

register(
    Algorithm(
        name="grpo",
        summary="Group advantages, each answer weighs the same.",
        formula=r"L = -\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t \left[ \min\left( w_{it} A_i,\; "
        r"\mathrm{clip}(w_{it}, 1-\varepsilon, 1+\varepsilon) A_i \right) - \beta\, \mathrm{KL}_{it} \right], \quad "
        r"A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)}",
        source="DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3",
        when="The place to start. Long wrong answers are punished less per token than short ones, which over many "
        "steps lets wrong answers grow.",
        loss=token_surrogate,
        weights=per_answer,
    )
)
