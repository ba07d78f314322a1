"""A token step by transformers' own modules, unmodified: any decoder that keeps keys and values and takes a 4-D mask.

The modules see a `Cache` of theirs whose layers write each row at its own position. It never grows and never waits for
the host, so the step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from grpo_kit.kernels.int8_tokens import Tokens, dense
from grpo_kit.rollout.native.cache import SlotCache


class ModuleStep:
    """See `TokenStep`."""

    def __init__(self, module: Any, cache: SlotCache):
        self.module, self.shape = module, cache.shape
        config = module.config.get_text_config(decoder=True)
        self.additive = config._attn_implementation == "eager"
        self.types: list[str] | None = getattr(config, "layer_types", None)
        self.places = torch.arange(max(cache.slots, cache.columns), device=cache.shape.device)
        self.layers = [_Slots(keys, values, self.places) for keys, values in zip(cache.keys, cache.values, strict=True)]
        self.view = Cache(layers=list(self.layers))

    def refresh(self) -> None:
        """Nothing to do: the modules' weights are those trained."""

    def __call__(self, token_ids: Tensor, positions: Tensor, length: int) -> Tensor:
        for layer in self.layers:
            layer.positions, layer.length = positions, length
        output = self.module(
            input_ids=token_ids[:, None],
            attention_mask=self._masks(positions, length),
            position_ids=positions[:, None],
            past_key_values=self.view,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _masks(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """One mask [B, 1, 1, length] where all layers see the same, else one for each type of layer, as transformers'
        models with several types take them."""
        windows = [_reach(layer.window, length) for layer in self.shape.layers]
        masks = {window: self._mask(positions, length, window) for window in set(windows)}
        if len(masks) == 1 or self.types is None:
            return masks[windows[0]]
        return {kind: masks[window] for kind, window in zip(self.types, windows, strict=True)}

    def _mask(self, positions: Tensor, length: int, window: int) -> Tensor:
        columns, last = self.places[:length], positions[:, None]
        seen = ((columns <= last) & (columns > last - window))[:, None, None]
        if not self.additive:
            return seen
        dtype = self.shape.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _reach(window: int | None, length: int) -> int:
    """A window that the columns looked at do not fill is none."""
    return length if window is None else min(window, length)


class _Slots(CacheLayerMixin):
    """One layer of a `SlotCache` as transformers' attention sees it."""

    is_sliding = False  # old columns are kept; the mask hides them
    keys: Any
    values: Any

    def __init__(self, keys: Tokens, values: Tokens, rows: Tensor):
        super().__init__()
        self.keys, self.values, self.rows = keys, values, rows
        self.is_initialized = True
        self.positions, self.length = rows[:1], 1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensors are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states [B, kv_heads, 1, D] of the new tokens. Returns everything up to `length`."""
        batch = len(key_states)
        self.keys[self.rows[:batch], :, self.positions] = key_states[:, :, 0]
        self.values[self.rows[:batch], :, self.positions] = value_states[:, :, 0]
        seen, dtype = (slice(batch), slice(None), slice(self.length)), key_states.dtype
        return dense(self.keys[seen], dtype), dense(self.values[seen], dtype)

    def get_seq_length(self) -> int:
        return self.length - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])

    def get_max_cache_shape(self) -> int:  # the same by the name that transformers before 5.16 asks for
        return self.get_max_length()
