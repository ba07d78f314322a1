"""BNPO's normalisation: every token of the update counts the same.

Over all tokens of one optimizer step. (Libraries that normalise each micro-batch by itself make the loss depend on how
the batch happens to be cut; this one does not.)
"""

from __future__ import annotations

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.surrogate import token_surrogate
from grpo_kit.algorithms.weights import per_token

register(
    Algorithm(
        name="bnpo",
        summary="Group advantages, each token weighs the same.",
        formula=r"L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \min\left( w_{it} A_i,\; "
        r"\mathrm{clip}(w_{it}, 1-\varepsilon, 1+\varepsilon) A_i \right)",
        source="token-level normalisation as in BNPO, https://arxiv.org/abs/2506.02864",
        when="Answers of very different lengths, when long ones should count as much per token as short ones.",
        loss=token_surrogate,
        weights=per_token,
    )
)
