"""vLLM's memory for keys and values: given back to the driver while nothing is sampled, and taken again.

vLLM's allocator maps memory to addresses that stay, so tensors and captured graphs need not know. Its own sleep would
unmap the weights too, which the trainer reads: here only what is tagged as the cache is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

TAG = "kv_cache"


class KvCache:
    """entries(): vLLM's allocations, each with a tag and a handle whose second part is its size in bytes.
    unmap(handle) gives one back; remap() takes all with the tag again."""

    def __init__(self, entries: Callable[[], Iterable[Any]], unmap: Callable[[Any], None], remap: Callable[[], object]):
        self._entries, self._unmap, self._remap = entries, unmap, remap
        self.held = True

    @property
    def bytes(self) -> int:
        return sum(entry.handle[1] for entry in self._mine())

    def release(self) -> None:
        """Its contents are lost. Nothing that reads it may be running."""
        if not self.held:
            return
        self.held = False
        for entry in self._mine():
            self._unmap(entry.handle)
            entry.is_asleep = True

    def acquire(self) -> None:
        """Raises torch.OutOfMemoryError where there is no room for it, and then takes nothing."""
        if self.held:
            return
        self._make_room()
        self._remap()
        self.held = True

    def _mine(self) -> list[Any]:
        return [entry for entry in self._entries() if entry.tag == TAG]

    def _make_room(self) -> None:
        if not torch.cuda.is_available() or _free() >= self.bytes:
            return
        torch.cuda.empty_cache()
        if _free() < self.bytes:
            raise torch.OutOfMemoryError(
                f"vLLM's cache takes {self.bytes / 1e9:.2f} GB and {_free() / 1e9:.2f} GB of the GPU are free; load "
                "with a smaller max_seq_length, or with engine='native', which takes what there is"
            )


def _free() -> int:
    return torch.cuda.mem_get_info()[0]
