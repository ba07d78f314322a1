"""The trainer's model on weights that another engine holds: transformers' modules are built without memory, and every
weight in them becomes a view.

What is not a weight (the frequencies of the rotary embedding) is computed as transformers does.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_kit.model.precision import Precision
from grpo_kit.rollout.vllm import Packed, SharedWeights


def build_on(weights: SharedWeights, config: Any, precision: Precision) -> PreTrainedModel:
    """The causal language model of `config` (of a family in `with_vllm.FAMILIES`), with a view for every weight.

    Raises ValueError where the weights have another layout than transformers' model.
    """
    model = _empty(config, precision.dtype)
    packed = _view_linears(model, weights, precision.dtype)
    _view_rest(model, weights)
    model.tie_weights()
    _compute_buffers(model, precision.device)
    if packed:  # what peft, and transformers before it saves or trains a model, ask of one that is quantized
        model.is_loaded_in_4bit = True
        model.is_quantized = True
        model.quantization_method = "bitsandbytes"
    built: PreTrainedModel = model
    return built


def _empty(config: Any, dtype: torch.dtype) -> Any:
    plain = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(plain, dtype=dtype)


def _view_linears(model: Any, weights: SharedWeights, dtype: torch.dtype) -> bool:
    """Put a bitsandbytes layer in the place of each linear layer that is kept in 4 bits. Returns whether there are."""
    found = {
        name: packed
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (packed := weights.packed(name)) is not None
    }
    for name, packed in found.items():
        model.set_submodule(name, _linear_4bit(name, model.get_submodule(name), packed, dtype))
    return bool(found)


def _linear_4bit(name: str, plain: torch.nn.Linear, packed: Packed, dtype: torch.dtype) -> Any:
    old = packed.state
    if tuple(old.shape) != tuple(plain.weight.shape) or 2 * packed.data.numel() != plain.weight.numel():
        raise ValueError(f"the 4-bit weight of {name} is {tuple(old.shape)}, transformers' {tuple(plain.weight.shape)}")
    state = QuantState(
        absmax=old.absmax,
        shape=old.shape,
        code=old.code,
        blocksize=old.blocksize,
        quant_type=old.quant_type,
        dtype=dtype,
        offset=old.offset,
        state2=old.state2,
    )
    layer = bnb.nn.Linear4bit(
        plain.in_features,
        plain.out_features,
        bias=plain.bias is not None,
        compute_dtype=dtype,
        quant_type=old.quant_type,
        device="meta",
    )
    layer.weight = bnb.nn.Params4bit(
        packed.data,
        requires_grad=False,
        quant_state=state,
        blocksize=old.blocksize,
        compress_statistics=state.nested,
        quant_type=old.quant_type,
        module=layer,
        bnb_quantized=True,
    )
    layer.quant_state = state
    return layer


def _view_rest(model: Any, weights: SharedWeights) -> None:
    """Everything that is still on the meta device but a head that is the embedding."""
    head = model.get_output_embeddings()
    for name, parameter in list(model.named_parameters()):
        module, leaf = name.rsplit(".", 1)
        owner = model.get_submodule(module)
        if parameter.is_meta and not (owner is head and model.config.tie_word_embeddings):
            view = weights.plain(name, parameter.shape)
            setattr(owner, leaf, torch.nn.Parameter(view, requires_grad=False))


def _compute_buffers(model: Any, device: torch.device) -> None:
    """A rotary embedding is its configuration: made anew, on the device."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(name, type(module)(config=model.config).to(device))
