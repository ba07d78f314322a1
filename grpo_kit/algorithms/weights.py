"""Who counts how much: the weight of each sequence's tokens in the loss of one optimizer step.

All take lengths [N], the trained tokens of every sequence of the step (0 for one that is left out), and the run's
max_completion_length, and return [N]. The step's loss is Σ_i weight_i · Σ_t loss_it, so a step may be cut into
micro-batches in any way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def per_answer(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (N · |o_i|): every answer counts the same, however long. One with no trained token counts in N."""
    return 1.0 / (len(lengths) * lengths.clamp(min=1).float())


def per_token(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / Σ|o_j|: every token counts the same."""
    return torch.full(lengths.shape, 1.0, device=lengths.device) / lengths.sum().clamp(min=1)


def constant(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (N · max_completion_length): the same whatever the lengths, so that none of them is favoured."""
    return torch.full(lengths.shape, 1.0 / (len(lengths) * max_completion_length), device=lengths.device)


def answer_sum(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / N: the sum over an answer's tokens, mean over answers."""
    return torch.full(lengths.shape, 1.0 / len(lengths), device=lengths.device)
