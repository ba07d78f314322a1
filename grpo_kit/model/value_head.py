"""PPO's critic: one linear layer on the hidden states of the model that is trained anyway. No second model."""

from __future__ import annotations

import torch
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Hidden states [M, H] to values [M], both what is stored and what comes out float32. Starts at 0, so that before
    it has learned anything every token's advantage is what still comes of the reward."""

    def __init__(self, hidden_size: int, device: torch.device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = torch.nn.Parameter(torch.zeros((), device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight + self.bias
