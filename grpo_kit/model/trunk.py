"""The decoder as the trainer runs it: from packed tokens to the hidden state after the last layer.

Families with layers of the Llama kind run through `kernels.decoder_layer`, which reads the weights where transformers
and peft have them. All others run through transformers' own forward pass, padded, with its gradient checkpointing.
Sampling uses neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from grpo_kit.kernels import (
    Attention,
    DecoderLayer,
    Group,
    Offload,
    Packed,
    Surroundings,
    choose_attention,
    decoder_layer,
    rms_norm,
)
from grpo_kit.model.families import TRAINED, projections, why_not_read
from grpo_kit.model.frozen import frozen_linear, lora_of
from grpo_kit.model.precision import Precision
from grpo_kit.model.watch import watched


def nothing() -> None:
    """For passes that no one interrupts."""


class Trunk:
    """Runs the decoder of `module`. fused: whether through our own layers; reason: why, or why not."""

    def __init__(self, module: PeftModel, precision: Precision, max_seq_length: int):
        self.module, self.precision = module, precision
        model: Any = module.get_base_model()
        self.decoder: Any = model.get_decoder()
        obstacle = why_not_fused(self.decoder, max_seq_length)
        self.fused = obstacle is None
        self.reason = obstacle or "this family's layers are known"
        on_gpu = precision.device.type == "cuda"
        self.attention: Attention = choose_attention(
            torch.cuda.get_device_capability(precision.device) if on_gpu else None, precision.dtype
        )
        self._check: Callable[[], None] = nothing

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder's layers, in order; empty for a family that calls them neither `layers` nor `h`."""
        return list(getattr(self.decoder, "layers", None) or getattr(self.decoder, "h", []))

    def in_words(self) -> tuple[str, str]:
        """What runs the passes, and why."""
        return ("packed, layer by layer" if self.fused else "padded, by transformers' modules"), self.reason

    @contextmanager
    def watched(self, check: Callable[[], None]) -> Iterator[None]:
        """Within the block `check()` is called before each layer in both directions; what it raises ends the pass."""
        if not self.fused:
            with watched(self.layers, check):
                yield
            return
        self._check = check
        try:
            yield
        finally:
            self._check = nothing

    def hidden(self, packed: Packed, offload: Offload | None = None) -> Tensor:
        """[M, H], in the order of the packed tokens, after the last norm."""
        return self._fused(packed, offload) if self.fused else self.plain(packed, offload)

    def plain(self, packed: Packed, offload: Offload | None = None) -> Tensor:
        """The same through transformers' own modules: sequences are padded, what they share is computed for each."""
        dtype = self.precision.dtype
        positions = (packed.mask.cumsum(-1) - 1).clamp(min=0)
        with (
            torch.autocast(self.precision.device.type, dtype, enabled=dtype != torch.float32),
            _layer_inputs_to(offload),
        ):
            hidden = self.decoder(
                input_ids=packed.ids[packed.rows],
                attention_mask=packed.mask,
                position_ids=positions,
                use_cache=False,
            ).last_hidden_state  # [B, S, H]
        return hidden.flatten(0, 1)[packed.places()]

    def _fused(self, packed: Packed, offload: Offload | None) -> Tensor:
        x = self.decoder.embed_tokens(packed.ids)
        cos, sin = self.decoder.rotary_emb(x[None], packed.positions[None])  # [1, M, D] each
        layers = [read_layer(layer) for layer in self.decoder.layers]
        width = self.decoder.config.num_attention_heads * layers[0].head_dim  # of attention's results
        rows = sum(tokens.numel() for tokens in packed.buckets)
        both = len(layers) * (len(packed) * x.shape[1] + rows * width) * x.element_size()
        remember = offload is not None and both <= offload.limit
        around = Surroundings(packed, cos[0], sin[0], self.attention, self._check, remember=remember)
        for layer in layers[:-1]:
            x = decoder_layer(x, layer, around, offload)
        x = decoder_layer(x, layers[-1], around, None)  # its backward comes at once
        return rms_norm(x, self.decoder.norm.weight, self.decoder.norm.variance_epsilon)


def why_not_fused(decoder: Any, max_seq_length: int) -> str | None:
    """Why this decoder can't run through our layers; None if it can."""
    obstacle = why_not_read(decoder, TRAINED)
    if obstacle:
        return obstacle
    config = decoder.config
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not SiLU"
    windows = [window for layer in decoder.layers if (window := _window(layer, config)) is not None]
    if windows and min(windows) < max_seq_length:
        return f"its attention sees {min(windows)} tokens back, not all of up to {max_seq_length}"
    return None


def _window(layer: Any, config: Any) -> int | None:
    """How far back this layer sees; None for to the beginning. Mistral's layers all do what the config says, others
    each have their own."""
    own = config if type(layer).__name__ == "MistralDecoderLayer" else layer.self_attn
    window: int | None = getattr(own, "sliding_window", None)
    return window


def read_layer(layer: Any) -> DecoderLayer:
    """Where transformers and peft keep a layer's weights, at this moment; nothing is copied."""
    attention = layer.self_attn
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    qkv, out, gate_up, down = (_group(*modules) for modules in projections(layer))
    return DecoderLayer(
        attention_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        query_norm=None if query_norm is None else query_norm.weight,
        key_norm=None if key_norm is None else key_norm.weight,
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        eps=layer.input_layernorm.variance_epsilon,
    )


def _group(*modules: Any) -> Group:
    return Group(
        tuple(frozen_linear(module) for module in modules),
        tuple(weight for module in modules for weight in lora_of(module)),
    )


def _layer_inputs_to(offload: Offload | None) -> AbstractContextManager[Any]:
    """Where gradient checkpointing saves the inputs of transformers' layers, and what the last norm saves beside them:
    what is [B, S, H] and has a gradient."""
    if offload is None:
        return nullcontext()

    def pack(tensor: Tensor) -> Any:
        return offload.keep(tensor) if tensor.dim() == 3 and tensor.requires_grad else tensor

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else offload.take(kept)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
