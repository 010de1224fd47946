"""One group in one queue: what it is given next, and what comes back to it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from notify.server.delivery.filter import Filter
from notify.server.metrics import Metrics
from notify.wire import decode_payload
from storage.hashing import tag_hash
from storage.progress import to_runs
from storage.store import SettleKind, Store, StoredMessage, Subscription

SETTLED_BOUND = 100_000
"""Settled offsets and retries above the floor, at most: beyond it a queue pauses for the group until the gap closes."""

READ_BYTES = 8 << 20
MOST_SKIPPED = 50_000
MOST_EVALUATED = 2_000
"""Messages that are looked at in one go for a few that match, by their tags or by an expression: then others have their
turn."""
WIDEST_SCAN = 8192


class Cursor:
    """Position and retries of a group in a queue. Leases are kept by the group."""

    __slots__ = (
        "_ahead",
        "_filter",
        "_hashes",
        "_metrics",
        "_store",
        "is_awake",
        "next",
        "progress",
        "queue",
        "retries",
        "serves",
        "subscription",
        "topic",
        "turn_left",
    )

    def __init__(self, store: Store, subscription: Subscription, queue: int, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self.topic = subscription.topic
        self.queue = queue
        self.progress = store.progress(subscription.group, subscription.topic, queue)
        self.next = self.progress.floor
        self.retries: list[tuple[int, int]] = [(due_us, offset) for offset, due_us in self.progress.retry_at.items()]
        """Heap of (due, offset): to be delivered again."""
        heapq.heapify(self.retries)
        self._ahead = set(self.progress.retry_at)
        """Offsets that are retries although the position has not passed them: from before the last start."""
        self.serves = subscription.of_topic or subscription.topic
        """The topic its messages were sent to: another one than it reads where they are retried."""
        self.is_awake = False
        self.turn_left = 0
        self.change(subscription)

    def change(self, subscription: Subscription) -> None:
        """Go on where it stands, with other tags or bounds."""
        self.subscription = subscription
        self._hashes = frozenset(tag_hash(tag) for tag in subscription.tags)
        self._filter = Filter(subscription.filter) if subscription.filter else None

    def lag(self) -> int:
        """Messages not settled yet. Where a topic is broadcast, each instance has a cursor that counts its own."""
        if self.subscription.mode == "broadcast":
            return 0
        start, end = self._store.bounds(self.topic, self.queue)
        return max(0, end - max(self.progress.floor, start) - len(self.progress.settled))

    def is_paused(self) -> bool:
        return len(self.progress.settled) + len(self.retries) >= SETTLED_BOUND

    def take(self, limit: int, now_us: int) -> list[StoredMessage]:
        """Up to `limit` messages to deliver now, retries first."""
        taken = self._take_retries(limit, now_us)
        scan, skipped = limit, 0
        most = MOST_SKIPPED if self._filter is None else MOST_EVALUATED
        while len(taken) < limit and skipped < most and not self.is_paused():
            found, passed = self._take_new(limit - len(taken), scan, now_us)
            if not passed:
                break
            taken += found
            skipped += passed - len(found)
            scan = min(WIDEST_SCAN, most, scan * 2)
        return taken

    def is_behind(self, messages: int) -> bool:
        """Whether so many messages lie ahead."""
        return self._store.bounds(self.topic, self.queue)[1] - self.next > messages

    def has_more(self) -> bool:
        """Whether messages lie ahead that it could look at now."""
        return not self.is_paused() and self.next < self._store.bounds(self.topic, self.queue)[1]

    def _take_retries(self, limit: int, now_us: int) -> list[StoredMessage]:
        taken: list[StoredMessage] = []
        while self.retries and self.retries[0][0] <= now_us and len(taken) < limit:
            offset = heapq.heappop(self.retries)[1]
            self.progress.retry_at.pop(offset, None)
            taken += self._take_one(offset, now_us)
        return taken

    def _take_one(self, offset: int, now_us: int) -> list[StoredMessage]:
        """The message of an offset that was passed before; none if it is settled, damaged or no longer retained."""
        if self.progress.is_settled(offset):
            return []
        found = self._store.read(self.topic, self.queue, offset, 1, READ_BYTES)
        if found and found[0].offset == offset:
            return self._unexpired(self._sound(found), now_us)
        self._settle([(offset, 1)], SettleKind.EXPIRED)
        return []

    def _take_new(self, limit: int, scan: int, now_us: int) -> tuple[list[StoredMessage], int]:
        """Of the next `scan` messages those to deliver, at most `limit`; and how many were passed by that."""
        progress = self.progress
        begin = self.next = max(self.next, progress.floor)
        if self._hashes:
            found = self._read_tagged(limit, scan)
        else:
            found = self._store.read(self.topic, self.queue, begin, limit, READ_BYTES)
            if found:
                if found[-1].offset - begin + 1 != len(found):
                    self._settle_gaps(found, begin)
                self.next = found[-1].offset + 1
        passed = self.next - begin
        if progress.settled or self._ahead:
            found = [m for m in found if m.offset not in progress.settled and m.offset not in self._ahead]
            self._ahead = {offset for offset in self._ahead if offset >= self.next}
        found = self._unexpired(self._sound(found), now_us)
        if self._filter is not None or self._hashes:
            wanted = [m for m in found if self._wants(m)]
            kept = {m.offset for m in wanted}
            self._leave_out([m.offset for m in found if m.offset not in kept])
            found = wanted
        return found, passed

    def _read_tagged(self, limit: int, scan: int) -> list[StoredMessage]:
        """The next messages with one of the subscription's tags, by the index; what lies between them is settled."""
        begin = self.next
        start = self._store.bounds(self.topic, self.queue)[0]
        if begin < start:
            self._settle([(begin, start - begin)], SettleKind.EXPIRED)
            begin = start
        found, end = self._store.read_tagged(self.topic, self.queue, begin, scan, READ_BYTES, self._hashes)
        if len(found) > limit:
            end = found[limit].offset
            del found[limit:]
        between: list[int] = []
        expected = begin
        for message in found:
            between += range(expected, message.offset)
            expected = message.offset + 1
        between += range(expected, end)
        self._leave_out([offset for offset in between if not self.progress.is_settled(offset)])
        self.next = end
        return found

    def _leave_out(self, offsets: list[int]) -> None:
        """These are not what the group wants."""
        if offsets:
            self._metrics.filtered += len(offsets)
            self._settle(to_runs(offsets), SettleKind.FILTERED)

    def _wants(self, message: StoredMessage) -> bool:
        if self._hashes and decode_payload(message.payload).tag not in self.subscription.tags:
            return False  # another tag of the same hash
        return self._filter is None or self._filter.matches(message.payload)

    def _sound(self, found: list[StoredMessage]) -> list[StoredMessage]:
        """Without messages whose bytes are damaged: those can never be delivered, so they are settled as corrupt."""
        corrupt = [m.offset for m in found if m.corrupt]
        if not corrupt:
            return found
        self._settle(to_runs(corrupt), SettleKind.CORRUPT)
        return [m for m in found if not m.corrupt]

    def _unexpired(self, found: list[StoredMessage], now_us: int) -> list[StoredMessage]:
        """Without messages whose time to live is over: the topic or the producer allowed to drop them."""
        expired = [m.offset for m in found if m.expires_us and m.expires_us <= now_us]
        if not expired:
            return found
        self._settle(to_runs(expired), SettleKind.EXPIRED)
        gone = set(expired)
        return [m for m in found if m.offset not in gone]

    def _settle_gaps(self, found: list[StoredMessage], expected: int) -> None:
        """Offsets that retention or a backlog's bound dropped are done with, or the floor could never pass them."""
        gaps = []
        for message in found:
            if message.offset > expected:
                gaps.append((expected, message.offset - expected))
            expected = message.offset + 1
        self._settle(gaps, SettleKind.EXPIRED)

    def _settle(self, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        self._store.settle_soon(self.subscription.group, self.topic, self.queue, runs, kind)
        if kind is SettleKind.EXPIRED:
            self._metrics.expired += sum([count for _, count in runs])
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
