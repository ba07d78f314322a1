"""What backward will need waits in the host's memory: tensors leave on a side stream while the next layer computes, and
come back, last first, while the layer before their own does.

Nothing of torch is changed: whoever wants a tensor kept hands it over and asks for it again.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK = 512 * 2**20  # bytes pinned at a time
LEAVING = 2  # tensors on their way out that may still hold GPU memory
AHEAD = 2  # tensors that are called for before they are asked for


@dataclass(eq=False)
class Kept:
    """A tensor that was handed over: its copy in host memory, or itself where that is full; and what comes back."""

    host: Tensor | None
    device: Tensor | None
    place: int
    arrived: Any = None


class Offload(AbstractContextManager["Offload"]):
    """Within the block `keep` takes tensors and `take` gives them back; on any exit everything is let go.

    limit: bytes of host memory that may be pinned; what is beyond stays where it is. Buffers are used again by the next
    block and freed by `close()`, for good. used, stayed: bytes that went to the host in the last block, and that found
    no room.
    """

    def __init__(self, lane: Lane, limit: int):
        self.lane, self.limit = lane, limit
        self.used = self.stayed = 0
        self._chunks: list[Tensor] = []
        self.close = weakref.finalize(self, _free, lane, self._chunks)
        self._filled: list[int] = []
        self._stack: list[Kept] = []
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    def __enter__(self) -> Offload:
        self.used = self.stayed = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lane.join()  # copies under way still write into what is freed here
        for kept in self._stack:
            kept.host = kept.device = kept.arrived = None  # who still holds it holds no memory
        self._stack.clear()
        self._leaving.clear()
        self._filled = [0] * len(self._chunks)

    def keep(self, tensor: Tensor) -> Kept:
        """Take a tensor; the caller drops its own reference."""
        host = self._room(tensor)
        kept = Kept(host, None if host is not None else tensor, len(self._stack))
        self._stack.append(kept)
        if host is None:
            self.stayed += tensor.nbytes
            return kept
        self.used += tensor.nbytes
        self._leaving.append((tensor, self.lane.send(tensor, host)))
        while len(self._leaving) > LEAVING:
            self.lane.wait(self._leaving.popleft()[1])
        return kept

    def take(self, kept: Kept) -> Tensor:
        """Give a tensor back, and call for those that were handed over before it."""
        while self._leaving:
            self.lane.wait(self._leaving.popleft()[1])
        self._call(kept)
        if kept.arrived is not None:
            self.lane.wait(kept.arrived)
        assert kept.device is not None
        tensor, kept.device, kept.arrived = kept.device, None, None
        for earlier in self._stack[max(0, kept.place - AHEAD) : kept.place][::-1]:
            self._call(earlier)
        return tensor

    def _call(self, kept: Kept) -> None:
        if kept.device is None and kept.host is not None:
            kept.device, kept.arrived = self.lane.fetch(kept.host)
            kept.host = None

    def _room(self, tensor: Tensor) -> Tensor | None:
        """Host memory for a tensor, None if there is none left."""
        for i, chunk in enumerate(self._chunks):
            if self._filled[i] + tensor.nbytes <= len(chunk):
                return self._part(i, tensor)
        size = max(CHUNK, tensor.nbytes)
        if sum(map(len, self._chunks)) + size > self.limit:
            return None
        memory = self.lane.host_memory(size)
        if memory is None:
            self.limit = sum(map(len, self._chunks))
            return None
        self._chunks.append(memory)
        self._filled.append(0)
        return self._part(len(self._chunks) - 1, tensor)

    def _part(self, i: int, tensor: Tensor) -> Tensor:
        """A piece of a chunk with the tensor's layout, so that the copy is a plain one."""
        start = self._filled[i]
        self._filled[i] = start + -(-tensor.nbytes // 64) * 64  # 64: views of any format are aligned
        flat = self._chunks[i][start : start + tensor.nbytes].view(tensor.dtype)
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def _free(lane: Lane, chunks: list[Tensor]) -> None:
    """Also when an Offload is dropped: memory that stays pinned when it is free is an error for who gets it next."""
    while chunks:
        lane.free(chunks.pop())


class Lane(Protocol):
    """How copies travel. `host_memory` may refuse (None); `send` and `fetch` return at once, `wait` makes later work
    wait for one of them."""

    def host_memory(self, size: int) -> Tensor | None: ...
    def free(self, memory: Tensor) -> None: ...
    def send(self, tensor: Tensor, host: Tensor) -> Any: ...
    def fetch(self, host: Tensor) -> tuple[Tensor, Any]: ...
    def wait(self, event: Any) -> None: ...
    def join(self) -> None: ...


class CudaLane:
    """A side stream, and ordinary memory pinned while it is in use: torch's own pinned tensors stay so for good."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def host_memory(self, size: int) -> Tensor | None:
        """None where the system gives or pins no more."""
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError:
            return None
        refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        return None if refused else memory

    def free(self, memory: Tensor) -> None:
        self.stream.synchronize()
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(cuda.cudaHostUnregister(memory.data_ptr()))

    def send(self, tensor: Tensor, host: Tensor) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            return self.stream.record_event()

    def fetch(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        tensor = torch.empty_like(host, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # its memory may just have been in use
        with torch.cuda.stream(self.stream):
            tensor.copy_(host, non_blocking=True)
            return tensor, self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
