"""One step's sequences, and a micro-batch of them as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kit.kernels import Packed, pack
from grpo_kit.rollout import Completion
from grpo_kit.training.order import Tokens


@dataclass(frozen=True)
class Sequence:
    """A prompt with one of its completions; `trained` is False for a completion that the loss leaves out."""

    prompt_ids: list[int]
    completion: Completion
    trained: bool = True

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion.token_ids)

    @property
    def size(self) -> Tokens:
        return Tokens(tuple(self.prompt_ids), len(self.prompt_ids), len(self.completion.token_ids))


@dataclass(frozen=True)
class MicroBatch:
    """B sequences, packed; first [B] (where completions start in them), and over the longest completion T: token_mask
    [B, T] (1 where a token exists), loss_mask [B, T] (1 where it is trained), sampled [B, T] (the engine's
    logprobs)."""

    indices: list[int]
    packed: Packed
    first: Tensor
    token_mask: Tensor
    loss_mask: Tensor
    sampled: Tensor

    @property
    def width(self) -> int:
        return self.token_mask.shape[1]


def collate(sequences: list[Sequence], indices: list[int], device: torch.device) -> MicroBatch:
    """Put the chosen sequences together; a prompt that several of them have is there once."""
    chosen = [sequences[i] for i in indices]
    width = max(len(s.completion.token_ids) for s in chosen)
    token_mask = torch.zeros(len(chosen), width)
    sampled = torch.zeros(len(chosen), width)
    for row, sequence in enumerate(chosen):
        tokens = len(sequence.completion.token_ids)
        token_mask[row, :tokens] = 1
        sampled[row, :tokens] = torch.tensor(sequence.completion.logprobs)
    trained = torch.tensor([[float(s.trained)] for s in chosen])
    first = torch.tensor([len(s.prompt_ids) for s in chosen])
    packed = pack([(s.prompt_ids, s.completion.token_ids) for s in chosen], device)
    return MicroBatch(indices, packed, *(t.to(device) for t in (first, token_mask, token_mask * trained, sampled)))
