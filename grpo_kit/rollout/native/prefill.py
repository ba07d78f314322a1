"""Prompts through the module, each once, in chunks of bounded size: keys and values, and the next token's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from grpo_kit.rollout.forward import last_logits, left_padded

CHUNK_TOKENS = 4096


@dataclass
class Prefilled:
    """keys, values: per layer [kv_heads, T, D] of a prompt of T tokens; logits [V] after its last token."""

    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor

    def alone(self) -> Prefilled:
        """A copy that does not hold on to the other prompts of its chunk."""
        keys, values = [key.clone() for key in self.keys], [value.clone() for value in self.values]
        return Prefilled(keys, values, self.logits.clone())


def chunks(lengths: list[int]) -> Iterator[range]:
    """Split prompts, in order, so that a padded chunk has at most CHUNK_TOKENS tokens, or one prompt."""
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or max(lengths[start : end + 1]) * (end + 1 - start) > CHUNK_TOKENS:
            yield range(start, end)
            start = end


def prefill(module: Any, prompts: list[list[int]]) -> list[Prefilled]:
    """Run one chunk of prompts. The cache keeps every column, also those that a sliding window no longer sees."""
    ids, mask = left_padded(prompts, next(module.parameters()).device)
    cache: Any = DynamicCache()
    logits = last_logits(module, ids, mask, cache)
    return [
        Prefilled(
            [layer.keys[row, :, -len(prompt) :] for layer in cache.layers],
            [layer.values[row, :, -len(prompt) :] for layer in cache.layers],
            logits[row],
        )
        for row, prompt in enumerate(prompts)
    ]
