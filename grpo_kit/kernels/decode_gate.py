"""The gated MLP's middle in a token step: what gate and up left unfinished becomes act(gate) · up. No gradients."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from grpo_kit.kernels.decode_parts import Parts, nibble_order
from grpo_kit.kernels.triton_ready import use_triton

ACTIVATIONS = ("silu", "gelu_tanh")


def gate(parts: Parts, activation: str = "silu") -> Tensor:
    """round(act(g)) · u, [B, I] in nibble order, from the parts of the matrices gate and up (I outputs each), or of a
    single one that holds both, gate first.

    g and u are rounded to the compute format first. I is a multiple of 64. activation: "silu", z·sigmoid(z) (Shazeer
    2020, arXiv:2002.05202, eq. 6), or "gelu_tanh", z/2·(1 + tanh(√(2/π)·(z + 0.044715·z³))) (Hendrycks and Gimpel 2016,
    arXiv:1606.08415, section 2).

    Raises ValueError for another activation, or if the parts are not those of such matrices.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"gate knows the activations {', '.join(ACTIVATIONS)}; got {activation!r}")
    if parts.sizes not in ((parts.outputs,), (parts.outputs // 2,) * 2) or parts.outputs % 128:
        raise ValueError(
            f"gate needs two matrices with I outputs, a multiple of 64, each, or one with 2·I; got {parts.sizes}"
        )
    if use_triton(parts.sums):
        from grpo_kit.kernels import decode_gate_triton as fused

        return fused.gate(parts, activation)
    return plain_gate(parts, activation)


def plain_gate(parts: Parts, activation: str) -> Tensor:
    """The twin; torch computes activations of 16-bit numbers in float32 and rounds."""
    z, up = parts.finished().chunk(2, 1)
    return nibble_order((F.silu(z) if activation == "silu" else F.gelu(z, approximate="tanh")) * up)
