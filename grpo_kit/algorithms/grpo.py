"""GRPO: every answer counts the same, however long. Loss = mean over sequences of the mean over their tokens.

L = (1/N) Σ_i (1/|o_i|) Σ_t ℓ_it                         DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3
"""

from __future__ import annotations

from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register


def weights(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (N · |o_i|), [N]; a sequence with no trained token counts in N and weighs nothing."""
    return 1.0 / (len(lengths) * lengths.clamp(min=1).float())


register(
    Algorithm(
        name="grpo",
        summary="Group advantages, each answer weighs the same. Mild bias towards long wrong answers.",
        source="DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3",
        weights=weights,
    )
)
