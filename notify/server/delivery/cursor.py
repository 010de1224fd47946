"""One group in one queue: what it is given next, and what comes back to it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from notify.wire import decode_payload
from storage.hashing import tag_hash
from storage.progress import to_runs
from storage.store import SettleKind, Store, StoredMessage, Subscription

SETTLED_BOUND = 100_000
"""Settled offsets above the floor, at most: beyond it a queue pauses for the group until the gap closes."""

READ_BYTES = 8 << 20


class Cursor:
    """Position and retries of a group in a queue. Leases are kept by the group."""

    __slots__ = ("_hashes", "_store", "next", "progress", "queue", "retries", "subscription", "topic")

    def __init__(self, store: Store, subscription: Subscription, queue: int) -> None:
        self._store = store
        self.subscription = subscription
        self.topic = subscription.topic
        self.queue = queue
        self.progress = store.progress(subscription.group, subscription.topic, queue)
        self.next = self.progress.floor
        self.retries: list[tuple[int, int]] = []
        """Heap of (due, offset): to be delivered again."""
        self._hashes = frozenset(tag_hash(tag) for tag in subscription.tags)

    def change(self, subscription: Subscription) -> None:
        """Go on where it stands, with other tags or bounds."""
        self.subscription = subscription
        self._hashes = frozenset(tag_hash(tag) for tag in subscription.tags)

    def lag(self) -> int:
        """Messages not settled yet. Where a topic is broadcast, each instance has a cursor that counts its own."""
        if self.subscription.mode == "broadcast":
            return 0
        start, end = self._store.bounds(self.topic, self.queue)
        return max(0, end - max(self.progress.floor, start) - len(self.progress.settled))

    def is_paused(self) -> bool:
        return len(self.progress.settled) >= SETTLED_BOUND

    def take(self, limit: int, now_us: int) -> tuple[list[StoredMessage], int]:
        """Up to `limit` messages to deliver now, retries first, and how many were skipped by tag."""
        taken = self._take_retries(limit, now_us)
        skipped = 0
        while len(taken) < limit and not self.is_paused():
            found, filtered = self._take_new(limit - len(taken))
            skipped += filtered
            if not found and not filtered:
                break
            taken += found
        return taken, skipped

    def _take_retries(self, limit: int, now_us: int) -> list[StoredMessage]:
        taken: list[StoredMessage] = []
        while self.retries and self.retries[0][0] <= now_us and len(taken) < limit:
            taken += self._take_one(heapq.heappop(self.retries)[1])
        return taken

    def _take_one(self, offset: int) -> list[StoredMessage]:
        """The message of an offset that was passed before; none if it is settled, damaged or no longer retained."""
        if self.progress.is_settled(offset):
            return []
        found = self._store.read(self.topic, self.queue, offset, 1, READ_BYTES)
        if found and found[0].offset == offset:
            return self._sound(found)
        self._settle([(offset, 1)], SettleKind.EXPIRED)
        return []

    def _take_new(self, limit: int) -> tuple[list[StoredMessage], int]:
        """The next unsettled messages; moves the position past them."""
        progress = self.progress
        if self.next < progress.floor:
            self.next = progress.floor
        found = self._store.read(self.topic, self.queue, self.next, limit, READ_BYTES)
        if not found:
            return [], 0
        expected = self.next
        if found[-1].offset - expected + 1 != len(found):
            self._settle_gaps(found, expected)
        self.next = found[-1].offset + 1
        if progress.settled:
            found = [m for m in found if m.offset not in progress.settled]
        if self._hashes:
            wanted = [m for m in found if m.corrupt or self._wants(m)]
            if len(wanted) < len(found):
                kept = {m.offset for m in wanted}
                self._settle(to_runs(m.offset for m in found if m.offset not in kept), SettleKind.FILTERED)
            return self._sound(wanted), len(found) - len(wanted) or (not wanted and 1)
        sound = self._sound(found)
        # Where all was settled already, say so like a filter, so that the caller looks further.
        return sound, 0 if sound else 1

    def _wants(self, message: StoredMessage) -> bool:
        return message.tag_hash in self._hashes and decode_payload(message.payload).tag in self.subscription.tags

    def _sound(self, found: list[StoredMessage]) -> list[StoredMessage]:
        """Without messages whose bytes are damaged: those can never be delivered, so they are settled as corrupt."""
        corrupt = [m.offset for m in found if m.corrupt]
        if not corrupt:
            return found
        self._settle(to_runs(corrupt), SettleKind.CORRUPT)
        return [m for m in found if not m.corrupt]

    def _settle_gaps(self, found: list[StoredMessage], expected: int) -> None:
        """Offsets that retention dropped are done with, or the floor could never pass them."""
        gaps = []
        for message in found:
            if message.offset > expected:
                gaps.append((expected, message.offset - expected))
            expected = message.offset + 1
        self._settle(gaps, SettleKind.EXPIRED)

    def _settle(self, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        self._store.settle_soon(self.subscription.group, self.topic, self.queue, runs, kind)
        for first, count in runs:
            self.finished(range(first, first + count))

    def finished(self, offsets: Iterable[int]) -> None:
        """These are settled for good: what waits for them may go."""

    def come_back(self, offset: int, due_us: int) -> None:
        """Deliver an offset again from `due_us` on."""
        heapq.heappush(self.retries, (due_us, offset))

    def attempts(self, offset: int) -> int:
        """How often the offset has been handed out so far."""
        return self.progress.attempts.get(offset, 0)
