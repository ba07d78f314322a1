"""The decoders whose layers the kit reads itself: which they are, and where transformers keeps their linear layers.

Training knows the layers of the Llama kind (see `trunk`), the token step of sampling more (see `decode_layers`). What
they compute is not here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from grpo_kit.model.frozen import is_readable

TRAINED = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
GEMMA = ("Gemma2DecoderLayer", "Gemma3DecoderLayer")
SAMPLED = (*TRAINED, "SmolLM3DecoderLayer", "Phi3DecoderLayer", *GEMMA)


def kind_of(layer: Any) -> str:
    """The name that the lists above have for a layer."""
    return type(layer).__name__


def why_not_read(decoder: Any, kinds: Collection[str]) -> str | None:
    """Why this decoder is none of these kinds, or can't be read all the same; None if it can."""
    layers = list(getattr(decoder, "layers", []))
    found = set(map(kind_of, layers))
    if len(found) != 1 or not found <= set(kinds):
        return f"{', '.join(sorted(found)) or type(decoder).__name__} is run as transformers has it"
    if not all(is_readable(module) for layer in layers for group in projections(layer) for module in group):
        return "its weights are quantized in a way that only transformers reads"
    if layers[0].self_attn.head_dim % 8 or layers[0].self_attn.head_dim > 256:
        return f"fused attention has no kernel for heads of width {layers[0].self_attn.head_dim}"
    return None


def projections(layer: Any) -> tuple[tuple[Any, ...], ...]:
    """A layer's linear layers, in the groups that share an input: q, k and v; o; gate and up; down. Phi-3 has one for
    q, k and v, and one for gate and up."""
    attention, mlp = layer.self_attn, layer.mlp
    if kind_of(layer) == "Phi3DecoderLayer":
        return (attention.qkv_proj,), (attention.o_proj,), (mlp.gate_up_proj,), (mlp.down_proj,)
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )
