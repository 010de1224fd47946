"""The index of a segment that is still written to: its entries in log order, and each queue's run of them.

Entries are published when their frame is durable. A run holds entry numbers (4 bytes each), so a queue without
messages in this segment costs nothing here.
"""

from __future__ import annotations

from array import array

from storage.log.format import ENTRY_SIZE
from storage.log.journal import Frame

MISSING = 0xFFFFFFFF
"""In a run: an offset whose entry was lost with a damaged frame."""


class LiveRun:
    """Consecutive offsets of one queue, from `first` on."""

    __slots__ = ("first", "numbers")

    def __init__(self, first: int) -> None:
        self.first = first
        self.numbers = array("I")


class LivePart:
    """Entries of one live segment."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.end = base
        self.entries = bytearray()
        self.count = 0
        self.assigned = 0
        self.is_complete = False
        """Whether the last frame of the segment is published: only then may the part be sealed."""
        self.runs: dict[int, LiveRun] = {}
        self.decided: dict[bytes, int] = {}
        """Transaction id to (entry number of the outcome << 1 | rolled back), from the moment it is decided."""

    def publish(self, frame: Frame) -> None:
        """Take over the entries of a frame that has become durable."""
        self.entries += b"".join(frame.entries)
        number = self.count
        runs = self.runs
        for queue in frame.queues:
            if queue is not None:
                run = runs.get(queue.key)
                if run is None:
                    run = runs[queue.key] = LiveRun(queue.visible)
                run.numbers.append(number)
                queue.visible += 1
            number += 1
        self.count = number

    def first_offset(self, key: int) -> int | None:
        run = self.runs.get(key)
        return None if run is None else run.first

    def read(self, key: int, offset: int, limit: int) -> bytes:
        """Entries of a queue from `offset` on, joined; empty if this part has none."""
        run = self.runs.get(key)
        if run is None:
            return b""
        at = max(0, offset - run.first)
        numbers = run.numbers[at : at + limit]
        if not numbers:
            return b""
        first, last = numbers[0], numbers[-1]
        if last - first == len(numbers) - 1:
            return bytes(self.entries[first * ENTRY_SIZE : (last + 1) * ENTRY_SIZE])
        view = memoryview(self.entries)
        try:
            return b"".join([view[n * ENTRY_SIZE : (n + 1) * ENTRY_SIZE] for n in numbers if n != MISSING])
        finally:
            view.release()

    def lookup(self, transaction_id: bytes) -> list[bytes]:
        """Every published entry of a transaction, in log order. Scans: for the administrator, not for the hot path."""
        found = []
        at = self.entries.find(transaction_id)
        while at >= 0:
            if at % ENTRY_SIZE == 48:
                found.append(bytes(self.entries[at - 48 : at + ENTRY_SIZE - 48]))
            at = self.entries.find(transaction_id, at + 1)
        return found

    def outcome(self, transaction_id: bytes) -> bool | None:
        """True committed, False rolled back, None not decided in this part."""
        value = self.decided.get(transaction_id)
        return None if value is None else not value & 1
