"""Offsets that no message ever has: a restore skips some in each queue, so that no offset is used twice.

A log that is restored from shipped segments may lack its newest messages, and readers may have seen their offsets. The
restored log begins after all of them (docs/adr/0032-restored-offsets.md).
"""

from __future__ import annotations

OFFSETS_APART = 1 << 32
"""The offsets that a queue skips between two generations of a log: more than the messages that a queue can have had
without being shipped, and few enough that 2 million restores stay below 2^53, the largest integer of JSON readers."""

Gap = tuple[int, int]
"""First offset, and how many there are."""


class Gaps:
    """The gaps of all queues, by the queue's key; empty if the log was never restored."""

    def __init__(self) -> None:
        self.by_key: dict[int, list[Gap]] = {}

    def add(self, key: int, first: int, count: int) -> None:
        """Add a gap after the queue's last offset."""
        self.by_key.setdefault(key, []).append((first, count))

    def of(self, key: int) -> list[Gap]:
        """A queue's gaps in order."""
        return self.by_key.get(key, [])

    def between(self, key: int, first: int, end: int) -> int:
        """How many offsets of a queue in [first, end) lie in gaps."""
        gaps = self.by_key.get(key, ())
        return sum(max(0, min(end, at + count) - max(first, at)) for at, count in gaps)
