"""What a token step's matrix products leave to the kernels that use them, and the order in which their inputs lie.

A product is split along its inner dimension to keep a large GPU busy with few rows. Its consumer (the norm, the
heads, the gate) adds up the parts and applies bias and LoRA's second product, so that y is never written to memory.
The product itself is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # weights that share a scale; the products' inner dimensions are multiples of it
SPANS = (256, 128, 64)  # of the nibble order; the wider, the fewer and longer the products' loads


def span(inner: int) -> int:
    """Of the nibble order of a dimension of size `inner`: the widest that divides it. ValueError if none does."""
    fitting = next((span for span in SPANS if inner % span == 0), None)
    if fitting is None:
        raise ValueError(f"nibble order needs a dimension that is a multiple of {BLOCK}; got {inner}")
    return fitting


def nibble_order(x: Tensor) -> Tensor:
    """x [..., K] in the order in which the products read it: element k of a span of W at W/4·(k mod 4) + k // 4.

    Four neighbouring 4-bit weights make a word of 16 bits; in this order the inputs that meet the first weights of W/4
    words lie side by side, then those of the second ones, and so on. Raises ValueError unless K is a multiple of 64.
    """
    return x.unflatten(-1, (-1, span(x.shape[-1]) // 4, 4)).transpose(-1, -2).flatten(-3)


def natural_order(x: Tensor) -> Tensor:
    """The inverse of `nibble_order`."""
    return x.unflatten(-1, (-1, 4, span(x.shape[-1]) // 4)).transpose(-1, -2).flatten(-3)


@dataclass(frozen=True)
class Parts:
    """The unfinished product of x [B, K] with n matrices side by side, N outputs in all.

    sums: [S, B, N + n·r] float32, to be added up over S; its last n·r columns are LoRA's x·Aᵀ of each matrix.
    sizes: the outputs of each matrix. dtype: the compute format, that y is rounded to.
    lora_b: [N, r] in it, multiplied by LoRA's scaling; None where the adapter is off (r = 0). bias: [N] or None.

    Raises ValueError if the shapes don't fit together.
    """

    sums: Tensor
    sizes: tuple[int, ...]
    dtype: torch.dtype
    lora_b: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        expected = self.outputs + len(self.sizes) * self.rank
        if self.sums.dim() != 3 or self.sums.shape[2] != expected or self.sums.dtype != torch.float32:
            raise ValueError(
                f"Parts of matrices with {self.sizes} outputs and rank {self.rank} needs float32 sums "
                f"[S, B, {expected}]; got {tuple(self.sums.shape)} {self.sums.dtype}"
            )
        if self.lora_b is not None and (len(self.lora_b) != self.outputs or self.lora_b.dtype != self.dtype):
            raise ValueError(
                f"Parts needs lora_b [{self.outputs}, r] {self.dtype}; "
                f"got {tuple(self.lora_b.shape)} {self.lora_b.dtype}"
            )
        if self.bias is not None and self.bias.shape != (self.outputs,):
            raise ValueError(f"Parts needs bias [{self.outputs}]; got {tuple(self.bias.shape)}")

    @property
    def rows(self) -> int:
        """B."""
        return self.sums.shape[1]

    @property
    def outputs(self) -> int:
        """N."""
        return sum(self.sizes)

    @property
    def rank(self) -> int:
        """r of one matrix; 0 where the adapter is off."""
        return 0 if self.lora_b is None else self.lora_b.shape[1]

    def finished(self) -> Tensor:
        """y = W·x + bias + B·(A·x), [B, N], added up in float32 and rounded once; A·x is rounded before B is applied.

        The twin of what each consumer's kernel does with its own columns.
        """
        total = self.sums.sum(0)  # [B, N + n·r]
        y = total[:, : self.outputs]
        if self.bias is not None:
            y = y + self.bias.float()
        if self.lora_b is not None:
            low = total[:, self.outputs :].to(self.dtype).float().split(self.rank, 1)
            b = self.lora_b.float().split(self.sizes)
            y = y + torch.cat([low_i @ b_i.T for low_i, b_i in zip(low, b, strict=True)], 1)
        return y.to(self.dtype)
