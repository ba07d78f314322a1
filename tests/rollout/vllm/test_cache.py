"""The cache's memory goes and comes back; nothing else of vLLM's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kit.rollout.vllm import cache as module
from grpo_kit.rollout.vllm.cache import KvCache


def entries() -> list[Any]:
    sizes = [("weights", 900), ("kv_cache", 300), ("kv_cache", 200)]
    return [
        SimpleNamespace(tag=tag, handle=(0, size, index), is_asleep=False) for index, (tag, size) in enumerate(sizes)
    ]


def made() -> tuple[KvCache, list[Any], list[Any]]:
    mine, log = entries(), []
    return KvCache(lambda: mine, log.append, lambda: log.append("remapped")), mine, log


def test_only_what_is_tagged_as_the_cache_goes() -> None:
    cache, mine, log = made()
    assert cache.held and cache.bytes == 500
    cache.release()
    assert log == [(0, 300, 1), (0, 200, 2)] and not cache.held
    assert [entry.is_asleep for entry in mine] == [False, True, True]
    cache.acquire()
    assert log[2:] == ["remapped"] and cache.held


def test_twice_is_once() -> None:
    cache, _, log = made()
    cache.acquire()
    cache.release()
    cache.release()
    cache.acquire()
    cache.acquire()
    assert log == [(0, 300, 1), (0, 200, 2), "remapped"]


def test_without_room_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, log = made()
    cache.release()
    free = [499]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(module, "_free", lambda: free[0])
    with pytest.raises(torch.OutOfMemoryError, match="engine='native'"):
        cache.acquire()
    assert not cache.held and "remapped" not in log
    free[0] = 500
    cache.acquire()
    assert cache.held
