"""The Triton kernel that makes a 4-bit matrix dense, for products with so many rows that this costs little."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.decode_linear import Nf4
from grpo_kit.kernels.nf4_lookup import VALUES

WORDS = 1024  # of a program, four weights each


def dense(weight: Nf4, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`: values times absmax in float32, rounded once."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.words.device)
    words = weight.words.numel()
    _dense[(triton.cdiv(words, WORDS),)](
        weight.words, weight.absmax, _values(out.device), out, words, WORDS=WORDS, num_warps=4
    )
    return out


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@triton.jit
def _dense(words, absmax, values, out, count, WORDS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * WORDS  # int64: the place of a weight may pass 2³¹
    w = tl.arange(0, WORDS)
    inside = w < count - first
    word = tl.load(words + first + w, mask=inside, other=0)
    scale = tl.load(absmax + (first + w) // 16, mask=inside, other=0.0)
    w0, w1 = tl.load(values + (word >> 4 & 15)) * scale, tl.load(values + (word & 15)) * scale
    w2, w3 = tl.load(values + (word >> 12 & 15)) * scale, tl.load(values + (word >> 8 & 15)) * scale
    in_order = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(WORDS * 4)
    k = tl.arange(0, WORDS * 4)
    tl.store(out + first * 4 + k, in_order, mask=k < (count - first) * 4)
