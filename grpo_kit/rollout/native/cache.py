"""Keys and values of every slot, in one pair of tensors a layer, and how many slots a number of bytes buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kit.rollout.native.slots import BUCKETS

COLUMN_STEP = 64


def columns_for(tokens: int) -> int:
    """Columns that hold `tokens` tokens: the next multiple of 64."""
    return -(-tokens // COLUMN_STEP) * COLUMN_STEP


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of one token. window: how many columns back, its own included, it sees; None for all."""

    heads: int
    key_width: int
    value_width: int
    window: int | None = None


@dataclass(frozen=True)
class CacheShape:
    """What the decoder keeps of one token."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    def bytes_for(self, tokens: int) -> int:
        width = sum(layer.heads * (layer.key_width + layer.value_width) for layer in self.layers)
        return tokens * width * self.dtype.itemsize


def slots_within(shape: CacheShape, columns: int, limit: int, most: int) -> int:
    """The largest bucket of at most `most` slots whose cache fits `limit` bytes; 0 if not even one slot does."""
    fitting = [bucket for bucket in BUCKETS if bucket <= most and shape.bytes_for(bucket * columns) <= limit]
    return max(fitting, default=0)


class SlotCache:
    """keys, values: per layer [slots, kv_heads, columns, D]. Starts as zeros: what a row does not see yet is multiplied
    by 0, and must be finite for that."""

    def __init__(self, shape: CacheShape, slots: int, columns: int):
        self.shape, self.slots, self.columns = shape, slots, columns
        self.keys = [self._empty(layer.heads, layer.key_width) for layer in shape.layers]
        self.values = [self._empty(layer.heads, layer.value_width) for layer in shape.layers]

    @property
    def bytes(self) -> int:
        return self.shape.bytes_for(self.slots * self.columns)

    def write(self, slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Put a prompt of T tokens into the first columns of each of `slots` [G]; keys, values: per layer
        [kv_heads, T, D]."""
        for own, new in zip([*self.keys, *self.values], [*keys, *values], strict=True):
            own[slots, :, : new.shape[1]] = new

    def move(self, sources: Tensor, targets: Tensor, columns: int) -> None:
        """Copy the first `columns` of some slots to others; no slot may be both."""
        for own in (*self.keys, *self.values):
            own[targets, :, :columns] = own[sources, :, :columns]

    def _empty(self, heads: int, width: int) -> Tensor:
        size = (self.slots, heads, self.columns, width)
        return torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)
