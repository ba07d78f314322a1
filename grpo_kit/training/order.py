"""Which rows a step trains on, and how its sequences are cut into micro-batches. Pure functions: a resumed run
needs no state."""

from __future__ import annotations

import torch

from grpo_kit.rollout import stream_seed


def rows_of_step(step: int, rows: int, per_step: int, seed: int) -> list[int]:
    """The data rows of a step (counted from 1): each epoch is a shuffle of its own, and a step may reach across two."""
    first = (step - 1) * per_step
    return [_shuffled(at // rows, rows, seed)[at % rows] for at in range(first, first + per_step)]


def rows_to_refill(step: int, round: int, rows: int, taken: list[int], count: int, seed: int) -> list[int]:
    """Data rows that take the place of `count` groups of a step that taught nothing, drawn anew in each round; none of
    the `taken` ones as long as there are others."""
    generator = torch.Generator().manual_seed(stream_seed(seed, "refill", step, round))
    shuffled = torch.randperm(rows, generator=generator).tolist()
    ranked = [row for row in shuffled if row not in taken] + [row for row in shuffled if row in taken]
    return [ranked[i % rows] for i in range(count)]


def _shuffled(epoch: int, rows: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(stream_seed(seed, "epoch", epoch))
    return torch.randperm(rows, generator=generator).tolist()


def micro_batches(lengths: list[int], token_budget: int, sizes: list[int] | None = None) -> list[list[int]]:
    """Cut sequences into batches of at most `token_budget` tokens, padding included; a longer sequence goes alone.

    lengths: tokens of each sequence, or of the longest one of each unit of `sizes` sequences that stay together.
    Returns lists of indices, longest sequences first, so that little is padded and the step that would run out of
    memory does so at its start.
    """
    sizes = sizes or [1] * len(lengths)
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (sum(sizes[i] for i in batches[-1]) + sizes[index]) * longest <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
