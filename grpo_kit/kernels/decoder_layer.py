"""One decoder layer of the Llama kind as a unit that is computed again in backward.

    x₁ = x + o(attention(rotary(q, k), v)),  q, k, v = projections of norm(x)
    y  = x₁ + down(silu(gate(h)) · up(h)),   h = norm(x₁)

Forward keeps x alone, here or in the host's memory. Backward computes the attention half again, then takes the MLP in
tiles of rows, each once: only what its own gradient needs, so `down` is not computed again. Knows tensors only; which
models have such layers is not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kit.kernels.attention import Attention, causal_attention
from grpo_kit.kernels.attention_memory import Memory
from grpo_kit.kernels.lora_linear import Group, lower, project, project_backward, project_forward
from grpo_kit.kernels.offload import Offload
from grpo_kit.kernels.packing import Packed
from grpo_kit.kernels.rms_norm import rms_norm, rms_norm_ways
from grpo_kit.kernels.rotary import rotary
from grpo_kit.kernels.swiglu import swiglu_ways

TILE = 4096  # enough to keep a large GPU busy


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer. Norms [H]; query_norm, key_norm [D] or None. scale: of the attention scores."""

    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: Group
    out: Group
    gate_up: Group
    down: Group
    head_dim: int
    scale: float
    eps: float

    @property
    def groups(self) -> tuple[Group, Group, Group, Group]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True)
class Surroundings:
    """What all layers of a pass share. cos, sin [M, D]. check() is called before each layer, in both directions; what
    it raises ends the pass. tile: rows of the MLP at once. remember: keep attention's results with x instead of
    computing them again, where x is offloaded."""

    packed: Packed
    cos: Tensor
    sin: Tensor
    attention: Attention
    check: Callable[[], None]
    tile: int = TILE
    remember: bool = False


def decoder_layer(x: Tensor, layer: DecoderLayer, around: Surroundings, offload: Offload | None) -> Tensor:
    """x [M, H] → [M, H]; differentiable in x and in LoRA's weights. offload keeps x until backward."""
    lora = [weight for group in layer.groups for weight in group.lora]
    return _Layer.apply(x, layer, around, offload if torch.is_grad_enabled() else None, *lora)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: DecoderLayer, around: Surroundings, offload: Offload | None, *lora: Tensor
    ) -> Tensor:
        around.check()
        if any(ctx.needs_input_grad):
            ctx.layer, ctx.around, ctx.offload = layer, around, offload
            ctx.memory = Memory(offload) if offload is not None and around.remember else None
            if offload is None:
                ctx.save_for_backward(x)
            else:
                ctx.kept = offload.keep(x)
            return _mlp_half(_attention_half(x, layer, around, ctx.memory), layer, around.tile)
        return _mlp_half(_attention_half(x, layer, around, None), layer, around.tile)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer, around = ctx.layer, ctx.around
        around.check()
        x = ctx.saved_tensors[0] if ctx.offload is None else ctx.offload.take(ctx.kept)
        with torch.enable_grad():
            x = x.detach().requires_grad_(ctx.needs_input_grad[0])
            middle = _attention_half(x, layer, around, ctx.memory)
        grad_middle, grad_mlp = _mlp_backward(middle.detach(), grads[0], layer, around.tile)
        wanted = [*([x] if x.requires_grad else []), *layer.qkv.lora, *layer.out.lora]
        found = list(torch.autograd.grad(middle, wanted, grad_middle))
        grad_x = found.pop(0) if x.requires_grad else None
        return grad_x, None, None, None, *found, *grad_mlp


def _attention_half(x: Tensor, layer: DecoderLayer, around: Surroundings, memory: Memory | None) -> Tensor:
    q, k, v = (
        y.unflatten(-1, (-1, layer.head_dim)) for y in project(rms_norm(x, layer.attention_norm, layer.eps), layer.qkv)
    )  # [M, heads, D], [M, kv_heads, D] twice
    if layer.query_norm is not None and layer.key_norm is not None:
        q, k = _head_norm(q, layer.query_norm, layer.eps), _head_norm(k, layer.key_norm, layer.eps)
    q, k = rotary(q, k, around.cos, around.sin)
    attended = causal_attention(q, k, v, around.packed, layer.scale, around.attention, memory)
    return x + project(attended.flatten(1), layer.out)[0]


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.flatten(0, 1), weight, eps).view(x.shape)


def _mlp_half(x: Tensor, layer: DecoderLayer, rows: int) -> Tensor:
    """x [M, H], which is overwritten with the result: no gradient flows here."""
    gate_up, down = _mlp_groups(x, layer, rows)
    norm, _ = rms_norm_ways(x)
    activate, _ = swiglu_ways(x)
    for tile in x.split(rows):
        inner = activate(*project_forward(norm(tile, layer.mlp_norm, layer.eps)[0], gate_up)[0])
        tile += project_forward(inner, down)[0][0]
        del inner  # else the next tile's would come beside it
    return x


def _mlp_backward(x: Tensor, grad: Tensor, layer: DecoderLayer, rows: int) -> tuple[Tensor, list[Tensor]]:
    """From the gradient of the layer's output to that of its middle, [M, H] each, and those of the MLP's LoRA. Each
    gradient takes the memory of what it is the gradient of, so that a tile has three tensors of the MLP's width."""
    gate_up, down = _mlp_groups(x, layer, rows)
    norm, norm_backward = rms_norm_ways(x)
    activate, activate_backward = swiglu_ways(x)
    grad_x = torch.empty_like(grad)
    total: list[Tensor] = []
    for tile, grad_tile, grad_x_tile in zip(*(t.split(rows) for t in (x, grad, grad_x)), strict=True):
        normed, rstd = norm(tile, layer.mlp_norm, layer.eps)
        (gate, up), low = project_forward(normed, gate_up)
        inner = activate(gate, up)
        grad_down = project_backward(inner, lower(inner, down), (grad_tile,), down, grad_x=inner)
        gate, up = activate_backward(inner, gate, up, over=True)
        del inner
        grad_gate_up = project_backward(normed, low, (gate, up), gate_up, grad_x=normed)
        del gate, up
        torch.add(grad_tile, norm_backward(normed, tile, layer.mlp_norm, rstd), out=grad_x_tile)
        here = [*grad_gate_up, *grad_down]
        total = [a.add_(b) for a, b in zip(total, here, strict=True)] if total else here
    return grad_x, total


def _mlp_groups(x: Tensor, layer: DecoderLayer, rows: int) -> tuple[Group, Group]:
    """Gate and up, and down. Tiles share the dense weights; one tile alone asks for each when it is its turn, which is
    cheaper than the memory of all three."""
    gate_up, down = layer.gate_up.rounded(x.dtype), layer.down.rounded(x.dtype)
    return (gate_up.held(), down.held()) if len(x) > rows else (gate_up, down)
