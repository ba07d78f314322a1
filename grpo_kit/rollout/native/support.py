"""Which modules the native engine can run: what their configuration says, and then a trial step that must agree with an
ordinary forward pass."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_kit.rollout.native.cache import COLUMN_STEP, CacheShape, LayerShape, SlotCache
from grpo_kit.rollout.native.module_step import ModuleStep
from grpo_kit.rollout.native.prefill import prefill

NEEDED = ("attention_mask", "position_ids", "past_key_values", "logits_to_keep")
ROTARY_BY_LENGTH = ("dynamic", "longrope")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TRIAL = [0, 1, 2, 3]  # any tokens: what matters is that two ways of computing agree on them
MOST_APART = 0.1  # relative, in the norm; 16 bits and 4-bit products by other kernels stay far below it


class NotSupported(ValueError):
    """The native engine can't run this module; the message says why."""


@torch.no_grad()
def examine(module: Any) -> CacheShape:
    """What the module keeps of a token. Runs it on a few tokens; raises NotSupported."""
    module.eval()
    obstacle = _obstacle(module)
    if obstacle:
        raise NotSupported(obstacle)
    shape = _shape(module)
    apart = _trial(module, shape)
    if math.isnan(apart):
        raise NotSupported(f"{_kind(module)} gives logits that are not finite numbers")
    if apart > MOST_APART:
        raise NotSupported(
            f"a token step through {_kind(module)} differs from its forward pass by {apart:.0%}: it does not take the "
            "positions and masks it is given"
        )
    return shape


def _obstacle(module: Any) -> str | None:
    """What the configuration already says."""
    kind, config = _kind(module), module.config.get_text_config(decoder=True)
    if getattr(module.config, "is_encoder_decoder", False):
        return f"{kind} has an encoder"
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    missing = [name for name in NEEDED if name not in inspect.signature(base.forward).parameters]
    if missing:
        return f"{kind} does not take {', '.join(missing)}"
    if any(getattr(config, name, None) for name in EXPERTS):
        return f"{kind} is a mixture of experts, which may choose them on the host; a CUDA graph can't"
    if getattr(config, "attention_chunk_size", None):
        return f"{kind} attends in chunks"
    if config._attn_implementation not in ("sdpa", "eager"):
        return (
            f"its attention is {config._attn_implementation}, which takes no mask of ours; load it with sdpa or eager"
        )
    by_length = sorted(_rope_types(config) & set(ROTARY_BY_LENGTH))
    if by_length:
        return f"its rotary embedding ({by_length[0]}) changes with the longest sequence in the batch"
    layers = DynamicCache(config=module.config).layers
    other = {type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if other:
        return f"{kind} keeps more than keys and values of each token ({', '.join(sorted(other))})"
    if len(layers) != config.num_hidden_layers:
        return f"some layers of {kind} share the keys and values of others"
    if len({getattr(layer, "sliding_window", None) for layer in layers}) > 1 and not hasattr(config, "layer_types"):
        return f"{kind} does not say which of its layers see how far"
    return None


def _rope_types(config: Any) -> set[str]:
    """All that a config names, for the whole model or for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return {str(one["rope_type"]) for one in nested if "rope_type" in one}


def _shape(module: Any) -> CacheShape:
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=module.config).layers]
    try:
        found = prefill(module, [TRIAL[:1]])[0]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise NotSupported(f"{_kind(module)} does not run with a cache: {error}") from error
    if len(found.keys) != len(windows):
        raise NotSupported(f"{_kind(module)} keeps {len(found.keys)} layers of keys, its config says {len(windows)}")
    layers = tuple(
        LayerShape(keys.shape[0], keys.shape[-1], values.shape[-1], window)
        for keys, values, window in zip(found.keys, found.values, windows, strict=True)
    )
    return CacheShape(layers, found.keys[0].dtype, found.keys[0].device)


def _trial(module: Any, shape: CacheShape) -> float:
    """How far a step of two rows, at positions 3 and 1, is from a plain forward pass: the larger relative distance."""
    cache, device = SlotCache(shape, 2, COLUMN_STEP), shape.device
    positions = torch.tensor([3, 1], device=device)
    ids = torch.tensor([TRIAL], device=device)
    try:
        for slot, position in enumerate(positions.tolist()):
            before = prefill(module, [TRIAL[:position]])[0]
            cache.write(torch.tensor([slot], device=device), before.keys, before.values)
        step = ModuleStep(module, cache)(ids[0, positions], positions, COLUMN_STEP).float()
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise NotSupported(f"a token step through {_kind(module)} fails: {error}") from error
    plain = module(input_ids=ids, use_cache=False).logits[0, positions].float()
    return float(((step - plain).norm(dim=-1) / plain.norm(dim=-1)).max())


def _kind(module: Any) -> str:
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    return type(base).__name__
