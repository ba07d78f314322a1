"""The device's side of sampling: a cache, the state of every slot, and the token step over them.

Nothing here waits for the device. What was drawn comes back as a `Report`, which the host reads when it gets to it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_kit.rollout.engine import Sampling
from grpo_kit.rollout.native.cache import SlotCache
from grpo_kit.rollout.native.graphs import Graphs
from grpo_kit.rollout.native.prefill import Prefilled
from grpo_kit.rollout.native.sampler import Cuts, choose

LENGTH_STEP = 256


class TokenStep(Protocol):
    """One token for each row of a bucket of B ≤ slots rows."""

    def __call__(self, token_ids: Tensor, positions: Tensor, length: int, /) -> Tensor:
        """Logits [B, V]. token_ids, positions [B] int64: token b is written at column positions[b] of slot b and sees
        columns 0..positions[b], all of them below `length`. Must not wait for the device: a CUDA graph holds it."""

    def refresh(self) -> None:
        """Take over what was trained since, in place. Called at the start of each `generate`, outside of graphs."""


@dataclass
class Report:
    """What one launch drew, on its way to the host. numbers [2, rows]: tokens and logprobs."""

    numbers: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> tuple[list[int], list[float]]:
        """Waits until it is there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, logprobs = self.numbers.tolist()
        return [int(token) for token in tokens], logprobs


class Session:
    """State of `cache.slots` slots. A slot whose row has finished computes token 0 at position 0, which nobody reads.

    key: what the captured graphs depend on besides the cache (see `engine.weights_key`). wanted: the slots that the
    first call asked for; the cache has fewer where memory did not suffice.
    """

    def __init__(
        self,
        cache: SlotCache,
        step: TokenStep,
        eos_ids: Collection[int],
        key: tuple[Hashable, Hashable],
        wanted: int,
    ):
        self.cache, self.step, self.key, self.wanted = cache, step, key, wanted
        self.device, slots, columns = cache.shape.device, cache.slots, cache.columns
        self.graphs = Graphs(self.device)
        self.eos = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=self.device)
        self.rows = torch.arange(slots, device=self.device)
        self.columns = torch.arange(columns, device=self.device)
        # Of each slot: the token to feed next and its position, how many were drawn, whether the last one was.
        self.tokens, self.positions, self.drawn = (torch.zeros_like(self.rows) for _ in range(3))
        self.finished = torch.ones(slots, dtype=torch.bool, device=self.device)
        self.history = torch.zeros(slots, columns, dtype=torch.int64, device=self.device)
        self.uniform = torch.zeros(slots, columns, dtype=torch.float64, device=self.device)
        self.output = torch.zeros(2, slots, dtype=torch.float64, device=self.device)  # exact for ids below 2⁵³
        self.temperature = torch.ones((), device=self.device)
        self.max_tokens = torch.ones((), dtype=torch.int64, device=self.device)
        self.cuts = Cuts.of(Sampling(max_tokens=1))

    def fits(self, slots: int, columns: int) -> bool:
        """Whether a call that wants so many may use it: one with fewer slots if there was no room for more."""
        return self.cache.columns >= columns and max(self.cache.slots, self.wanted) >= slots

    def open(self, sampling: Sampling) -> None:
        """Begin a call: all slots are free, and the step computes with the adapter of this moment."""
        self.step.refresh()
        self.cuts = Cuts.of(sampling)
        self.temperature.fill_(sampling.temperature or 1.0)
        self.max_tokens.fill_(sampling.max_tokens)
        self._free(self.rows)

    def start(self, slots: Sequence[int], prompts: Sequence[list[int]], logits: Tensor, uniform: Tensor) -> Report:
        """Put rows in slots [k] whose prompts are in the cache already, and draw their first tokens.

        logits [k, V] after the prompts; uniform [k, max_tokens] on the host."""
        rows = self._to_device(torch.tensor(slots))
        longest = max(map(len, prompts))
        padded = [prompt + [prompt[0]] * (longest - len(prompt)) for prompt in prompts]
        context, numbers = self._to_device(torch.tensor(padded)), self._to_device(uniform)
        self.history[rows, :longest] = context
        self.uniform[rows, : numbers.shape[1]] = numbers
        tokens, logprobs = choose(logits, numbers[:, 0], self.temperature, self.cuts, context)
        done = self._is_eos(tokens) | (self.max_tokens == 1)
        self.tokens[rows] = tokens.masked_fill(done, 0)
        self.positions[rows] = self._to_device(torch.tensor([len(prompt) for prompt in prompts])).masked_fill(done, 0)
        self.drawn[rows] = 1
        self.finished[rows] = done
        return self._report(torch.stack([tokens.double(), logprobs.double()]))

    def advance(self, bucket: int, columns: int) -> Report:
        """One token for each of the first `bucket` slots, none of which is beyond `columns` columns."""
        length = min(-(-columns // LENGTH_STEP) * LENGTH_STEP, self.cache.columns)
        self.graphs.run(
            (bucket, length, self.cuts), lambda: self._draw(bucket, length), lambda: self._advance(bucket, length)
        )
        return self._report(self.output[:, :bucket])

    def stop(self, slot: int) -> None:
        """A row that the device believes to run has ended (a stop string): its slot is free."""
        self._free(self.rows[slot : slot + 1])

    def move(self, moves: list[tuple[int, int]], columns: int) -> None:
        """Copy slots, each (from, to), of which the first `columns` columns are used."""
        sources, targets = self._to_device(torch.tensor(moves)).unbind(1)
        self.cache.move(sources, targets, columns)
        for state in (self.tokens, self.positions, self.drawn, self.finished, self.history, self.uniform):
            state[targets] = state[sources]

    def write(self, slots: Sequence[int], prompt: Prefilled) -> None:
        """Put a prompt into the cache of each of these slots."""
        self.cache.write(self._to_device(torch.tensor(slots)), prompt.keys, prompt.values)

    def close(self) -> None:
        """Give all memory back; the session can't be used any more. What was launched ends first."""
        self.graphs.close()
        self.__dict__.clear()

    def _draw(self, bucket: int, length: int) -> tuple[Tensor, Tensor]:
        """The next tokens and logprobs [bucket]. Changes nothing that it would not write again, so it may run twice."""
        rows, tokens, positions = self.rows[:bucket], self.tokens[:bucket], self.positions[:bucket]
        self.history[rows, positions] = tokens
        context = self._context(positions, length) if self.cuts.needs_context else None
        logits = self.step(tokens, positions, length)
        uniform = self.uniform[rows, self.drawn[:bucket].clamp(max=self.uniform.shape[1] - 1)]
        return choose(logits, uniform, self.temperature, self.cuts, context)

    def _context(self, positions: Tensor, length: int) -> Tensor:
        """The ids [bucket, length] so far; what lies beyond a row's position is its first id, which it holds anyway."""
        history = self.history[: len(positions), :length]
        return torch.where(self.columns[:length] <= positions[:, None], history, history[:, :1])

    def _advance(self, bucket: int, length: int) -> None:
        tokens, logprobs = self._draw(bucket, length)
        self.output[0, :bucket] = tokens
        self.output[1, :bucket] = logprobs
        self.drawn[:bucket] += 1
        self.finished[:bucket] |= self._is_eos(tokens) | (self.drawn[:bucket] >= self.max_tokens)
        done = self.finished[:bucket]
        self.tokens[:bucket] = tokens.masked_fill(done, 0)
        self.positions[:bucket] = (self.positions[:bucket] + 1).masked_fill(done, 0)

    def _is_eos(self, tokens: Tensor) -> Tensor:
        return (tokens[:, None] == self.eos).any(-1)

    def _free(self, rows: Tensor) -> None:
        self.tokens[rows], self.positions[rows] = 0, 0
        self.finished[rows] = True

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Without waiting: from pinned memory, which the allocator keeps until the copy is done."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _report(self, numbers: Tensor) -> Report:
        if self.device.type != "cuda":
            return Report(numbers.clone(), None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(torch.cuda.current_stream(self.device))
        return Report(host, arrived)
