"""A token step as a CUDA graph: captured the first time it is asked for, then replayed. On a CPU it is called.

What is captured must keep its results in tensors that live outside the graph: the graphs share one memory pool, and
each of them uses it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class Graphs:
    """One graph a key. They are replayed one after another on the current stream, never at the same time."""

    def __init__(self, device: torch.device):
        self.device = device
        self._captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(self, key: Hashable, warm_up: Callable[[], object], step: Callable[[], None]) -> None:
        """Do `step`. `warm_up` does the same work without changing what a step starts from; it runs before a capture,
        so that libraries allocate and choose their kernels outside of it."""
        if self.device.type != "cuda":
            step()
            return
        if key not in self._captured:
            self._captured[key] = self._capture(warm_up, step)
        self._captured[key].replay()

    def _capture(self, warm_up: Callable[[], object], step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            warm_up()
        current.wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local: other threads (the notebook's own cells) may use the GPU meanwhile, all but its random
            # numbers. The outer block brings the stream back, which a capture that fails leaves as it is.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                step()
        except RuntimeError as error:
            if isinstance(error.__context__, torch.OutOfMemoryError):  # hidden by the end of the capture it spoiled
                raise error.__context__ from None
            raise
        return graph

    def close(self) -> None:
        """Forget the graphs, and with them their memory. What was launched ends first."""
        if self._captured:
            torch.cuda.synchronize(self.device)
        self._captured.clear()
        self._pool = None
