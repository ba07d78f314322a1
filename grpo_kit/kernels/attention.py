"""Causal attention over packed sequences, by torch's fused kernels.

Sequences of similar length go side by side, padded on the right, where causal attention never looks, so no mask is
needed and every kernel of `scaled_dot_product_attention` will do. It refuses rather than fall back on the one that
holds all scores in memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from grpo_kit.kernels.attention_memory import Memory
from grpo_kit.kernels.packing import Packed, gather


@dataclass(frozen=True)
class Attention:
    """How this hardware attends. backends: torch's kernels, best first; empty leaves it to torch (on a CPU).
    grouped: whether they take fewer heads of keys than of queries as they are."""

    backends: tuple[SDPBackend, ...]
    grouped: bool

    def chosen(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(list(self.backends), set_priority=True) if self.backends else nullcontext()


def choose_attention(capability: tuple[int, int] | None, dtype: torch.dtype) -> Attention:
    """capability: of the CUDA device, None for a CPU. Flash attention needs 8.0 and 16 bits, cuDNN's is the fastest on
    9.0; the memory-efficient one runs everywhere."""
    if capability is None:
        return Attention((), grouped=False)
    if capability < (8, 0) or dtype == torch.float32:
        return Attention((SDPBackend.EFFICIENT_ATTENTION,), grouped=False)
    if capability < (9, 0):
        return Attention((SDPBackend.FLASH_ATTENTION,), grouped=True)
    return Attention((SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION), grouped=True)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, how: Attention, memory: Memory | None = None
) -> Tensor:
    """q [M, heads, D], k and v [M, kv_heads, D] → [M, heads, D]. Every token sees those before it in its sequence and
    itself. Differentiable in q, k and v.

    memory: a call without gradients leaves its results there, and the same call again with gradients, later, takes them
    from there instead of computing them again.

    Raises RuntimeError where none of the kernels takes these tensors.
    """

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, heads, S, D], k and v [b, kv_heads, S, D] → [b, heads, S, D]."""
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, S, heads, D], k and v [b, S, kv_heads, D] → [b·S, heads, D]."""
        if not how.grouped and q.shape[2] != k.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = fused(q, k, v) if memory is None else memory.call(fused, q, k, v)
        return out.transpose(1, 2).flatten(0, 1)

    with how.chosen():
        if packed.in_order:
            return attend(*(x.unflatten(0, (-1, packed.rows.shape[1])) for x in (q, k, v)))
        parts = [attend(*(gather(x, tokens, packed.shared) for x in (q, k, v))) for tokens in packed.buckets]
    own: Tensor = _Own.apply(torch.cat(parts) if len(parts) > 1 else parts[0], packed.owner)
    return own


class _Own(torch.autograd.Function):
    """The places [M] of `flat` [P, …] that belong to the tokens; nothing flows back to the others."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, owner: Tensor) -> Tensor:
        ctx.save_for_backward(owner)
        ctx.size = len(flat)
        return flat[owner]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (owner,) = ctx.saved_tensors
        (grad,) = grads
        return grad.new_zeros((ctx.size, *grad.shape[1:])).index_copy_(0, owner, grad), None
