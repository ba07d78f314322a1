"""A token step of a decoder of the Llama or Gemma kind, by the decode kernels: few launches, weights as stored.

It is handed the layers' weights as they lie and knows no modules (see `model/decode_layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from grpo_kit.kernels.decode_attention import decode_attention
from grpo_kit.kernels.decode_gate import gate
from grpo_kit.kernels.decode_heads import finish_heads
from grpo_kit.kernels.decode_linear import DecodeGroup, decode_linear
from grpo_kit.kernels.decode_norm import add_norm
from grpo_kit.rollout.native.cache import SlotCache

Angles = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DecodeLayer:
    """One layer: norms [H] of what attention and the MLP get, and of their results, or None; query_norm, key_norm [D]
    of each head, or None; the linear layers that share an input (q, k and v, like gate and up, may be one matrix); the
    name of the angles that its heads are turned by."""

    attention_norm: Tensor
    attention_result_norm: Tensor | None
    mlp_norm: Tensor
    mlp_result_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: DecodeGroup
    out: DecodeGroup
    gate_up: DecodeGroup
    down: DecodeGroup
    turn: str


@dataclass(frozen=True)
class DecodeWeights:
    """A decoder: layers, the embedding [V, H], the last norm [H], the head [V, H], all in the cache's dtype.

    embedding_scale: a number in that dtype that embeddings are multiplied by, or None. eps, zero_centered: of all norms
    (see `add_norm`). scale, softcap: of attention's scores (see `decode_attention`). activation: see `gate`.
    logit_softcap: c where logits z are c·tanh(z/c), or None.
    angles: by name, cos and sin, [B, R] each, from a tensor of that dtype and device, and positions [B].
    refresh: brings what was trained into the layers' LoRA tensors, in place.
    """

    layers: tuple[DecodeLayer, ...]
    embedding: Tensor
    embedding_scale: Tensor | None
    norm: Tensor
    eps: float
    zero_centered: bool
    scale: float
    softcap: float | None
    activation: str
    head: Tensor
    logit_softcap: float | None
    angles: Callable[[Tensor, Tensor], Angles]
    refresh: Callable[[], None]


class FusedStep:
    """See `TokenStep`. The adapter it computes with is the one of the last `refresh`."""

    def __init__(self, weights: DecodeWeights, cache: SlotCache):
        self.weights, self.cache = weights, cache

    def refresh(self) -> None:
        self.weights.refresh()

    def __call__(self, token_ids: Tensor, positions: Tensor, length: int) -> Tensor:
        weights, cache = self.weights, self.cache
        x = embedding(token_ids, weights.embedding)  # [B, H]
        if weights.embedding_scale is not None:
            x = x * weights.embedding_scale
        angles = weights.angles(x, positions)
        norm = partial(add_norm, eps=weights.eps, zero_centered=weights.zero_centered)
        parts, inner = None, None  # of the layer before: what its MLP adds to x, and the norm of that
        for layer, kept, keys, values in zip(weights.layers, cache.shape.layers, cache.keys, cache.values, strict=True):
            x, h = norm(x, parts, layer.attention_norm, ordered=True, inner=inner)
            q = finish_heads(
                decode_linear(h, layer.qkv), *angles[layer.turn], layer.query_norm, layer.key_norm, weights.eps,
                positions, keys, values, weights.zero_centered,
            )  # fmt: skip
            h = decode_attention(q, keys, values, positions, weights.scale, length, kept.window, weights.softcap)
            x, h = norm(
                x, decode_linear(h, layer.out), layer.mlp_norm, ordered=True, inner=layer.attention_result_norm
            )  # fmt: skip
            h = gate(decode_linear(h, layer.gate_up), weights.activation)
            parts, inner = decode_linear(h, layer.down), layer.mlp_result_norm
        _, h = norm(x, parts, weights.norm, ordered=False, inner=inner)
        logits = linear(h, weights.head)
        cap = weights.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap  # rounded as transformers' are
