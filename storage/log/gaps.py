"""Offsets that no message ever has: what a restore leaves free in each queue, so that no offset is given out twice.

A log that is restored from shipped segments may lack its newest messages, and readers may have seen their offsets. The
restored log begins behind all of them (docs/adr/0032-restored-offsets.md).
"""

from __future__ import annotations

OFFSETS_APART = 1 << 32
"""So many offsets of a queue lie between one generation of a log and the next: more messages than a queue can have had
that were not shipped, and few enough that 2 million restores stay below 2^53, the largest integer of JSON readers."""

Gap = tuple[int, int]
"""First offset, and how many there are."""


class Gaps:
    """The gaps of all queues, by the queue's key; none in a log that was never restored."""

    def __init__(self) -> None:
        self.by_key: dict[int, list[Gap]] = {}

    def add(self, key: int, first: int, count: int) -> None:
        """Note a gap behind all that the queue has."""
        self.by_key.setdefault(key, []).append((first, count))

    def of(self, key: int) -> list[Gap]:
        """A queue's gaps in order."""
        return self.by_key.get(key, [])

    def between(self, key: int, first: int, end: int) -> int:
        """How many offsets of a queue in [first, end) lie in gaps."""
        gaps = self.by_key.get(key, ())
        return sum(max(0, min(end, at + count) - max(first, at)) for at, count in gaps)
