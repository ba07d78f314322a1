"""The native engine: samples with the training model's own modules, many rows at a time, by CUDA graphs.

It holds no weights of its own, so the adapter it samples with is always the current one. Rows are slots of one cache;
as completions end, waiting ones take their slots, and at the end the rows left are moved together. On a GPU the host
launches a token step before it looks at what the one before drew, so that the device never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from grpo_kit.rollout.engine import Completion, OnTokens, Sampling
from grpo_kit.rollout.forward import check_prompts
from grpo_kit.rollout.native.cache import CacheShape, SlotCache, columns_for, slots_within
from grpo_kit.rollout.native.generation import Generation
from grpo_kit.rollout.native.module_step import ModuleStep
from grpo_kit.rollout.native.session import Session, TokenStep
from grpo_kit.rollout.native.slots import bucket_for
from grpo_kit.rollout.native.support import examine
from grpo_kit.rollout.rows import Endings

SHARE_OF_FREE = 0.5  # of a GPU's memory; the rest is for prefills, graphs and the questions asked meanwhile
CPU_BYTES = 10**9


class NativeEngine:
    """See `Engine`. `module` is a causal language model (a peft one too), `decode` turns ids into text without
    special tokens.

    fused:       makes a faster token step than `ModuleStep` for a cache, or None where it can't. It is asked anew
                 when the adapter is switched on or off, or weights move.
    cache_bytes: the most that keys and values may take; half of the GPU's free memory, or 1 GB on a CPU, if not given.
    shape:       what `support.examine` found, which is asked now if not given.
    kv_cache_dtype: "int8" holds keys and values in 8 bits (see `Int8Tokens`); None in the compute format.

    Raises NotSupported, a ValueError, if the module is of a kind that this engine can't run.
    """

    name = "native"

    def __init__(
        self,
        module: PreTrainedModel | PeftModel,
        *,
        eos_ids: Collection[int],
        decode: Callable[[list[int]], str],
        fused: Callable[[SlotCache], TokenStep | None] | None = None,
        cache_bytes: int | None = None,
        shape: CacheShape | None = None,
        kv_cache_dtype: str | None = None,
    ):
        found = examine(module) if shape is None else shape
        self.shape = replace(found, int8=kv_cache_dtype == "int8")
        self.module, self.eos_ids, self.fused, self.cache_bytes = module, frozenset(eos_ids), fused, cache_bytes
        self.endings = Endings(self.eos_ids, decode)
        self.steps_ahead = 1 if self.shape.device.type == "cuda" else 0
        self._idle: list[Session] = []
        self._taken_bytes = 0  # by the caches of all sessions, idle ones included

    def adapter_changed(self) -> None:
        """Nothing to do: the adapter sampled with is the one trained."""

    def acquire(self) -> None:
        """Nothing to take in advance: `generate` takes what its prompts need."""

    @property
    def holds_memory(self) -> bool:
        return bool(self._idle)

    def release(self) -> None:
        """Give back the caches and graphs of all calls that have ended."""
        if not self._idle:
            return
        self._close_idle(lambda idle: True)
        if self.shape.device.type == "cuda":
            torch.cuda.empty_cache()  # a graph's memory is of use to no one else until it goes back to the driver

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int = 1,
        between_tokens: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`. Raises ValueError if the cache may not be large enough for a single completion, and
        torch.OutOfMemoryError, after which all of the engine's memory is given back."""
        check_prompts(prompt_ids, n)
        self.module.eval()
        done = self._sample(prompt_ids, sampling, n, between_tokens, on_tokens)
        if not isinstance(done, str):
            return done
        # Not raised where it was caught: the error's frames hold tensors, and would for as long as it is handled.
        self.release()
        raise torch.OutOfMemoryError(
            f"the GPU's memory did not suffice to sample {len(prompt_ids) * n} completions of up to "
            f"{sampling.max_tokens} tokens; fewer generations, shorter completions or prompts need less ({done})"
        )

    def _sample(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int,
        between_tokens: Callable[[], None] | None,
        on_tokens: OnTokens | None,
    ) -> list[list[Completion]] | str:
        """The completions or, without memory, what was said of it."""
        session = None
        try:
            session = self._session(len(prompt_ids) * n, columns_for(max(map(len, prompt_ids)) + sampling.max_tokens))
            generation = Generation(session, self.module, self.endings, self.steps_ahead, prompt_ids, sampling, n)
            return generation.run(between_tokens, on_tokens)
        except torch.OutOfMemoryError as error:
            return str(error)
        finally:
            if session is not None:
                self._idle.append(session)

    def _session(self, rows: int, columns: int) -> Session:
        """The smallest idle one that fits, or a new one. Idle ones that a new one makes superfluous go, and those whose
        weights are no longer where they were."""
        key, wanted = weights_key(self.module), bucket_for(rows)
        self._close_idle(lambda idle: idle.key[1] != key[1])
        fitting = [idle for idle in self._idle if idle.key == key and idle.fits(wanted, columns)]
        if fitting:
            session = min(fitting, key=lambda idle: idle.cache.bytes)
            self._idle.remove(session)
            return session
        self._close_idle(lambda idle: idle.key == key and idle.cache.slots <= wanted and idle.cache.columns <= columns)
        if slots_within(self.shape, columns, self._limit(), wanted) < wanted:
            self.release()
        slots = slots_within(self.shape, columns, self._limit(), wanted)
        if slots == 0:
            raise ValueError(
                f"the cache of one completion of up to {columns} tokens takes "
                f"{self.shape.bytes_for(columns) / 1e6:.1f} MB, and sampling may take "
                f"{max(self._limit(), 0) / 1e6:.1f} MB: lower the length of the completions or of the prompts"
            )
        cache = SlotCache(self.shape, slots, columns)
        step = self.fused(cache) if self.fused is not None else None
        self._taken_bytes += cache.bytes  # no sooner: a step whose weights find no memory leaves no session behind
        return Session(cache, step or ModuleStep(self.module, cache), self.eos_ids, key, wanted)

    def _limit(self) -> int:
        """Bytes that a new cache may take."""
        device = self.shape.device
        if self.cache_bytes is not None or device.type != "cuda":
            return (CPU_BYTES if self.cache_bytes is None else self.cache_bytes) - self._taken_bytes
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(SHARE_OF_FREE * (free + unused))

    def _close_idle(self, superfluous: Callable[[Session], bool]) -> None:
        for session in [idle for idle in self._idle if superfluous(idle)]:
            self._idle.remove(session)
            self._close(session)

    def _close(self, session: Session) -> None:
        self._taken_bytes -= session.cache.bytes
        session.close()


def weights_key(module: Any) -> tuple[Hashable, Hashable]:
    """What a captured graph holds of the module: which adapters are on with what scale, and where its weights lie."""
    adapters = {
        (layer.disable_adapters, tuple(layer.active_adapters), layer.merged, tuple(layer.scaling.values()))
        for layer in module.modules()
        if isinstance(layer, LoraLayer)
    }
    return frozenset(adapters), tuple(weight.data_ptr() for weight in module.parameters())
