"""One token step through transformers' modules, against a plain forward pass of each row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_kit.rollout.native.cache import SlotCache
from grpo_kit.rollout.native.module_step import ModuleStep
from grpo_kit.rollout.native.prefill import chunks, prefill
from grpo_kit.rollout.native.support import examine
from tests.rollout.native.conftest import SMOLLM3
from tests.tiny import ARCHITECTURES

FAMILIES = [*ARCHITECTURES, "smollm3"]
ROWS = [[5, 60, 200], list(range(30, 70)), [7, 8], [9, 9, 120, 4, 4, 70]]  # 40 tokens: beyond the window of 16
CLOSE = {"gemma2": 1e-5}  # its softmax is in float32 whatever the model's type


@torch.no_grad()
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("length", [64, 128])
def test_each_row_is_as_if_alone(architecture: str, length: int, load: Callable[..., Any]) -> None:
    module = load(architecture, torch.float64)
    cache = SlotCache(examine(module), 8, 128)
    for own in (*cache.keys, *cache.values):
        own.fill_(1e3)  # what an earlier call left must not be seen
    for slot, row in enumerate(ROWS):
        before = prefill(module, [row[:-1]])[0]
        cache.write(torch.tensor([slot]), before.keys, before.values)
    step = ModuleStep(module, cache)
    rows = [row.copy() for row in ROWS]
    for follow in (11, 12):
        tokens = torch.tensor([row[-1] for row in rows])
        positions = torch.tensor([len(row) - 1 for row in rows])
        logits = step(tokens, positions, length)
        for found, row in zip(logits, rows, strict=True):
            expected = module(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE.get(architecture, 1e-9))
            row.append(follow)
    assert all((own[4:] == 1e3).all() for own in (*cache.keys, *cache.values))  # slots outside the bucket


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_prompt_is_prefilled_the_same_in_a_chunk_as_alone(architecture: str, load: Callable[..., Any]) -> None:
    module = load(architecture, torch.float64)
    for together, row in zip(prefill(module, ROWS), ROWS, strict=True):
        alone = prefill(module, [row])[0]
        torch.testing.assert_close(together.logits, alone.logits, rtol=1e-9, atol=1e-9)
        for found, expected in zip([*together.keys, *together.values], [*alone.keys, *alone.values], strict=True):
            assert found.shape[1] == len(row)  # all of them, also beyond the window
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_chunks_are_bounded_with_their_padding() -> None:
    assert list(chunks([10, 20, 30])) == [range(0, 3)]
    assert list(chunks([5000, 10, 10])) == [range(0, 1), range(1, 3)]
    assert list(chunks([10, 2000, 2000, 10])) == [range(0, 2), range(2, 4)]
    assert list(chunks([])) == []


def test_the_tests_see_windows_of_two_kinds() -> None:
    assert SMOLLM3[1]["sliding_window"] < max(map(len, ROWS))
