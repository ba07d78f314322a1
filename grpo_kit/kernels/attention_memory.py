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
        self._tapes.append(_Tape(self._offload))
        return self._tapes[-1].record(attend, q, k, v)


class _Tape:
    """One call's part of the autograd graph, with gaps where its inputs were."""

    def __init__(self, offload: Offload):
        self._offload = offload
        self._back: dict[Kept, Tensor] = {}
        self._inputs: tuple[Tensor, ...] = ()

    def record(self, attend: Attend, *inputs: Tensor) -> Tensor:
        self._inputs = inputs
        kept: dict[int, Kept] = {}

        def pack(tensor: Tensor) -> Any:
            for place, known in enumerate(self._inputs):
                if tensor.data_ptr() == known.data_ptr() and tensor.stride() == known.stride():
                    return place
            if tensor.nbytes <= SMALL:
                return tensor
            if tensor.data_ptr() not in kept:
                kept[tensor.data_ptr()] = self._offload.keep(tensor)
            return kept[tensor.data_ptr()]

        with torch.enable_grad(), saved_tensors_hooks(pack, self._unpack):
            seed = torch.zeros((), device=inputs[0].device, requires_grad=True)
            stand_ins = [_StandIn.apply(x, seed) for x in inputs]
            out = attend(*stand_ins)
        self._inputs = ()
        self._ends = get_gradient_edge(out), [get_gradient_edge(x) for x in stand_ins]
        self._out = kept.get(out.data_ptr()) or self._offload.keep(out.detach())
        return out.detach()

    def result(self) -> Tensor:
        return self._take(self._out).detach()

    def backward(self, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
        self._inputs = inputs
        out, stand_ins = self._ends
        return torch.autograd.grad([out], stand_ins, [grad])

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, int):
            return self._inputs[saved]
        return saved if isinstance(saved, Tensor) else self._take(saved)

    def _take(self, kept: Kept) -> Tensor:
        if kept not in self._back:
            self._back[kept] = self._offload.take(kept)
        return self._back[kept]


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
