"""The device's state: what a warm-up may do, and that what a finished row computes stays in its own slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kit.rollout import Sampling
from grpo_kit.rollout.native.cache import SlotCache
from grpo_kit.rollout.native.graphs import Graphs
from grpo_kit.rollout.native.module_step import ModuleStep
from grpo_kit.rollout.native.prefill import prefill
from grpo_kit.rollout.native.session import Session
from grpo_kit.rollout.native.support import examine

PROMPTS = [[5, 60, 200], [7], [9, 9, 120, 4]]


def state(session: Session) -> list[torch.Tensor]:
    tensors = [value for value in vars(session).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 10
    return [tensor.clone() for tensor in (*tensors, *session.cache.keys, *session.cache.values)]


@pytest.fixture
@torch.no_grad()
def session(load: Callable[..., Any]) -> Session:
    """Three rows that have drawn one token each, in four slots."""
    module = load("llama")
    cache = SlotCache(examine(module), 4, 64)
    session = Session(cache, ModuleStep(module, cache), eos_ids=(300,), key=("on", "here"), wanted=cache.slots)
    session.open(Sampling(max_tokens=4, repetition_penalty=1.2))
    done = prefill(module, PROMPTS)
    for slot, prompt in enumerate(done):
        session.write([slot], prompt)
    uniform = torch.rand(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    session.start([0, 1, 2], PROMPTS, torch.stack([one.logits for one in done]), uniform)
    return session


@torch.no_grad()
def test_a_step_that_warms_up_changes_nothing_that_the_real_one_starts_from(session: Session) -> None:
    first = session._draw(4, 64)
    before = state(session)
    again = session._draw(4, 64)
    assert all(torch.equal(new, old) for new, old in zip(state(session), before, strict=True))
    assert all(torch.equal(new, old) for new, old in zip(again, first, strict=True))
    tokens, logprobs = session.advance(4, 5).read()
    assert tokens[:3] == first[0].tolist()[:3] and logprobs == first[1].tolist()


@torch.no_grad()
def test_the_device_ends_rows_by_itself(session: Session) -> None:
    assert session.finished.tolist() == [False, False, False, True]
    for _ in range(2):
        session.advance(4, 7)
    assert session.finished.tolist() == [False, False, False, True]
    assert session.positions.tolist() == [5, 3, 6, 0]
    session.advance(4, 7)
    assert session.finished.all()
    assert session.positions.tolist() == session.tokens.tolist() == [0] * 4
    before = state(session)
    session.advance(4, 64)
    used = [tensor[:, :, 1:] for tensor in (*session.cache.keys, *session.cache.values)]
    old = [tensor[:, :, 1:] for tensor in before[-len(used) :]]
    assert all(torch.equal(new, was) for new, was in zip(used, old, strict=True))  # only column 0 is written


@torch.no_grad()
def test_a_row_that_the_host_ends_is_finished_on_the_device(session: Session) -> None:
    session.stop(1)
    assert session.finished.tolist() == [False, True, False, True]
    assert session.positions[1] == session.tokens[1] == 0


def test_without_a_gpu_a_step_is_simply_called() -> None:
    calls: list[str] = []
    graphs = Graphs(torch.device("cpu"))
    for _ in range(2):
        graphs.run("key", lambda: calls.append("warm up"), lambda: calls.append("step"))
    graphs.close()
    assert calls == ["step", "step"]
