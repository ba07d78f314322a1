"""The matrix products of a token step, in plain torch: a few rows times 4-bit weights, with LoRA's x·Aᵀ beside them.

What comes out is unfinished (`Parts`): bias and LoRA's B are its consumer's. No gradients, and no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from bitsandbytes.functional import get_4bit_type
from torch import Tensor

from grpo_kit.kernels.decode_parts import BLOCK, Parts, natural_order


@dataclass(frozen=True)
class Nf4:
    """A matrix [N, K] in bitsandbytes' "nf4" with blocks of 64 along K, a multiple of 64.

    words: int16 [N, K/4], a view of the packed bytes: byte j of a row holds the weights 2j (its high bits) and 2j + 1.
    absmax: float32 [N, K/64].
    """

    words: Tensor
    absmax: Tensor

    def dense(self) -> Tensor:
        """[N, K] in float32."""
        byte = self.words.view(torch.uint8).int()  # [N, K/2]
        codes = torch.stack((byte >> 4, byte & 15), -1).flatten(1)
        values = _values(self.words.device)[codes]
        return (values.unflatten(1, (-1, BLOCK)) * self.absmax[..., None]).flatten(1)


@cache
def _values(device: torch.device) -> Tensor:
    values: Tensor = get_4bit_type("nf4", device=device)
    return values


@dataclass(frozen=True)
class DecodeGroup:
    """Layers with the same input x [B, K]; N outputs side by side, in dtype T.

    weights: of each layer, 4-bit, or a Tensor [N_i, K] in T and natural order where it was not quantized.
    lora_a: [n·r, K] in T and in nibble order, the n layers' one after the other; lora_b: [N, r] in T, times LoRA's
    scaling; both None where the adapter is off. bias: [N] in T, or None.
    """

    weights: tuple[Nf4 | Tensor, ...]
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    bias: Tensor | None = None


def decode_linear(x: Tensor, group: DecodeGroup) -> Parts:
    """x·Wᵀ of the group's matrices side by side, then x·Aᵀ, with x [B, K] in T and in nibble order; S = 1."""
    weights = [weight.dense() if isinstance(weight, Nf4) else weight.float() for weight in group.weights]
    sums = [natural_order(x.float()) @ weight.T for weight in weights]
    if group.lora_a is not None:
        sums.append(x.float() @ group.lora_a.float().T)
    sizes = tuple(len(weight) for weight in weights)
    return Parts(torch.cat(sums, 1)[None], sizes, x.dtype, group.lora_b, group.bias)
