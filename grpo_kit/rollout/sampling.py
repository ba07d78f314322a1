"""From logits to the next token of each row, with a random stream per row. Pure functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_kit.rollout.engine import Sampling, stream_seed


def random_streams(prompts: int, n: int, sampling: Sampling) -> Tensor:
    """Uniform numbers [prompts·n, max_tokens], float64 on the CPU: row i·n+j belongs to completion j of prompt i."""
    rows = []
    for prompt in range(prompts):
        for completion in range(n):
            generator = torch.Generator().manual_seed(stream_seed(sampling.seed, prompt, completion))
            rows.append(torch.rand(sampling.max_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """The cuts that `sampling` asks for, in the field's usual order; temperature is applied before them."""
    chain = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


def next_tokens(
    logits: Tensor, sampling: Sampling, cuts: LogitsProcessorList, context: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: returns `(token_ids [B] int64, logprobs [B] float32)`.

    logits [B, V] of any float type, context [B, S] the ids so far (for the repetition penalty), uniform [B] in [0, 1).
    The draw inverts the cumulative distribution at `uniform`, so a row's token depends on its own logits and number
    only.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    logprobs = scaled.log_softmax(-1)
    cut: Tensor = cuts(context, scaled) if cuts else scaled  # type: ignore[arg-type]
    if sampling.temperature == 0:
        tokens = cut.argmax(-1)
    else:
        cumulative = cut.softmax(-1).double().cumsum(-1)
        target = (uniform * cumulative[:, -1])[:, None]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
