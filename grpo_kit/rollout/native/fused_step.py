"""A token step of a decoder with layers of the Llama kind, by the decode kernels: few launches, weights as stored.

It is handed the layers' weights as they lie and knows no modules (see `model/decode_layers.py`). It has no sliding
window: every row sees all of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding, linear

from grpo_kit.kernels.decode_attention import decode_attention
from grpo_kit.kernels.decode_gate import gate
from grpo_kit.kernels.decode_heads import finish_heads
from grpo_kit.kernels.decode_linear import DecodeGroup, decode_linear
from grpo_kit.kernels.decode_norm import add_norm
from grpo_kit.rollout.native.cache import SlotCache


@dataclass(frozen=True)
class DecodeLayer:
    """One layer: norms [H]; query_norm, key_norm [D] of each head, or None; the linear layers that share an input; the
    scale of attention's scores, and the norms' eps."""

    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: DecodeGroup
    out: DecodeGroup
    gate_up: DecodeGroup
    down: DecodeGroup
    scale: float
    eps: float


@dataclass(frozen=True)
class DecodeWeights:
    """A decoder: layers, the embedding [V, H], the last norm [H], the head [V, H], all in the cache's dtype.

    rotary: cos and sin, [1, B, D] each, from a tensor of that dtype and device, and positions [1, B].
    refresh: brings what was trained into the layers' LoRA tensors, in place.
    """

    layers: tuple[DecodeLayer, ...]
    embedding: Tensor
    norm: Tensor
    eps: float
    head: Tensor
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    refresh: Callable[[], None]


class FusedStep:
    """See `TokenStep`. The adapter it computes with is the one of the last `refresh`."""

    def __init__(self, weights: DecodeWeights, cache: SlotCache):
        self.weights, self.cache = weights, cache

    def refresh(self) -> None:
        self.weights.refresh()

    def __call__(self, token_ids: Tensor, positions: Tensor, length: int) -> Tensor:
        weights = self.weights
        x = embedding(token_ids, weights.embedding)  # [B, H]
        cos, sin = (turn[0] for turn in weights.rotary(x, positions[None]))
        parts = None  # of the layer before: what its MLP adds to x
        for layer, keys, values in zip(weights.layers, self.cache.keys, self.cache.values, strict=True):
            x, h = add_norm(x, parts, layer.attention_norm, layer.eps, ordered=True)
            q = finish_heads(
                decode_linear(h, layer.qkv), cos, sin, layer.query_norm, layer.key_norm, layer.eps,
                positions, keys, values,
            )  # fmt: skip
            h = decode_attention(q, keys, values, positions, layer.scale, length)
            x, h = add_norm(x, decode_linear(h, layer.out), layer.mlp_norm, layer.eps, ordered=True)
            parts = decode_linear(gate(decode_linear(h, layer.gate_up)), layer.down)
        _, h = add_norm(x, parts, weights.norm, weights.eps, ordered=False)
        return linear(h, weights.head)
