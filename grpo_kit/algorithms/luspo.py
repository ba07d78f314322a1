"""LUSPO: GSPO without its length bias: a sequence's loss counts as often as the sequence has tokens."""

from __future__ import annotations

from grpo_kit.algorithms.gspo import CLIP, sequence_surrogate
from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.weights import answer_sum

register(
    Algorithm(
        name="luspo",
        summary="GSPO, each answer weighed by its length.",
        formula=r"L = -\frac{1}{N} \sum_i |o_i| \min\left( s_i A_i,\; \mathrm{clip}(s_i, 1-\varepsilon, "
        r"1+\varepsilon_{\mathrm{high}}) A_i \right), \quad s_i = \left( \frac{\pi_\theta(o_i)}"
        r"{\pi_{\mathrm{old}}(o_i)} \right)^{1/|o_i|}",
        source="LUSPO, https://arxiv.org/abs/2602.05261",
        when="As gspo, when answers shrink although longer reasoning would be better. Its loss grows with the length "
        "of the answers: lower the learning rate, or clip the gradient's norm, for long ones.",
        loss=sequence_surrogate,
        weights=answer_sum,
        defaults=CLIP,
        whole_answers=True,
    )
)
