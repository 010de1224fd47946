"""Divides a write of at most `max` rows among workers: each worker in turn gets one of its ids."""

from __future__ import annotations

from collections.abc import Sequence


def shares(ids: Sequence[Sequence[str]], most: int) -> list[list[str]]:
    """For each worker its first ids, at most `most` ids in all; `ids`: the ids of each worker, in its order."""
    counts = [0] * len(ids)
    remaining = min(most, sum(map(len, ids)))
    while remaining:
        for worker, worker_ids in enumerate(ids):
            if remaining and counts[worker] < len(worker_ids):
                counts[worker] += 1
                remaining -= 1
    return [list(worker_ids[:count]) for worker_ids, count in zip(ids, counts, strict=True)]
