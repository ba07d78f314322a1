"""Which rows a step trains on, and how its sequences are cut into micro-batches. Pure functions: a resumed run
needs no state."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

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


def micro_batches(units: list[list[Tokens]], token_budget: int) -> list[list[int]]:
    """Cut sequences into packed batches of at most `token_budget` tokens; a unit that has more goes alone.

    units: sequences that stay together, mostly one each. A prompt counts once in a batch, so those with the same one
    follow each other; and the longest come first, so that a step that would run out of memory does so at its start.
    Returns lists of indices of units.
    """
    return _cut(units, _by_prompt(units), token_budget, _packed)


def padded_micro_batches(units: list[list[Tokens]], token_budget: int) -> list[list[int]]:
    """The same for a model that takes its sequences padded to the longest: padding counts, so they are sorted by
    length alone."""
    order = sorted(range(len(units)), key=lambda i: (-max(map(_length, units[i])), i))
    return _cut(units, order, token_budget, _padded)


@dataclass(frozen=True)
class Tokens:
    """Of one sequence: its prompt (any name for it), that one's tokens, and the completion's."""

    prompt: Hashable
    before: int
    own: int


def _cut(
    units: list[list[Tokens]], order: list[int], token_budget: int, size: Callable[[list[Tokens]], int]
) -> list[list[int]]:
    batches: list[list[int]] = []
    inside: list[Tokens] = []
    for index in order:
        if batches and size(inside + units[index]) <= token_budget:
            batches[-1].append(index)
            inside = inside + units[index]
        else:
            batches.append([index])
            inside = units[index]
    return batches


def _by_prompt(units: list[list[Tokens]]) -> list[int]:
    longest: dict[Hashable, int] = {}
    for unit in units:
        prompt = unit[0].prompt
        longest[prompt] = max(longest.get(prompt, 0), *map(_length, unit))
    rank = {prompt: place for place, prompt in enumerate(sorted(longest, key=lambda p: -longest[p]))}
    return sorted(range(len(units)), key=lambda i: (rank[units[i][0].prompt], -max(map(_length, units[i])), i))


def _length(tokens: Tokens) -> int:
    return tokens.before + tokens.own


def _packed(sequences: list[Tokens]) -> int:
    return sum({s.prompt: s.before for s in sequences}.values()) + sum(s.own for s in sequences)


def _padded(sequences: list[Tokens]) -> int:
    return len(sequences) * max(map(_length, sequences))
