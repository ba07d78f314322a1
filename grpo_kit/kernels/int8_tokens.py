"""Keys and values in 8 bits: vectors of D numbers, each with a scale of its own, half the bytes of a 16-bit cache.

Keys have channels far larger than the rest, whose size would set the scale of all. They are multiplied by a Hadamard
matrix first, which spreads each over many channels; queries that are multiplied by it too give the same scores (QuaRot,
arXiv:2404.00456). What reads and writes a cache in a token step is in `decode_attention` and `decode_heads`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a vector of zeros, so that it can be divided by


@dataclass(frozen=True, eq=False)
class Int8Tokens:
    """x [..., D] as scales·numbers, or scales·numbers·H/√p with a Hadamard matrix. Indexed like a tensor, by the
    leading dimensions; tensors are quantized as they are assigned.

    numbers [..., D] int8, within ±127; scales [...] float32, the least that a GPU's asynchronous copies take; hadamard
    [D, D] in the compute format, or None: see `hadamard_matrix`.
    """

    numbers: Tensor
    scales: Tensor
    hadamard: Tensor | None

    @classmethod
    def zeros(cls, size: tuple[int, ...], hadamard: Tensor | None, device: torch.device) -> Int8Tokens:
        """x of this size."""
        numbers = torch.zeros(size, dtype=torch.int8, device=device)
        return cls(numbers, torch.zeros(size[:-1], device=device), hadamard)

    @property
    def shape(self) -> torch.Size:
        """Of x."""
        return self.numbers.shape

    def __getitem__(self, index: Any) -> Int8Tokens:
        return Int8Tokens(self.numbers[index], self.scales[index], self.hadamard)

    def __setitem__(self, index: Any, x: Tensor | Int8Tokens) -> None:
        new = self.quantized(x) if isinstance(x, Tensor) else x
        self.numbers[index], self.scales[index] = new.numbers, new.scales

    def quantized(self, x: Tensor) -> Int8Tokens:
        """x [..., D] as these are held, each vector by its largest number."""
        x = self._turned(x)
        scales = (x.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE).float()
        return Int8Tokens((x / scales[..., None]).round().to(torch.int8), scales, self.hadamard)

    def turned(self, x: Tensor) -> Tensor:
        """x·H/√p, or x where there is no H. Queries so turned have the same scores with what is stored as queries that
        are not with what was assigned."""
        return self._turned(x).to(x.dtype)

    def _turned(self, x: Tensor) -> Tensor:
        """In float32, or float64."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x if self.hadamard is None else x @ self.hadamard.to(x.dtype) * root(self.hadamard)

    def stored(self, dtype: torch.dtype) -> Tensor:
        """scales·numbers."""
        return self.numbers.to(dtype) * self.scales.to(dtype)[..., None]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """x, rounded to `dtype` after it is multiplied by H/√p, which undoes that."""
        x, scales = self.numbers.to(dtype), self.scales
        if self.hadamard is not None:
            x, scales = x @ self.hadamard.to(dtype), scales * root(self.hadamard)
        return torch.mul(x, scales[..., None], out=torch.empty_like(x))  # rounds once, and holds no wider copy

    def is_contiguous(self) -> bool:
        """As the kernels need it: then one stride is that of numbers and, by D, of scales."""
        return self.numbers.is_contiguous() and self.scales.is_contiguous()


Tokens = Tensor | Int8Tokens


def dense(x: Tokens, dtype: torch.dtype) -> Tensor:
    return x if isinstance(x, Tensor) else x.dense(dtype)


def hadamard_matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H [width, width] of 1, −1 and 0, symmetric, with H·H = p·1; p: the largest power of two that divides width.

    It is [[B, B], [B, −B]] with a B for the first half of the channels that holds Sylvester's matrix of size p/2 on its
    diagonal. Raises ValueError for an odd width.
    """
    if width % 2:
        raise ValueError(f"a Hadamard matrix for keys needs an even width, got {width}")
    sylvester = torch.ones(1, 1)
    while width % (4 * len(sylvester)) == 0:
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    block = torch.block_diag(*[sylvester] * (width // 2 // len(sylvester)))
    return torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)]).to(device, dtype)


def root(hadamard: Tensor) -> float:
    """1/√p."""
    width = len(hadamard)
    return float((width & -width) ** -0.5)


def numbers_and_scales(x: Tokens) -> tuple[Tensor, Tensor | None]:
    """As kernels take them: the tensor and None, or the 8-bit numbers and their scales."""
    return (x, None) if isinstance(x, Tensor) else (x.numbers, x.scales)
