"""The contract of every engine that samples completions, and what passes through it.

An engine is handed torch modules and token ids; it knows no chat template, no reward and no training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How to draw completions. `temperature=0` takes the likeliest token each time.

    The same seed gives the same completions, whatever else the process draws: completion j of prompt i has a random
    stream of its own. stop: the strings that end a completion; one alone may be given as it is.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not all(self.stop):
            raise ValueError("an empty stop string would end every completion at once")
        limits = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 is off)"),
        }
        for name, (ok, words) in limits.items():
            if not ok:
                raise ValueError(f"{name} must be {words}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    token_ids:     the sampled ids [T], the end-of-sequence id included when there is one.
    logprobs:      [T], nats, of those tokens under softmax(logits / temperature), before top-p and its like cut it:
                   what the trainer computes for the same tokens. Under greedy sampling the temperature counts as 1.
    finish_reason: "eos", "stop" (a stop string) or "length" (max_tokens was reached first).
    text:          the decoded tokens without special ones.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str


OnTokens = Callable[[list[list[int]]], None]  # the token ids of each completion so far


class Engine(Protocol):
    """What training and `model.generate` ask of an engine."""

    name: str

    def generate(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int = 1,
        between_tokens: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        """Draw `n` completions of each prompt with the current adapter.

        `between_tokens` is called after every token step and may block (a pause) or raise (a stop); whatever it raises
        passes through and leaves the engine usable.

        `on_tokens(rows)` is called when there are more tokens, after each token step or after a few: rows[i·n + j] are
        those of completion j of prompt i so far, in lists that the engine goes on filling. What it raises passes
        through likewise. The last tokens need not be told: they are in what is returned.
        """

    def adapter_changed(self) -> None:
        """Called after each optimizer step, before the next `generate`."""

    def acquire(self) -> None:
        """Take the memory that only sampling needs; `generate` does it by itself."""

    @property
    def holds_memory(self) -> bool:
        """Whether `release` has something to give back."""

    def release(self) -> None:
        """Give that memory back for the training phase."""


def stream_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
