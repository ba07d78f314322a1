"""What the tests of training share: quick options, a reward, an engine that can be watched, and ways to compare."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from grpo_kit.model import Model
from grpo_kit.rollout import Completion, Engine, OnTokens, Sampling
from grpo_kit.training import Run
from grpo_kit.training.batch import Sequence

QUICK: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 2,
    "num_generations": 3,
    "max_completion_length": 6,
    "learning_rate": 1e-3,
    "tokens_per_micro_batch": 64,
}


SOON = 60  # seconds: a limit for what takes far less, on a busy machine too


def until(condition: Callable[[], object]) -> None:
    """Wait for something that the training thread does."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def drawn_sequences(lengths: list[tuple[int, int]], seed: int, untrained: tuple[int, ...] = ()) -> list[Sequence]:
    """Random tokens, one sequence for each (tokens of the prompt, of the completion); the engine gave each e⁻¹."""
    rng = random.Random(seed)
    return [
        Sequence(
            [rng.randrange(256) for _ in range(prompt)],
            Completion([rng.randrange(256) for _ in range(tokens)], [-1.0] * tokens, "eos", ""),
            trained=place not in untrained,
        )
        for place, (prompt, tokens) in enumerate(lengths)
    ]


def letters(completion: str) -> float:
    """Varies between any two answers, and means nothing."""
    return sum(map(ord, completion)) % 101 / 101


class WatchedEngine:
    """An engine that calls `on_token(step, token)`, both from 1, before each pause point between a step's tokens."""

    def __init__(self, engine: Engine):
        self.engine, self.name = engine, engine.name
        self.on_token: Callable[[int, int], None] = lambda step, token: None
        self.step = 0

    def generate(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int = 1,
        between_tokens: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        if between_tokens is None:  # a question, not a rollout
            return self.engine.generate(prompt_ids, sampling, n, None, on_tokens)
        self.step += 1
        token = 0

        def watched() -> None:
            nonlocal token
            token += 1
            self.on_token(self.step, token)
            between_tokens()

        return self.engine.generate(prompt_ids, sampling, n, watched, on_tokens)

    def adapter_changed(self) -> None:
        self.engine.adapter_changed()

    def acquire(self) -> None:
        self.engine.acquire()

    @property
    def holds_memory(self) -> bool:
        return self.engine.holds_memory

    def release(self) -> None:
        self.engine.release()


class DrawnEngine:
    """Answers of 5 to 8 tokens that depend on the seed and the prompt alone, not on what the model has learned; their
    text is those ids. Their logprobs are drawn too with `tells`, and else not told: a run gives up a sampler whose
    logprobs are not the model's. `before(asked)`, from 1, is called at each rollout."""

    name = "drawn"
    holds_memory = False

    def __init__(self, tells: bool = False) -> None:
        self.tells = tells
        self.before: Callable[[int], None] = lambda asked: None
        self.asked = 0

    def generate(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int = 1,
        between_tokens: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        self.asked += 1
        self.before(self.asked)
        if between_tokens is not None:
            between_tokens()
        return [[self._answer(prompt, sampling, i) for i in range(n)] for prompt in prompt_ids]

    def _answer(self, prompt: list[int], sampling: Sampling, number: int) -> Completion:
        rng = random.Random(f"{sampling.seed} {prompt} {number}")
        ids = [rng.randrange(256) for _ in range(rng.randint(5, 8))]
        reason = "length" if len(ids) == 8 else "eos"
        logprobs = [-rng.uniform(1, 5) if self.tells else math.nan for _ in ids]
        return Completion(ids, logprobs, reason, " ".join(map(str, ids)))

    def adapter_changed(self) -> None:
        pass


def adapter(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.trainable().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.record.events() if event["kind"] == kind]


NOT_THE_SAME_TWICE = ("time", "seconds", "seconds_rollout", "seconds_reward", "seconds_update")


def numbers(run: Run) -> list[dict[str, Any]]:
    """All metrics but the times."""
    return [{k: v for k, v in row.items() if k not in NOT_THE_SAME_TWICE} for row in run.record.steps()]
