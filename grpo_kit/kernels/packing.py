"""Sequences without padding: the tokens of a micro-batch in one row, and who stands where in which sequence.

What several sequences begin with, a group's prompt, is there once. A causal model says the same of it whatever follows,
so everything but attention is computed once for all of them, and gradients add up as if each had had its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

EVEN_ENOUGH = 0.75  # for attention sequences are padded to the longest if the shortest has this share of it
AT_ONCE = 8192  # rows that are made float32 at a time


@dataclass(frozen=True)
class Packed:
    """M tokens of B sequences of up to S.

    ids, positions [M]. rows [B, S]: which token stands where in each sequence, 0 behind its end. mask [B, S]: 1 where
    there is one. buckets [b, S] each: the sequences that go through attention side by side, rows again; any token
    behind a sequence's end, where causal attention never looks. owner [M]: where in the buckets, one after the other,
    each token's own place is; a shared one's is in the first sequence that begins with it. shared: whether there are
    any. in_order: whether the tokens lie as a [B, S] block, nothing shared and nothing to pad.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    mask: Tensor
    buckets: list[Tensor]
    owner: Tensor
    shared: bool
    in_order: bool

    def __len__(self) -> int:
        return len(self.ids)

    def places(self) -> Tensor:
        """[M]: where in the flattened rows each token stands; a shared one in the first sequence that has it."""
        places = torch.empty_like(self.ids)
        flat = self.rows.flatten()
        real = self.mask.flatten().nonzero().squeeze(-1)
        return places.scatter_reduce_(0, flat[real], real, "amin", include_self=False)


def pack(sequences: list[tuple[list[int], list[int]]], device: torch.device | str = "cpu") -> Packed:
    """Each sequence is (beginning, own part); equal beginnings are stored once."""
    ids: list[int] = []
    positions: list[int] = []
    beginnings: dict[tuple[int, ...], list[int]] = {}
    rows: list[list[int]] = []

    def add(tokens: list[int], start: int) -> list[int]:
        places = list(range(len(ids), len(ids) + len(tokens)))
        ids.extend(tokens)
        positions.extend(range(start, start + len(tokens)))
        return places

    for beginning, own in sequences:
        key = tuple(beginning)
        if key not in beginnings:
            beginnings[key] = add(beginning, 0)
        rows.append(beginnings[key] + add(own, len(beginning)))

    lengths = [len(row) for row in rows]
    groups = bucketed(lengths)
    padded = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    shared = sum(lengths) > len(ids)
    return Packed(
        ids=torch.tensor(ids).to(device),
        positions=torch.tensor(positions).to(device),
        rows=padded.to(device),
        mask=(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long().to(device),
        buckets=[padded[group, : lengths[group[0]]].to(device) for group in groups],
        owner=_owner(rows, groups, len(ids)).to(device),
        shared=shared,
        in_order=not shared and len(set(lengths)) == 1,
    )


def gather(x: Tensor, tokens: Tensor, shared: bool) -> Tensor:
    """x [M, …] at tokens [any shape] → [any shape, …]. shared: whether some token is asked for more than once; what
    comes back to it in backward is added up in float32."""
    out: Tensor = _Gather.apply(x, tokens, shared)
    return out


def bucketed(lengths: list[int]) -> list[list[int]]:
    """Indices by length, longest first, cut where padding to the longest of a bucket would waste too much."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cuts = [0]
    for place, i in enumerate(order):
        if lengths[i] < EVEN_ENOUGH * lengths[order[cuts[-1]]]:
            cuts.append(place)
    return [order[start:end] for start, end in pairwise([*cuts, len(order)])]


def _owner(rows: list[list[int]], groups: list[list[int]], tokens: int) -> Tensor:
    owner = torch.full((tokens,), -1)
    start = 0
    for group in groups:
        width = len(rows[group[0]])
        for i in group:
            row = torch.tensor(rows[i])
            free = owner[row] < 0
            owner[row[free]] = start + torch.arange(len(row))[free]
            start += width
    return owner


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, shared: bool) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.size, ctx.shared = len(x), shared
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        (grad,) = grads
        dtype = torch.promote_types(grad.dtype, torch.float32) if ctx.shared else grad.dtype
        total = grad.new_zeros((ctx.size, *grad.shape[tokens.dim() :]), dtype=dtype)
        rows = grad.flatten(0, tokens.dim() - 1)
        for some, part in zip(tokens.flatten().split(AT_ONCE), rows.split(AT_ONCE), strict=True):
            total.index_add_(0, some, part.to(dtype))
        return total.to(grad.dtype), None, None
