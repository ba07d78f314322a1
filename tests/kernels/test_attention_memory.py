"""Attention is computed once for two passes, and nothing is held that the second one has anyway."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_kit.kernels import attention_memory
from grpo_kit.kernels.attention_memory import Memory
from grpo_kit.kernels.offload import Offload
from tests.kernels.test_offload import DiaryLane

SHAPE = (2, 3, 5, 8)  # [b, heads, S, D]


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_memory, "SMALL", 0)


def draw(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*SHAPE, generator=g, dtype=torch.float64).to(dtype) for _ in range(4)]


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_second_time_gives_results_and_gradients_without_computing(dtype: torch.dtype) -> None:
    calls = [draw(seed, dtype) for seed in (0, 1)]
    attend = Counted()
    with Offload(DiaryLane(), 2**30) as offload:
        memory = Memory(offload)
        with torch.no_grad():
            first = [memory.call(attend, *inputs[:3]).clone() for inputs in calls]
        assert attend.calls == 2 and not any(out.requires_grad for out in first)
        for out, (*inputs, grad) in zip(first, calls, strict=True):
            again = [x.clone().requires_grad_() for x in inputs]
            replayed = memory.call(attend, *again)
            assert replayed.equal(out) and attend.calls == 2
            ours = torch.autograd.grad(replayed, again, grad)
            plain = [x.clone().requires_grad_() for x in inputs]
            theirs = torch.autograd.grad(scaled_dot_product_attention(*plain, is_causal=True), plain, grad)
            assert all(mine.equal(other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("replayed", [False, True])
def test_a_pass_that_is_given_up_leaves_nothing_behind(replayed: bool) -> None:
    with Offload(DiaryLane(), 2**30) as offload:
        memory = Memory(offload)
        inputs = draw(0)[:3]
        with torch.no_grad():
            memory.call(Counted(), *inputs)
        alive = weakref.ref(memory._tapes[0])
        if replayed:
            again = [x.requires_grad_() for x in inputs]
            out = memory.call(Counted(), *again)
            del out
        del memory
        assert alive() is None


def test_the_inputs_are_not_held() -> None:
    with Offload(DiaryLane(), 2**30) as offload, torch.no_grad():
        inputs = [x.clone() for x in draw(0)[:3]]
        alive = [weakref.ref(x.untyped_storage()) for x in inputs]
        memory = Memory(offload)
        memory.call(Counted(), *inputs)
        assert all(ref() is not None for ref in alive)
        del inputs
        assert [ref() for ref in alive] == [None] * 3
        assert memory
