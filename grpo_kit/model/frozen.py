"""A linear layer as peft and bitsandbytes have it, read as what it computes: a frozen weight, a bias and LoRA."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import dequantize_blockwise
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import LoraLayer
from torch import Tensor

from grpo_kit.kernels import Frozen

ADAPTER = "default"
_dequantize = torch.ops.bitsandbytes.dequantize_4bit.default


def base_layer(module: Any) -> Any:
    """The layer under LoRA, or the module itself where there is none."""
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


def frozen_linear(module: Any) -> Frozen:
    """`module`: an nn.Linear or a bitsandbytes layer, with or without LoRA around it."""
    base = base_layer(module)
    scaling = module.scaling[ADAPTER] if isinstance(module, LoraLayer) else 1.0
    return Frozen(lambda: dense_weight(base), base.bias, float(scaling))


def is_readable(module: Any) -> bool:
    """Whether `dense_weight` knows how this layer keeps its weight: plainly, or in bitsandbytes' 4 bits."""
    base = base_layer(module)
    return type(base) is Linear4bit or (type(base) is torch.nn.Linear and base.weight.is_floating_point())


def dense_weight(base: Any) -> Tensor:
    """[N, K]; a 4-bit one anew each time."""
    weight = base.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        plain: Tensor = weight.detach()
        return plain
    # The operation below bitsandbytes' `dequantize_4bit`, spared its checks: a layer asks about twenty times a step.
    dense = _dequantize(
        weight.detach(), block_scales(state), state.blocksize, state.quant_type, state.shape, state.dtype
    )
    return dense.to(base.compute_dtype)


def block_scales(state: Any) -> Tensor:
    """The largest magnitude of each block of a 4-bit weight, in float32; where these are quantized too, made anew."""
    scales: Tensor = state.absmax
    return dequantize_blockwise(scales, state.state2) + state.offset if state.nested else scales


def lora_of(module: Any) -> tuple[Tensor, ...]:
    """(A [r, K], B [N, r]), or nothing where there is no adapter or it is switched off."""
    if not isinstance(module, LoraLayer) or module.disable_adapters or ADAPTER not in module.lora_A:
        return ()
    a: Any = module.lora_A[ADAPTER]
    b: Any = module.lora_B[ADAPTER]
    return a.weight, b.weight
