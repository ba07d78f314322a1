"""The last act of a token step: from logits to one token a row and its logprob, drawn from the whole distribution.

Top-p and its like, that cut the distribution first, are `rollout/native/sampler.py`'s. No gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kit.kernels.triton_ready import use_triton

BLOCK = 256  # about the root of a vocabulary: as many blocks as tokens in one


def sample(logits: Tensor, uniform: Tensor, temperature: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their logprobs [B] float32 under softmax(logits / temperature).

    logits [B, V]; uniform [B] float64 in [0, 1): the token is the first whose cumulative probability exceeds it.
    temperature: float32, no dimension, on the same device. greedy: the likeliest token instead, the first of equals.
    Nothing waits for the device. Where logits are not numbers the token is any, the logprob NaN.

    Raises ValueError if the shapes or dtypes don't fit.
    """
    if logits.dim() != 2 or uniform.shape != logits.shape[:1] or uniform.dtype != torch.float64 or temperature.dim():
        raise ValueError(
            "sample needs logits [B, V], uniform [B] float64 and temperature []; got "
            f"{tuple(logits.shape)}, {tuple(uniform.shape)} {uniform.dtype} and {tuple(temperature.shape)}"
        )
    if use_triton(logits):
        from grpo_kit.kernels import decode_sample_triton as fused

        return fused.sample(logits, uniform, temperature, greedy)
    return plain_sample(logits, uniform, temperature, greedy)


def plain_sample(logits: Tensor, uniform: Tensor, temperature: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """The twin."""
    scaled = logits.float() / temperature
    tokens = scaled.argmax(-1) if greedy else invert(scaled.softmax(-1), uniform)
    return tokens, logprob_of(scaled, tokens)


def logprob_of(scaled: Tensor, tokens: Tensor) -> Tensor:
    """[B] float32: of these tokens under softmax(scaled [B, V])."""
    return scaled.gather(-1, tokens[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token [B] whose cumulative weight exceeds `uniform` times the total; weights [B, V] float32.

    In two levels, blocks and then within one, both summed in float64. Rounding can leave no such block or token where
    `uniform` is close to 1: then it is the last one with a weight at all.
    """
    blocks = pad(weights, (0, -weights.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))  # [B, V / BLOCK, BLOCK]
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = (uniform * ends[:, -1])[:, None]
    block = _first_above(ends, target, sums)
    row = torch.arange(len(weights), device=weights.device)
    inside = blocks[row, block].double()  # [B, BLOCK]
    begin = pad(ends, (1, 0))[row, block]  # what the blocks before it hold: not more than the target
    return block * BLOCK + _first_above(inside.cumsum(-1) + begin[:, None], target, inside)


def _first_above(cumulative: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(-1)
    return torch.minimum((cumulative <= target).sum(-1), last)
