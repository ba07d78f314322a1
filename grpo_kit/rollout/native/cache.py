"""Keys and values of every slot, in one pair of tensors a layer, and how many slots a number of bytes buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kit.kernels.int8_tokens import Int8Tokens, Tokens, hadamard_matrix
from grpo_kit.rollout.native.slots import BUCKETS

COLUMN_STEP = 64
SCALE_BYTES = 4  # of an 8-bit vector


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
    """What the decoder keeps of one token. dtype: the compute format; int8: keys and values are held in 8 bits."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    int8: bool = False

    def bytes_for(self, tokens: int) -> int:
        vectors = 2 * sum(layer.heads for layer in self.layers)
        numbers = sum(layer.heads * (layer.key_width + layer.value_width) for layer in self.layers)
        return tokens * (numbers + vectors * SCALE_BYTES if self.int8 else numbers * self.dtype.itemsize)


def slots_within(shape: CacheShape, columns: int, limit: int, most: int) -> int:
    """The largest bucket of at most `most` slots whose cache fits `limit` bytes; 0 if not even one slot does."""
    fitting = [bucket for bucket in BUCKETS if bucket <= most and shape.bytes_for(bucket * columns) <= limit]
    return max(fitting, default=0)


class SlotCache:
    """keys, values: per layer [slots, kv_heads, columns, D], tensors or `Int8Tokens`. Starts as zeros: what a row does
    not see yet is multiplied by 0, and must be finite for that."""

    def __init__(self, shape: CacheShape, slots: int, columns: int):
        self.shape, self.slots, self.columns = shape, slots, columns
        self.keys = [self._keys(layer.heads, layer.key_width) for layer in shape.layers]
        self.values = [self._values(layer.heads, layer.value_width) for layer in shape.layers]

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
            own[targets, :, :columns] = own[sources, :, :columns]  # type: ignore[assignment]

    def _keys(self, heads: int, width: int) -> Tokens:
        if not self.shape.int8:
            return self._values(heads, width)
        size, device = (self.slots, heads, self.columns, width), self.shape.device
        return Int8Tokens.zeros(size, hadamard_matrix(width, self.shape.dtype, device), device)

    def _values(self, heads: int, width: int) -> Tokens:
        size, device = (self.slots, heads, self.columns, width), self.shape.device
        if self.shape.int8:
            return Int8Tokens.zeros(size, None, device)
        return torch.zeros(size, dtype=self.shape.dtype, device=device)
