"""NF4 with its scales chosen by what a layer reads, in the format of bitsandbytes.

A block of 64 weights shares one scale, and bitsandbytes takes its largest weight for that. But a few inputs of a layer
are far larger than the others, and it is their weights that must be right. Clipping a block's largest weights makes the
steps finer for the others, so each block is clipped where the error that its inputs will see is the least (Lin et al.
2023, arXiv 2306.00978, clip after their search for scales likewise). What is stored is ordinary NF4 of clipped weights.
"""

from __future__ import annotations

import torch
from bitsandbytes import functional as bnb
from torch import Tensor

from grpo_kit.model.shape import NF4_BLOCK

SHARES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8)  # of a block's largest weight


def clipped(weight: Tensor, energy: Tensor) -> Tensor:
    """The weights whose NF4 errs least.

    weight [out, in]. energy [in]: the sum of squares of each input. Returns [out, in] in float32.
    """
    blocks = _in_blocks(weight.float())  # [blocks, 64]
    importance = _in_blocks(energy.float().expand(weight.shape))
    largest = blocks.abs().amax(1, keepdim=True)
    limit, least = largest.clone(), torch.full_like(largest, torch.inf)
    for share in SHARES:
        rounded = nf4_values(blocks.clamp(-share * largest, share * largest))
        error = (importance * (rounded - blocks).square()).sum(1, keepdim=True)
        limit = torch.where(error < least, share * largest, limit)
        least = torch.minimum(error, least)
    return blocks.clamp(-limit, limit).flatten()[: weight.numel()].view(weight.shape)


def nf4_values(weight: Tensor) -> Tensor:
    """The values that NF4 stores in place of these; float32."""
    return bnb.dequantize_4bit(*bnb.quantize_4bit(weight.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4"))


def _in_blocks(values: Tensor) -> Tensor:
    """[out, in] → [blocks, 64] as bitsandbytes takes them: along the rows, the last one filled up with zeros."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
