"""vLLM's engine in this process: the few things that are asked of it, and where in it they are found."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from grpo_kit.rollout.vllm.cache import KvCache
from grpo_kit.rollout.vllm.requests import Delta, deltas
from grpo_kit.rollout.vllm.weights import SharedWeights


@dataclass(frozen=True)
class Words:
    """What vLLM wants to be spoken to in: parameters(**arguments) and prompt(ids) of a request, and the adapter's."""

    parameters: Callable[..., Any]
    prompt: Callable[[list[int]], Any]
    adapter: Any


class Vllm:
    """llm: vLLM's LLMEngine, without processes of its own. stream: on which all of it runs; None without a GPU."""

    def __init__(self, llm: Any, words: Words, cache: KvCache, stream: torch.cuda.Stream | None = None):
        self._llm, self._words, self.cache, self._stream = llm, words, cache, stream
        self._asked = 0

    @property
    def longest(self) -> int:
        """Tokens of prompt and completion together."""
        tokens: int = self._llm.vllm_config.model_config.max_model_len
        return tokens

    @property
    def module(self) -> Any:
        return self._llm.model_executor.driver_worker.model_runner.model

    def weights(self) -> SharedWeights:
        return SharedWeights(self.module, self.joined)

    @property
    def joined(self) -> dict[str, list[str]]:
        """The parts of its joined layers, by the name of the whole."""
        names: dict[str, list[str]] = self.module.packed_modules_mapping
        return names

    def layers_with_lora(self) -> dict[str, Any]:
        return {name: layer for name, layer in self.module.named_modules() if hasattr(layer, "lora_a_stacked")}

    # ---- sampling; within a turn ----

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within the block vLLM may work: after all that this thread has launched, and before all that it will.

        vLLM would otherwise take a new stream in each thread that calls it, and leave the thread on that stream.
        """
        if self._stream is None:
            yield
            return
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    @contextmanager
    def logits_divided_by(self, temperature: float) -> Iterator[None]:
        """All that is sampled within the block."""
        processor = self.module.logits_processor
        own = processor.scale
        processor.scale = own / temperature
        try:
            yield
        finally:
            processor.scale = own

    def ask(self, prompt_ids: list[int], arguments: dict[str, Any], adapter: bool) -> str:
        """A request for one completion, with or without the adapter; returns the name that its outputs will have."""
        self._asked += 1
        name = str(self._asked)
        lora = self._words.adapter if adapter else None
        parameters = self._words.parameters(**arguments)
        self._llm.add_request(name, self._words.prompt(prompt_ids), parameters, lora_request=lora)
        return name

    @property
    def busy(self) -> bool:
        return bool(self._llm.has_unfinished_requests())

    def step(self) -> list[Delta]:
        """One token step, or a part of the prompts. vLLM launches a step before it hands over the one before."""
        return list(deltas(self._llm.step()))

    def abort(self, requests: list[str]) -> None:
        if requests:
            self._llm.abort_request(requests)

    def settle(self) -> None:
        """Take in what was launched for requests that are over; then nothing of vLLM's is under way."""
        core = self._llm.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            self._llm.step()

    def forget_prompts(self) -> None:
        """Keys and values of earlier calls are of an earlier adapter, and would make equal calls differ in rounding."""
        self._llm.reset_prefix_cache()

    # ---- the end ----

    def close(self) -> None:
        """Give back all memory. Whatever shared the weights must be gone."""
        self.cache.acquire()  # memory that is not mapped can't be freed
        self._llm.engine_core.shutdown()
        del self._llm, self.cache
        gc.collect()
