"""The host's side of one `generate`: which completions are in which slots, what was drawn for them, when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_kit.rollout.engine import Completion, OnTokens, Sampling
from grpo_kit.rollout.native.prefill import Prefilled, chunks, prefill
from grpo_kit.rollout.native.session import Report, Session
from grpo_kit.rollout.native.slots import Slots, bucket_for
from grpo_kit.rollout.rows import Endings, Row
from grpo_kit.rollout.sampling import random_streams


@dataclass(eq=False)
class SlotRow(Row):
    """prompt: the place of its prompt in the call, and its ids. slot: where it is while it grows. launched: tokens
    drawn, those that the host has not seen yet included."""

    prompt: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    slot: int = -1
    launched: int = 0

    @property
    def columns(self) -> int:
        """What the next token step needs: its last token goes to the last of these columns."""
        return len(self.prompt_ids) + self.launched


class Generation:
    """Runs one call on a session. steps_ahead: how many launches the host may be behind the device."""

    def __init__(
        self,
        session: Session,
        module: Any,
        endings: Endings,
        steps_ahead: int,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int,
    ):
        self.session, self.module, self.endings, self.steps_ahead = session, module, endings, steps_ahead
        self.prompt_ids, self.sampling, self.n = prompt_ids, sampling, n
        self.uniform = random_streams(len(prompt_ids), n, sampling)
        self.rows = [SlotRow(i, prompt=i // n, prompt_ids=prompt_ids[i // n]) for i in range(len(prompt_ids) * n)]
        self.waiting = deque(self.rows)
        self.slots: Slots[SlotRow] = Slots(min(session.cache.slots, bucket_for(len(self.rows))))
        self.pending: deque[tuple[list[tuple[int, SlotRow]], Report]] = deque()  # (place in the report, row)
        self.partly: dict[int, Prefilled] = {}  # the prompt some of whose completions have not started

    def run(
        self, between_tokens: Callable[[], None] | None, on_tokens: OnTokens | None = None
    ) -> list[list[Completion]]:
        self.session.open(self.sampling)
        while True:
            more = self._take_in()
            if on_tokens is not None:
                on_tokens([row.token_ids for row in self.rows])
            if not more:
                break
            self._refill()
            self._shrink()
            running = self._running()
            if running:
                if between_tokens is not None:
                    between_tokens()
                self._launch(running)
        done = [self.endings.completion(row) for row in self.rows]
        return [done[start : start + self.n] for start in range(0, len(done), self.n)]

    def _running(self) -> list[SlotRow]:
        """Rows that need another token."""
        return [row for _, row in self.slots.taken() if row.launched < self.sampling.max_tokens]

    def _launch(self, running: list[SlotRow]) -> None:
        report = self.session.advance(self.slots.bucket, max(row.columns for row in running))
        self._launched(report, [(row.slot, row) for row in running])

    def _launched(self, report: Report, rows: list[tuple[int, SlotRow]]) -> None:
        for _, row in rows:
            row.launched += 1
        self.pending.append((rows, report))

    def _take_in(self) -> bool:
        """Give the rows what was drawn for them, and free the slots of those that ended. False when all have."""
        behind = self.steps_ahead if self._running() else 0
        while len(self.pending) > behind:
            drawn_for, report = self.pending.popleft()
            tokens, logprobs = report.read()
            for place, row in drawn_for:
                if not row.finish_reason:  # else it was drawn before the host knew that the row had ended
                    self._append(row, tokens[place], logprobs[place])
        return bool(self.waiting or len(self.slots))

    def _append(self, row: SlotRow, token: int, logprob: float) -> None:
        self.endings.append(row, token, logprob, self.sampling)
        if row.finish_reason:
            self.slots.leave(row.slot)
        if row.finish_reason == "stop":
            self.session.stop(row.slot)

    def _shrink(self) -> None:
        if self.waiting:
            return
        moves = self.slots.shrink()
        if moves:
            for slot, row in self.slots.taken():
                row.slot = slot
            self.session.move(moves, max(row.columns for _, row in self.slots.taken()))

    def _refill(self) -> None:
        starting = [self.waiting.popleft() for _ in range(self.slots.due(len(self.waiting)))]
        if not starting:
            return
        for slot, row in zip(self.slots.free(), starting, strict=False):
            row.slot = slot
            self.slots.take(slot, row)
        self._start([row for row in starting if row.prompt in self.partly], self.partly)
        new = list(dict.fromkeys(row.prompt for row in starting if row.prompt not in self.partly))
        self.partly = {prompt: done for prompt, done in self.partly.items() if self._waits(prompt)}
        for chunk in chunks([len(self.prompt_ids[prompt]) for prompt in new]):
            prompts = [new[i] for i in chunk]
            done = dict(zip(prompts, prefill(self.module, [self.prompt_ids[p] for p in prompts]), strict=True))
            self._start([row for row in starting if row.prompt in done], done)
            self.partly.update({prompt: done[prompt].alone() for prompt in prompts if self._waits(prompt)})

    def _waits(self, prompt: int) -> bool:
        """Whether completions of this prompt have not started: rows start in order."""
        return bool(self.waiting) and self.waiting[0].prompt == prompt

    def _start(self, rows: list[SlotRow], done: dict[int, Prefilled]) -> None:
        """Copy the prompts to the rows' slots and draw their first tokens."""
        if not rows:
            return
        for prompt in dict.fromkeys(row.prompt for row in rows):
            self.session.write([row.slot for row in rows if row.prompt == prompt], done[prompt])
        logits = torch.stack([done[row.prompt].logits for row in rows])
        uniform = self.uniform[[row.index for row in rows]]
        report = self.session.start([row.slot for row in rows], [row.prompt_ids for row in rows], logits, uniform)
        self._launched(report, list(enumerate(rows)))
