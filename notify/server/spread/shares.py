"""Which ids each worker's part of a write is about, where `max` bounds the whole: the workers give one by turns."""

from __future__ import annotations

from collections.abc import Sequence


def shares(ids: Sequence[Sequence[str]], most: int) -> list[list[str]]:
    """`ids`: those that each worker has, in its order; of each its first ones, at most `most` in all."""
    taken = [0] * len(ids)
    left = min(most, sum(map(len, ids)))
    while left:
        for worker, own in enumerate(ids):
            if left and taken[worker] < len(own):
                taken[worker] += 1
                left -= 1
    return [list(own[:count]) for own, count in zip(ids, taken, strict=True)]
