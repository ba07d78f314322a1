"""The next token of each row, chosen on the device by launches alone: nothing waits for the host, so it can be captured
in a CUDA graph. Draws what `rollout.sampling.next_tokens` draws from the same numbers, without a sum over the whole
vocabulary in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kit.rollout.engine import Sampling
from grpo_kit.rollout.sampling import warpers

BLOCK = 256  # about the root of a vocabulary: as many blocks as tokens in one


@dataclass(frozen=True)
class Cuts:
    """The part of `Sampling` that decides which operations run; a graph is captured for one of them."""

    greedy: bool
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float

    @classmethod
    def of(cls, sampling: Sampling) -> Cuts:
        return cls(
            sampling.temperature == 0,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
        )

    @property
    def needs_context(self) -> bool:
        return self.repetition_penalty != 1.0


def choose(
    logits: Tensor, uniform: Tensor, temperature: Tensor, cuts: Cuts, context: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their logprobs [B] float32 under softmax(logits / temperature).

    logits [B, V]; uniform [B] float64 in [0, 1); temperature: a scalar tensor (1 for greedy); context [B, S]: the ids
    so far, needed for a repetition penalty.
    """
    scaled = logits.float() / temperature
    chain = warpers(
        Sampling(
            max_tokens=1,
            top_k=cuts.top_k,
            top_p=cuts.top_p,
            min_p=cuts.min_p,
            repetition_penalty=cuts.repetition_penalty,
        )
    )
    cut: Tensor = chain(context, scaled) if chain else scaled  # type: ignore[arg-type]
    tokens = cut.argmax(-1) if cuts.greedy else invert(cut.softmax(-1), uniform)
    return tokens, scaled.gather(-1, tokens[:, None]).squeeze(-1) - scaled.logsumexp(-1)


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
