"""BNPO's normalisation: every token of the update counts the same.

L = Σ_i Σ_t ℓ_it / Σ_i |o_i|, over all tokens of one optimizer step. (Libraries that normalise each micro-batch by
itself make the loss depend on how the batch happens to be cut; this one does not.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kit.algorithms.registry import Algorithm, register


def weights(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / Σ|o_j| for every sequence, [N]."""
    return torch.full(lengths.shape, 1.0, device=lengths.device) / lengths.sum().clamp(min=1)


register(
    Algorithm(
        name="bnpo",
        summary="Group advantages, each token weighs the same.",
        source="token-level normalisation as in BNPO, https://arxiv.org/abs/2506.02864",
        weights=weights,
    )
)
