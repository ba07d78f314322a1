"""Which completion is in which slot: refilling free slots, and going over to a smaller bucket. No tensors here."""

from __future__ import annotations

from typing import Generic, TypeVar

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FEW = 2  # a single free slot waits for a second one: a prefill holds up all that run

T = TypeVar("T")


def bucket_for(count: int) -> int:
    """The smallest bucket with room for `count` rows, or the largest there is."""
    return next((bucket for bucket in BUCKETS if bucket >= count), BUCKETS[-1])


class Slots(Generic[T]):
    """`size` slots (a bucket); the first `bucket` of them are computed in a token step, whether taken or free."""

    def __init__(self, size: int):
        self.bucket = size
        self._taken: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def taken(self) -> list[tuple[int, T]]:
        """(slot, what is in it), by slot."""
        return sorted(self._taken.items(), key=lambda pair: pair[0])

    def free(self) -> list[int]:
        return [slot for slot in range(self.bucket) if slot not in self._taken]

    def take(self, slot: int, occupant: T) -> None:
        self._taken[slot] = occupant

    def leave(self, slot: int) -> None:
        del self._taken[slot]

    def due(self, waiting: int) -> int:
        """How many of those who wait should start now: none until it is worth interrupting the others for them."""
        startable = min(waiting, self.bucket - len(self))
        worth_it = min(waiting, max(FEW, self.bucket // 8))
        return startable if not self._taken or startable >= worth_it else 0

    def shrink(self) -> list[tuple[int, int]]:
        """Go over to the smallest bucket that holds the taken slots. Returns what has to move, as (from, to)."""
        smaller = bucket_for(max(1, len(self)))
        if smaller >= self.bucket:
            return []
        self.bucket = smaller
        moves = list(zip([slot for slot, _ in self.taken() if slot >= smaller], self.free(), strict=False))
        for source, target in moves:
            self._taken[target] = self._taken.pop(source)
        return moves
