"""Dr. GRPO: GRPO without its two biases: no division by the answer's length, none by the group's std.

L = Σ_i Σ_t ℓ_it / (N · max_completion_length)           Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register


def weights(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (N · max_completion_length) for every sequence, [N]."""
    return torch.full(lengths.shape, 1.0 / (len(lengths) * max_completion_length), device=lengths.device)


register(
    Algorithm(
        name="dr_grpo",
        summary="Group mean only, constant length normaliser: no bias by length or difficulty.",
        source="Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2",
        weights=weights,
        scale_rewards="none",
    )
)
