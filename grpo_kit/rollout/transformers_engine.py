"""The engine that always works: the training model's own forward pass with a transformers cache, on any device.

It holds no weights of its own, so the adapter it samples with is always the current one. It is not fast on a GPU: every
token step launches every operation of the model one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from grpo_kit.rollout.engine import Completion, OnTokens, Sampling
from grpo_kit.rollout.sampling import next_tokens, random_streams, warpers

STOP_TAIL_TOKENS = 16


@dataclass
class _Row:
    """One completion while it grows."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class TransformersEngine:
    """See `Engine`. `module` is a causal language model (a peft one too), `decode` turns ids into text without
    special tokens."""

    name = "transformers"

    def __init__(
        self,
        module: PreTrainedModel | PeftModel,
        *,
        eos_ids: Collection[int],
        decode: Callable[[list[int]], str],
    ):
        self.module, self.eos_ids, self.decode = module, frozenset(eos_ids), decode

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
        if not prompt_ids or not all(prompt_ids):
            raise ValueError("generate needs at least one prompt, and every prompt at least one token")
        self.module.eval()
        ids, mask = self._left_padded(prompt_ids)
        logits, cache = self._prefill(ids, mask, n)
        ids, mask = ids.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)  # [B, S], B = prompts·n
        uniform = random_streams(len(prompt_ids), n, sampling).to(ids.device)
        cuts = warpers(sampling)
        rows = [_Row(index) for index in range(len(ids))]
        active = list(rows)
        for step in range(sampling.max_tokens):
            tokens, logprobs = next_tokens(logits, sampling, cuts, ids, uniform[[row.index for row in active], step])
            self._append(active, tokens, logprobs, sampling)
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
            logits = self._forward(ids[:, -1:], mask, cache)
        done = [self._finished(row) for row in rows]
        return [done[start : start + n] for start in range(0, len(done), n)]

    def _left_padded(self, prompt_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask [P, S], filled up on the left so that every prompt ends in the last column.

        The filling is the prompt's own first id: the repetition penalty looks at ids, not at the mask, and must not
        punish a token (the end, where it is the pad too) that the prompt does not hold.
        """
        longest = max(map(len, prompt_ids))
        device = next(self.module.parameters()).device
        ids = torch.empty(len(prompt_ids), longest, dtype=torch.int64, device=device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompt_ids):
            ids[row, : longest - len(prompt)] = prompt[0]
            ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=device)
            mask[row, longest - len(prompt) :] = 1
        return ids, mask

    def _prefill(self, ids: Tensor, mask: Tensor, n: int) -> tuple[Tensor, DynamicCache]:
        """Run each prompt once and copy its cache n times: logits [P·n, V] of the next token, and the cache."""
        cache = DynamicCache(config=self.module.config)
        logits = self._forward(ids, mask, cache)
        if n > 1:
            cache.batch_repeat_interleave(n)
            logits = logits.repeat_interleave(n, 0)
        return logits, cache

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [B, V] after the last column. ids [B, t] new tokens, mask [B, S] over everything so far."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _append(self, active: list[_Row], tokens: Tensor, logprobs: Tensor, sampling: Sampling) -> None:
        for row, token, logprob in zip(active, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            if token in self.eos_ids:
                row.finish_reason = "eos"
            elif sampling.stop and self._stops(row.token_ids, sampling.stop):
                row.finish_reason = "stop"
            elif len(row.token_ids) == sampling.max_tokens:
                row.finish_reason = "length"

    def _stops(self, token_ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether a stop string ended just now: looked for in the last tokens only, enough to hold the longest one."""
        opened = self.decode([])  # what decode puts in front of every answer was not sampled and stops nothing
        tail = self.decode(token_ids[-max(STOP_TAIL_TOKENS, *map(len, stop)) :])[len(opened) :]
        return any(text in tail for text in stop)

    def _finished(self, row: _Row) -> Completion:
        return Completion(row.token_ids, row.logprobs, row.finish_reason, self.decode(row.token_ids))
