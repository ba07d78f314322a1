"""The vLLM engine: continuous batching, paged attention and CUDA graphs by vLLM, on the weights that are trained.

The base weights exist once (the trainer's are views of vLLM's), the adapter is written into vLLM's LoRA before the
first sampling after an update, and the cache can be given back between. What ends a completion, and what its logprobs
are of, is as with every other engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from peft import PeftModel

from grpo_kit.rollout.engine import Completion, OnTokens, Sampling
from grpo_kit.rollout.forward import check_prompts
from grpo_kit.rollout.rows import Endings, Row
from grpo_kit.rollout.vllm import adapter
from grpo_kit.rollout.vllm.process import Vllm
from grpo_kit.rollout.vllm.requests import sampling_arguments


class VllmEngine:
    """See `Engine`. `module` is the trainer's, with an adapter on vLLM's weights; `decode` turns ids into text without
    special tokens.

    Raises ValueError where vLLM has no place for a part of the adapter.
    """

    name = "vllm"

    def __init__(self, module: PeftModel, vllm: Vllm, *, eos_ids: Collection[int], decode: Callable[[list[int]], str]):
        self.module, self.vllm, self.eos_ids = module, vllm, frozenset(eos_ids)
        self.endings = Endings(self.eos_ids, decode)
        self._pairs = adapter.pairs(module, vllm.layers_with_lora(), vllm.joined)
        self._written = False

    def adapter_changed(self) -> None:
        """It is written when next sampled with."""
        self._written = False

    @property
    def holds_memory(self) -> bool:
        return self.vllm.cache.held

    def acquire(self) -> None:
        """Take the cache's memory. Raises torch.OutOfMemoryError where there is none."""
        self.vllm.cache.acquire()

    def release(self) -> None:
        """Give the cache's memory back to the driver; weights, adapter and graphs stay."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.vllm.cache.release()

    def generate(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int = 1,
        between_tokens: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`, of which one thing does not hold: vLLM's LoRA kernels sum in an order that varies, and
        an answer drawn with the same seed may take another turn where two tokens are nearly as likely."""
        check_prompts(prompt_ids, n)
        longest = max(map(len, prompt_ids)) + sampling.max_tokens
        if longest > self.vllm.longest:
            raise ValueError(f"prompt and completion may have {self.vllm.longest} tokens together, not {longest}")
        self.acquire()
        with self.vllm.turn():
            if not self._written:
                self.write_adapter()
            self.vllm.forget_prompts()
            with self.vllm.logits_divided_by(sampling.temperature or 1.0):
                rows = self._sample(prompt_ids, sampling, n, between_tokens, on_tokens)
        done = [self.endings.completion(row) for row in rows]
        return [done[start : start + n] for start in range(0, len(done), n)]

    def write_adapter(self) -> None:
        """Into vLLM's tensors, as it is now; `generate` does it by itself after a change."""
        adapter.write(self._pairs)
        self._written = True

    def _sample(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int,
        between_tokens: Callable[[], None] | None,
        on_tokens: OnTokens | None,
    ) -> list[Row]:
        with_adapter = adapter.is_on(self.module)
        rows = [Row(index) for index in range(len(prompt_ids) * n)]
        asked: dict[str, Row] = {}
        try:
            for row in rows:
                arguments = sampling_arguments(sampling, row.index // n, row.index % n, self.eos_ids)
                asked[self.vllm.ask(prompt_ids[row.index // n], arguments, with_adapter)] = row
            while self.vllm.busy:
                self._take_in(asked, sampling)
                if on_tokens is not None:
                    on_tokens([row.token_ids for row in rows])
                if between_tokens is not None and self.vllm.busy:
                    between_tokens()
        finally:
            self.vllm.abort([name for name, row in asked.items() if not row.finish_reason])
            self.vllm.settle()
        return rows

    def _take_in(self, asked: dict[str, Row], sampling: Sampling) -> None:
        """Of one step. A stop string ends a completion here, at the token that ended it, and then its request."""
        for delta in self.vllm.step():
            row = asked[delta.request]
            for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True):
                if not row.finish_reason:
                    self.endings.append(row, token, logprob, sampling)
            if row.finish_reason == "stop":
                self.vllm.abort([delta.request])
