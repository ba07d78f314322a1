"""The decoder as the native engine's fused token step takes it: frozen weights as they lie, LoRA in the compute format.

Which layers are known is in `families`; what a step does with them is in `rollout/native/fused_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kit.kernels.decode_attention import LARGEST_GROUP
from grpo_kit.kernels.decode_linear import DecodeGroup, Nf4, reaches_tensor_cores
from grpo_kit.kernels.decode_parts import BLOCK, span
from grpo_kit.kernels.triton_ready import use_triton
from grpo_kit.model.families import GEMMA, SAMPLED, kind_of, projections, why_not_read
from grpo_kit.model.frozen import base_layer, block_scales, frozen_linear, lora_of
from grpo_kit.model.precision import Precision
from grpo_kit.rollout import NativeEngine
from grpo_kit.rollout.native.cache import SlotCache
from grpo_kit.rollout.native.fused_step import Angles, DecodeLayer, DecodeWeights, FusedStep

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def step_for(
    engine: str, module: Any, precision: Precision, notes: list[tuple[str, str, str]]
) -> Callable[[SlotCache], FusedStep | None] | None:
    """What makes the token steps of an engine of this name; None where transformers' modules serve. The native engine's
    choice goes into `notes`, with the reason."""
    if engine != NativeEngine.name:
        return None
    on_gpu = precision.device.type == "cuda"
    obstacle = why_not_fused_step(module) if on_gpu else "the fused one is for a GPU"
    if obstacle:
        notes.append(("token step", "by transformers' modules", obstacle))
        return None
    notes.append(("token step", "fused", "this family's layers are known"))
    return partial(fused_step, module)


def fused_step(module: Any, cache: SlotCache) -> FusedStep | None:
    """The step of `module` (a peft one, or without an adapter) on this cache; None where `why_not_fused_step` has a
    reason.

    Frozen weights are not copied. A model quantized twice is an exception in its scales: they are made dense for each
    step anew, 4 bytes for every 64 weights (0.4 GB for 7 billion). LoRA's matrices are held in the compute format: 2
    bytes for each of their numbers.
    """
    if why_not_fused_step(module):
        return None
    return FusedStep(read_decoder(module), cache)


def why_not_fused_step(module: Any) -> str | None:
    """Why the fused step can't run this module; None if it can."""
    model = _causal_lm(module)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    obstacle = why_not_read(decoder, SAMPLED)
    if obstacle:
        return obstacle
    if _activation(decoder.config) not in ACTIVATIONS:
        return f"its activation is {_activation(decoder.config)}, not {' or '.join(ACTIVATIONS)}"
    embedding = decoder.embed_tokens.weight
    dtype = embedding.dtype
    if dtype not in _dtypes(embedding.device):
        return f"it computes in {dtype}"
    if embedding.is_cuda and not use_triton(embedding):
        return "its kernels need Triton, which cannot be imported"
    if embedding.is_cuda and not reaches_tensor_cores(embedding.device):
        return "its kernels would not reach the tensor cores of a GPU as old as this, bitsandbytes' do"
    if type(head) is not torch.nn.Linear or getattr(head, "bias", None) is not None:
        return "its output head is more than a matrix"
    norms = [weight for layer in decoder.layers for weight in _norms(layer).values() if weight is not None]
    others = {weight.dtype for weight in (head.weight, decoder.norm.weight, *norms)} - {dtype}
    if others:
        return f"it mixes {dtype} with {', '.join(map(str, others))}"
    config = decoder.config
    if config.num_attention_heads > LARGEST_GROUP * config.num_key_value_heads:
        return f"more than {LARGEST_GROUP} of its heads share one of keys"
    reasons = (_why_not_group(group, dtype) for layer in decoder.layers for group in projections(layer))
    return next((reason for reason in reasons if reason), None)


def read_decoder(module: Any) -> DecodeWeights:
    """Where transformers and peft keep the weights at this moment, and LoRA's matrices lowered to the compute format,
    if the adapter is on."""
    model = _causal_lm(module)
    decoder = model.get_decoder()
    lowered: list[_Lowered] = []
    config, dtype = decoder.config, decoder.embed_tokens.weight.dtype
    layers = tuple(_read_layer(layer, dtype, lowered) for layer in decoder.layers)
    first, embedding_scale = decoder.layers[0], getattr(decoder.embed_tokens, "embed_scale", None)
    return DecodeWeights(
        layers=layers,
        embedding=decoder.embed_tokens.weight.detach(),
        embedding_scale=None if embedding_scale is None else embedding_scale.to(dtype),
        norm=decoder.norm.weight.detach(),
        eps=config.rms_norm_eps,
        zero_centered=kind_of(first) in GEMMA,
        scale=first.self_attn.scaling,
        softcap=first.self_attn.attn_logit_softcapping if kind_of(first) == "Gemma2DecoderLayer" else None,
        activation=ACTIVATIONS[_activation(config)],
        head=model.get_output_embeddings().weight.detach(),
        logit_softcap=getattr(model.config, "final_logit_softcapping", None),
        angles=partial(_angles, decoder.rotary_emb),
        refresh=partial(_refresh, lowered),
    )


class _Lowered:
    """One module's LoRA, and where a group holds it in the compute format: a [r, K/W, 4, W/4], the nibble order's
    places, and b [N, r]. Views made once: a model has hundreds, and each refresh is then two launches a module."""

    def __init__(self, module: Any, a: Tensor, b: Tensor):
        source_a, source_b = (weight.detach() for weight in lora_of(module))
        self.source_a = source_a.unflatten(-1, (-1, span(source_a.shape[-1]) // 4, 4)).transpose(-1, -2)
        self.source_b, self.scaling = source_b, frozen_linear(module).scaling
        self.a, self.b = a.view(self.source_a.shape), b

    def refresh(self) -> None:
        self.a.copy_(self.source_a)
        torch.mul(self.source_b, self.scaling, out=self.b)  # as wide as it is trained, then rounded


@torch.no_grad()
def _refresh(lowered: list[_Lowered]) -> None:
    for one in lowered:
        one.refresh()


def _read_layer(layer: Any, dtype: torch.dtype, lowered: list[_Lowered]) -> DecodeLayer:
    qkv, out, gate_up, down = (_read_group(modules, dtype, lowered) for modules in projections(layer))
    norms: dict[str, Any] = _norms(layer)
    return DecodeLayer(**norms, qkv=qkv, out=out, gate_up=gate_up, down=down, turn=_turn(layer))


def _norms(layer: Any) -> dict[str, Tensor | None]:
    """The weights of a layer's norms, by the names that `DecodeLayer` has for them."""
    attention, gemma = layer.self_attn, kind_of(layer) in GEMMA
    modules = {
        "attention_norm": layer.input_layernorm,
        "attention_result_norm": layer.post_attention_layernorm if gemma else None,
        "mlp_norm": layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm,
        "mlp_result_norm": layer.post_feedforward_layernorm if gemma else None,
        "query_norm": getattr(attention, "q_norm", None),
        "key_norm": getattr(attention, "k_norm", None),
    }
    return {name: None if module is None else module.weight.detach() for name, module in modules.items()}


def _turn(layer: Any) -> str:
    """Which of `_angles` turn this layer's heads."""
    if kind_of(layer) == "Gemma3DecoderLayer":
        kind: str = layer.self_attn.layer_type
        return kind
    return "all" if getattr(layer.self_attn, "use_rope", True) else "none"


def _angles(rotary: Any, x: Tensor, positions: Tensor) -> Angles:
    """Gemma 3's layers with a window have other angles than those without; some of SmolLM3's have none."""
    if hasattr(rotary, "layer_types"):
        found = {kind: rotary(x, positions[None], kind) for kind in rotary.layer_types}
        return {kind: (cos[0], sin[0]) for kind, (cos, sin) in found.items()}
    cos, sin = (turn[0] for turn in rotary(x, positions[None]))
    return {"all": (cos, sin), "none": (cos[:, :0], sin[:, :0])}


def _read_group(modules: tuple[Any, ...], dtype: torch.dtype, lowered: list[_Lowered]) -> DecodeGroup:
    bases = [base_layer(module) for module in modules]
    weights = tuple(_weight(base) for base in bases)
    rows, inner = [base.out_features for base in bases], bases[0].in_features
    bias = None
    if any(base.bias is not None for base in bases):
        device = bases[0].weight.device
        biases = [torch.zeros(base.out_features, device=device) if base.bias is None else base.bias for base in bases]
        bias = torch.cat([each.detach().to(dtype) for each in biases])
    factors = lora_of(modules[0])
    if not factors:
        return DecodeGroup(weights, bias=bias)
    rank = len(factors[0])
    a = torch.empty(len(modules) * rank, inner, dtype=dtype, device=factors[0].device)
    b = torch.empty(sum(rows), rank, dtype=dtype, device=factors[0].device)
    new = [_Lowered(*one) for one in zip(modules, a.split(rank), b.split(rows), strict=True)]
    _refresh(new)
    lowered += new
    return DecodeGroup(weights, a, b, bias)


def _weight(base: Any) -> Nf4 | Tensor:
    weight: Tensor = base.weight.detach()
    state = getattr(base.weight, "quant_state", None)
    if state is None:
        return weight
    words = weight.reshape(-1).view(torch.int16).view(base.out_features, base.in_features // 4)
    return Nf4(words, block_scales(state).view(base.out_features, base.in_features // BLOCK))


def _why_not_group(modules: tuple[Any, ...], dtype: torch.dtype) -> str | None:
    bases = [base_layer(module) for module in modules]
    if bases[0].in_features % BLOCK:
        return f"one of its layers has {bases[0].in_features} inputs, not a multiple of {BLOCK}"
    if len({tuple(factors[0].shape[:1]) if (factors := lora_of(module)) else () for module in modules}) > 1:
        return "its adapter's ranks differ among layers that share an input"
    reasons = (_why_not_weight(base, dtype) for base in bases)
    return next((reason for reason in reasons if reason), None)


def _why_not_weight(base: Any, dtype: torch.dtype) -> str | None:
    state = getattr(base.weight, "quant_state", None)
    if state is None:
        return None if base.weight.dtype == dtype else f"it mixes {dtype} with {base.weight.dtype}"
    if state.quant_type != "nf4" or state.blocksize != BLOCK:
        return f"its weights are in {state.quant_type} with blocks of {state.blocksize}, not in nf4 with {BLOCK}"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has repacked its weights for this CPU"
    return None


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """A GPU's kernels are made for 16 bits; their twins also take 32."""
    halves = (torch.float16, torch.bfloat16)
    return halves if device.type == "cuda" else (*halves, torch.float32)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu"))


def _causal_lm(module: Any) -> Any:
    return module.get_base_model() if hasattr(module, "get_base_model") else module
