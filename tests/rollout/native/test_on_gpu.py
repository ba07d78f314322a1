"""What only a GPU can show: graphs, the host a step behind, other threads, memory. Skipped without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from grpo_kit.model.decode_layers import fused_step
from grpo_kit.model.lora import add_lora, lora_parameters
from grpo_kit.rollout import Completion, NativeEngine, Sampling, TransformersEngine
from grpo_kit.rollout.native.cache import SlotCache
from grpo_kit.rollout.native.fused_step import FusedStep
from grpo_kit.rollout.native.graphs import Graphs
from grpo_kit.rollout.native.support import examine
from tests.rollout.native.conftest import FUSED, learn, tiny, wide
from tests.rollout.native.test_fused_step import ROWS, assert_as_exact_as_the_modules, assert_close, made
from tests.rollout.native.test_int8_cache import gaps
from tests.tiny import ARCHITECTURES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ENDS = tuple(range(0, 250, 12))
PROMPTS = [[5, 60, 200], list(range(30, 51)), [7], [9, 9, 120, 4, 4, 70]]


def both(module: Any, slots: int | None = None) -> tuple[NativeEngine, TransformersEngine]:
    native = NativeEngine(module, eos_ids=ENDS, decode=str)
    if slots is not None:
        native.cache_bytes = native.shape.bytes_for(slots * 64)
    return native, TransformersEngine(module, eos_ids=ENDS, decode=str)


def tokens_of(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in groups for completion in group]


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gemma2"])
@pytest.mark.parametrize("slots", [None, 4])
def test_graphs_draw_what_the_plain_engine_draws(architecture: str, slots: int | None) -> None:
    native, plain = both(tiny(architecture, torch.float64).cuda(), slots)
    for options in ({}, {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}, {"temperature": 0.0}, {}):
        sampling = Sampling(max_tokens=30, seed=3, **options)
        assert tokens_of(native.generate(PROMPTS, sampling, n=5)) == tokens_of(plain.generate(PROMPTS, sampling, n=5))
    assert len(native._idle) == 1


def test_the_adapter_is_that_of_the_moment_also_in_a_graph() -> None:
    module = add_lora(tiny("llama", torch.float64).cuda(), rank=4, alpha=8, seed=0)
    native, plain = both(module)
    sampling = Sampling(max_tokens=12, seed=1)
    fresh = tokens_of(native.generate(PROMPTS, sampling))
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    learned = tokens_of(native.generate(PROMPTS, sampling))
    assert learned == tokens_of(plain.generate(PROMPTS, sampling)) != fresh
    with module.disable_adapter():
        assert tokens_of(native.generate(PROMPTS, sampling)) == fresh
    assert tokens_of(native.generate(PROMPTS, sampling)) == learned


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype) -> None:
    native, _ = both(tiny("qwen3", dtype).cuda())
    sampling = Sampling(max_tokens=40, seed=1)
    first = native.generate(PROMPTS, sampling, n=8)
    assert native.generate(PROMPTS, sampling, n=8) == first


def test_questions_and_other_threads_while_graphs_are_captured() -> None:
    native, plain = both(tiny("llama", torch.float64).cuda())
    outer, inner = Sampling(max_tokens=20, seed=1), Sampling(max_tokens=9, seed=2)
    expected = [tokens_of(plain.generate(PROMPTS, outer, n=3)), tokens_of(plain.generate([[8, 9]], inner))]
    done = threading.Event()

    def notebook() -> None:
        while not done.is_set():
            torch.rand(1000, device="cuda").sum().item()

    thread = threading.Thread(target=notebook)
    thread.start()
    try:
        answers: list[list[list[int]]] = []
        ask: Callable[[], None] = lambda: answers.append(tokens_of(native.generate([[8, 9]], inner)))  # noqa: E731
        found = tokens_of(native.generate(PROMPTS, outer, n=3, between_tokens=ask))
    finally:
        done.set()
        thread.join()
    assert found == expected[0] and answers and all(answer == expected[1] for answer in answers)


def test_release_gives_the_memory_back() -> None:
    native, _ = both(tiny("llama", torch.float16).cuda())
    native.generate(PROMPTS, Sampling(max_tokens=4))
    native.release()
    before = torch.cuda.memory_reserved()
    native.generate([[i % 200 for i in range(300)]] * 4, Sampling(max_tokens=200, seed=1), n=8)
    assert torch.cuda.memory_reserved() > before
    native.release()
    assert torch.cuda.memory_reserved() <= before


HALVES = [torch.float16, torch.bfloat16]


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("architecture", FUSED)
def test_fused_logits_are_as_exact_as_the_modules(architecture: str, four_bit: bool, dtype: torch.dtype) -> None:
    assert_as_exact_as_the_modules(architecture, four_bit, dtype, "cuda")


@torch.no_grad()
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_a_replayed_graph_is_the_fused_step(rows: int, four_bit: bool) -> None:
    """Also after the adapter was trained and refreshed, and with tokens and positions of the moment."""
    module = wide("qwen3", four_bit, dtype=torch.float16, device="cuda")
    cache = SlotCache(examine(module), 128, 128)
    step = made(module, cache)
    tokens, positions = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(2))
    out = torch.zeros(rows, 259, dtype=torch.float16, device="cuda")
    graphs = Graphs(cache.shape.device)
    for turn in range(3):
        tokens.copy_(torch.arange(rows) + turn)
        positions.copy_(torch.arange(rows) % 60 + turn)
        graphs.run("key", lambda: step(tokens, positions, 128), lambda: out.copy_(step(tokens, positions, 128)))
        assert_close(out, step(tokens, positions, 128), 1e-3)
        for weight in lora_parameters(module).values():
            weight.mul_(0.9)
        step.refresh()
    graphs.close()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("four_bit", [False, True])
def test_the_engine_samples_by_the_fused_step(four_bit: bool, dtype: torch.dtype) -> None:
    module = wide("llama", four_bit, dtype=dtype, device="cuda", learned=0)
    native = NativeEngine(module, eos_ids=ENDS, decode=str, fused=partial(fused_step, module))
    greedy = Sampling(max_tokens=40, temperature=0.0)
    fresh = tokens_of(native.generate(ROWS, greedy))
    assert isinstance(native._idle[0].step, FusedStep) and native._idle[0].graphs._captured
    assert tokens_of(native.generate(ROWS, greedy)) == fresh
    learn(module)
    learned = tokens_of(native.generate(ROWS, greedy))
    assert learned != fresh
    with module.disable_adapter():
        assert tokens_of(native.generate(ROWS, greedy)) != learned
    assert len(native.generate(ROWS, Sampling(max_tokens=30, seed=1), n=20)) == len(ROWS)


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("architecture", FUSED)
def test_the_fused_step_samples_from_a_cache_in_8_bits(architecture: str, dtype: torch.dtype) -> None:
    module = wide(architecture, True, dtype=dtype, device="cuda", learned=0.05)
    off = []
    for kv_cache_dtype in (None, "int8"):
        native = NativeEngine(
            module, eos_ids=ENDS, decode=str, fused=partial(fused_step, module), kv_cache_dtype=kv_cache_dtype
        )
        groups = native.generate(ROWS, Sampling(max_tokens=60, seed=1), n=10)
        assert isinstance(native._idle[0].step, FusedStep)
        off.append(float(gaps(module, groups, ROWS).mean()))
        native.release()
    assert off[1] < off[0] + 0.05
