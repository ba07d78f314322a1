"""Attention that is computed once though its layer is computed twice.

A recomputed layer needs its attention's result again, and backward needs what torch saved of it. Both are kept from the
first time; only q, k and v, which the layer has at hand again, are left out of what torch saved, through its hooks for
saved tensors. So any kernel of torch will do, and none is called by its private name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from grpo_kit.kernels.offload import Kept, Offload

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SMALL = 2**20  # bytes; what is no larger stays on the device


class Memory:
    """Of one layer: a call of `call` without gradients leaves its results here, and the same calls again in the same
    order, with gradients, take them. `offload` keeps what is large."""

    def __init__(self, offload: Offload):
        self._offload = offload
        self._tapes: list[_Tape] = []

    def call(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            out: Tensor = _Replayed.apply(q, k, v, self._tapes.pop(0))
            return out
        tape, out = record(self._offload, attend, q, k, v)
        self._tapes.append(tape)
        return out


class _Saved:
    """What torch saved of one call. Apart from the tape, which holds the graph: the graph holds this by its hooks, and
    a circle through it would never be collected."""

    def __init__(self, offload: Offload, inputs: tuple[Tensor, ...]):
        self.inputs = inputs  # of the call being recorded or, later, differentiated
        self._offload = offload
        self._kept: dict[tuple[Any, ...], Kept] = {}
        self._back: dict[Kept, Tensor] = {}

    def pack(self, tensor: Tensor) -> Any:
        for place, known in enumerate(self.inputs):
            if _identity(tensor) == _identity(known):
                return place
        return tensor if tensor.nbytes <= SMALL else self.keep(tensor)

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, int):
            return self.inputs[saved]
        return saved if isinstance(saved, Tensor) else self.take(saved)

    def keep(self, tensor: Tensor) -> Kept:
        which = _identity(tensor)
        if which not in self._kept:
            self._kept[which] = self._offload.keep(tensor)
        return self._kept[which]

    def take(self, kept: Kept) -> Tensor:
        if kept not in self._back:
            self._back[kept] = self._offload.take(kept)
        return self._back[kept]

    def close(self) -> None:
        """The call is recorded: other tensors may now come to lie where its own were."""
        self.inputs, self._kept = (), {}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _Tape:
    """One call's part of the autograd graph, with gaps where its inputs were."""

    def __init__(self, saved: _Saved, out: Tensor, stand_ins: list[Tensor]):
        self._saved = saved
        self._ends = get_gradient_edge(out), [get_gradient_edge(x) for x in stand_ins]
        self._out = saved.keep(out.detach())
        saved.close()

    def result(self) -> Tensor:
        return self._saved.take(self._out).detach()

    def backward(self, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
        self._saved.inputs = inputs
        out, stand_ins = self._ends
        return torch.autograd.grad([out], stand_ins, [grad])


def record(offload: Offload, attend: Attend, *inputs: Tensor) -> tuple[_Tape, Tensor]:
    """Make the call, and return its tape and its result."""
    saved = _Saved(offload, inputs)
    with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
        seed = torch.zeros((), device=inputs[0].device, requires_grad=True)
        stand_ins = [_StandIn.apply(x, seed) for x in inputs]
        out = attend(*stand_ins)
    return _Tape(saved, out, stand_ins), out.detach()


class _StandIn(torch.autograd.Function):
    """x itself, as a place in a graph that does not hold it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _Replayed(torch.autograd.Function):
    """A recorded call, for the inputs that it was recorded with."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tape: _Tape) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.tape = tape
        return tape.result()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.tape.backward(ctx.saved_tensors, grads[0]), None
