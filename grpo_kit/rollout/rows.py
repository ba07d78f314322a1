"""What every engine does with a completion while it grows: append a token, see whether it ended, hand it over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo_kit.rollout.engine import Completion, Sampling

STOP_TAIL_TOKENS = 16


@dataclass(eq=False)
class Row:
    """One completion while it grows. index: its place among all completions of the call."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class Endings:
    """Says when a completion ends. `decode` turns ids into text without special tokens."""

    def __init__(self, eos_ids: frozenset[int], decode: Callable[[list[int]], str]):
        self.eos_ids, self.decode = eos_ids, decode

    def append(self, row: Row, token: int, logprob: float, sampling: Sampling) -> None:
        """Give the row its next token; `row.finish_reason` says afterwards whether that was the last one."""
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        if token in self.eos_ids:
            row.finish_reason = "eos"
        elif sampling.stop and self._stops(row.token_ids, sampling.stop):
            row.finish_reason = "stop"
        elif len(row.token_ids) == sampling.max_tokens:
            row.finish_reason = "length"

    def completion(self, row: Row) -> Completion:
        return Completion(row.token_ids, row.logprobs, row.finish_reason, self.decode(row.token_ids))

    def _stops(self, token_ids: list[int], stop: Sequence[str]) -> bool:
        """Whether a stop string ended just now: looked for in the last tokens only, enough to hold the longest one."""
        opened = self.decode([])  # what decode puts in front of every answer was not sampled and stops nothing
        tail = self.decode(token_ids[-max(STOP_TAIL_TOKENS, *map(len, stop)) :])[len(opened) :]
        return any(text in tail for text in stop)
