"""The engine that always works: the training model's own forward pass with a transformers cache, on any device.

It holds no weights of its own, so the adapter it samples with is always the current one. It is not fast on a GPU: every
token step launches every operation of the model one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from grpo_kit.rollout.engine import Completion, OnTokens, Sampling
from grpo_kit.rollout.forward import check_prompts, last_logits, left_padded
from grpo_kit.rollout.rows import Endings, Row
from grpo_kit.rollout.sampling import next_tokens, random_streams, warpers


class TransformersEngine:
    """See `Engine`. `module` is a causal language model (a peft one too), `decode` turns ids into text without
    special tokens."""

    name = "transformers"
    holds_memory = False

    def __init__(
        self,
        module: PreTrainedModel | PeftModel,
        *,
        eos_ids: Collection[int],
        decode: Callable[[list[int]], str],
    ):
        self.module, self.eos_ids = module, frozenset(eos_ids)
        self.endings = Endings(self.eos_ids, decode)

    def adapter_changed(self) -> None:
        """Nothing to do: the adapter sampled with is the one trained."""

    def acquire(self) -> None:
        """Nothing to take: the cache lives inside `generate`."""

    def release(self) -> None:
        """Nothing to give back: the cache lives inside `generate`."""

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int = 1,
        between_tokens: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        check_prompts(prompt_ids, n)
        self.module.eval()
        ids, mask = left_padded(prompt_ids, next(self.module.parameters()).device)
        logits, cache = self._prefill(ids, mask, n)
        ids, mask = ids.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)  # [B, S], B = prompts·n
        uniform = random_streams(len(prompt_ids), n, sampling).to(ids.device)
        cuts = warpers(sampling)
        rows = [Row(index) for index in range(len(ids))]
        active = list(rows)
        for step in range(sampling.max_tokens):
            tokens, logprobs = next_tokens(logits, sampling, cuts, ids, uniform[[row.index for row in active], step])
            for row, token, logprob in zip(active, tokens.tolist(), logprobs.tolist(), strict=True):
                self.endings.append(row, token, logprob, sampling)
            if on_tokens is not None:
                on_tokens([row.token_ids for row in rows])
            keep = [i for i, row in enumerate(active) if not row.finish_reason]
            if not keep:
                break
            ids, mask = torch.cat([ids, tokens[:, None]], 1), torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            if len(keep) < len(active):  # finished rows leave: each one costs as much as a live one
                chosen = torch.tensor(keep, device=ids.device)
                cache.batch_select_indices(chosen)
                ids, mask, active = ids[chosen], mask[chosen], [active[i] for i in keep]
            if between_tokens is not None:
                between_tokens()
            logits = last_logits(self.module, ids[:, -1:], mask, cache)
        done = [self.endings.completion(row) for row in rows]
        return [done[start : start + n] for start in range(0, len(done), n)]

    def _prefill(self, ids: Tensor, mask: Tensor, n: int) -> tuple[Tensor, DynamicCache]:
        """Run each prompt once and copy its cache n times: logits [P·n, V] of the next token, and the cache."""
        cache = DynamicCache(config=self.module.config)
        logits = last_logits(self.module, ids, mask, cache)
        if n > 1:
            cache.batch_repeat_interleave(n)
            logits = logits.repeat_interleave(n, 0)
        return logits, cache
