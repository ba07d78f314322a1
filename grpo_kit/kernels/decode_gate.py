"""The gated MLP's middle in a token step: what gate and up left unfinished becomes silu(gate) · up. No gradients."""

from __future__ import annotations

from torch import Tensor

from grpo_kit.kernels.decode_parts import Parts, nibble_order
from grpo_kit.kernels.swiglu import swiglu_forward
from grpo_kit.kernels.triton_ready import use_triton


def gate(parts: Parts) -> Tensor:
    """round(silu(g)) · u, [B, I] in nibble order, from the parts of the matrices gate and up (I outputs each).

    g and u are rounded to the compute format first, as `swiglu` gets them. I is a multiple of 64.

    Raises ValueError if the parts are not those of two matrices of one such size.
    """
    if len(parts.sizes) != 2 or parts.sizes[0] != parts.sizes[1] or parts.sizes[0] % 64:
        raise ValueError(f"gate needs two matrices with I outputs, a multiple of 64, each; got {parts.sizes}")
    if use_triton(parts.sums):
        from grpo_kit.kernels import decode_gate_triton as fused

        return fused.gate(parts)
    return plain_gate(parts)


def plain_gate(parts: Parts) -> Tensor:
    """The twin."""
    return nibble_order(swiglu_forward(*parts.finished().chunk(2, 1)))
