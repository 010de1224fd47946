"""One group in one queue: what it is given next, and what comes back to it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from notify.errors import InvalidRequest, NotifyError
from notify.filter import Filter
from notify.server.metrics import Metrics
from notify.storage.groups import SettleKind, Subscription
from notify.storage.hashing import tag_hash
from notify.storage.progress import to_runs
from notify.storage.queues import Store
from notify.storage.records import StoredMessage
from notify.wire import decode_payload

RUNS_BOUND = 100_000
"""Runs of settled offsets above the floor, and retries, at most: beyond it a queue pauses for the group until some of
its gaps close. A message that fails again and again is one gap, however many behind it are settled meanwhile."""

READ_BYTES = 8 << 20
MOST_SKIPPED = 50_000
MOST_EVALUATED = 2_000
"""Messages that are looked at in one go for a few that match, by their tags or by an expression: then others have their
turn."""
WIDEST_SCAN = 8192


class Cursor:
    """Position and retries of a group in a queue. Leases are kept by the group."""

    keeps_order = False
    """Whether messages wait for others to be settled: then `finished` must be called."""

    __slots__ = (
        "_ahead",
        "_filter",
        "_hashes",
        "_metrics",
        "_store",
        "evaluates",
        "is_awake",
        "next",
        "progress",
        "queue",
        "refused",
        "retries",
        "serves",
        "subscription",
        "topic",
        "turn_left",
        "until",
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
        self.until: int | None = None
        """The first offset that has to wait until all queues of the topic are through with a growth of it."""
        self.change(subscription)

    def change(self, subscription: Subscription) -> None:
        """Go on where it stands, with other tags or bounds."""
        self.subscription = subscription
        self._hashes = frozenset(tag_hash(tag) for tag in subscription.tags)
        self._filter = None
        self.refused = ""
        """Why the filter is not evaluated: it is one that an earlier version took. Then nothing more is looked at."""
        if subscription.filter:
            try:
                self._filter = Filter(subscription.filter)
            except InvalidRequest as error:
                self.refused = str(error)
        self.evaluates = self._filter is not None
        """Whether each message costs an evaluation of its filter."""

    def lag(self) -> int:
        """Messages not settled yet. Where a topic is broadcast, each instance has a cursor that counts its own."""
        if self.subscription.mode == "broadcast":
            return 0
        start, end = self._store.bounds(self.topic, self.queue)
        floor, settled = self.progress.floor, self.progress.settled
        if start <= floor or not settled.offsets:
            return max(0, end - max(floor, start) - settled.offsets)
        return max(0, end - start - settled.between(start, end))

    def is_paused(self) -> bool:
        """Whether it looks no further: it has too many gaps to keep account of more, or its filter is refused."""
        if self.refused:
            return True
        settled = self.progress.settled
        # Few offsets are few runs: those need not be counted.
        return settled.offsets + len(self.retries) >= RUNS_BOUND and len(settled) + len(self.retries) >= RUNS_BOUND

    def is_through(self, offset: int) -> bool:
        """Whether later messages of the same keys may go, in queues that they have been in since a growth at this
        offset: everything below it was handed out once, is settled, or is no longer retained."""
        start = self._store.bounds(self.topic, self.queue)[0]
        return max(self.next, self.progress.next_unsettled(start)) >= offset

    def take(self, limit: int, now_us: int) -> list[StoredMessage]:
        """Up to `limit` messages to deliver now, retries first.

        Raises what the storage refuses with where nothing can be delivered: the position and the retries are then as
        they were.
        """
        taken: list[StoredMessage] = []
        try:
            if self.retries:
                self._take_retries(taken, limit, now_us)
            self._take_ahead(taken, limit, now_us)
        except NotifyError:
            if not taken:
                raise
        return taken

    def _take_ahead(self, taken: list[StoredMessage], limit: int, now_us: int) -> None:
        """Add messages from the position on, until there are `limit`."""
        most = MOST_SKIPPED if self._filter is None else self._filter.at_once
        scan, skipped = min(limit, most), 0
        while len(taken) < limit and skipped < most and not self.is_paused():
            wanted, passed = self._take_new(min(limit - len(taken), most - skipped), scan, now_us)
            if not passed:
                break
            taken += wanted
            skipped += passed - (0 if self.evaluates else len(wanted))
            if len(taken) >= limit or self.next >= self._store.bounds(self.topic, self.queue)[1]:
                break
            scan = min(WIDEST_SCAN, most, scan * 2)

    def is_behind(self, messages: int) -> bool:
        """Whether so many messages lie ahead."""
        return self._store.bounds(self.topic, self.queue)[1] - self.progress.next_unsettled(self.next) > messages

    def has_more(self) -> bool:
        """Whether messages lie ahead that it could look at now."""
        end = self._store.bounds(self.topic, self.queue)[1]
        end = end if self.until is None else min(end, self.until)
        return self.next < end and not self.is_paused() and self.progress.next_unsettled(self.next) < end

    def may_sleep(self) -> bool:
        """Whether it has nothing to hand out until something happens to it: no retry, and no message ahead."""
        return not self.retries and not self.has_more()

    def _take_retries(self, taken: list[StoredMessage], limit: int, now_us: int) -> None:
        """Add the retries that are due, until there are `limit`."""
        while self.retries and self.retries[0][0] <= now_us and len(taken) < limit:
            offset = self.retries[0][1]
            taken += self._take_one(offset, now_us)
            heapq.heappop(self.retries)
            self.progress.retry_at.pop(offset, None)

    def _take_one(self, offset: int, now_us: int) -> list[StoredMessage]:
        """The message of an offset that was passed before; none if it is settled, damaged or no longer retained."""
        if self.progress.is_settled(offset):
            return []
        found = self._store.read(self.topic, self.queue, offset, 1, READ_BYTES)
        if found and found[0].offset == offset:
            return self._deliverable(found, now_us)
        self._settle([(offset, 1)], SettleKind.EXPIRED)
        return []

    def _take_new(self, limit: int, scan: int, now_us: int) -> tuple[list[StoredMessage], int]:
        """Those of the next `scan` messages that are to be delivered, at most `limit`; and how many the cursor passed.

        The position moves only when everything that is left out is settled in the storage.
        """
        begin = self.progress.next_unsettled(self.next)
        if self.until is not None and begin >= self.until:
            return [], 0
        found, end = self._read_tagged(begin, limit, scan) if self._hashes else self._read(begin, limit)
        if self.progress.settled.offsets or self._ahead:
            found = [m for m in found if m.offset not in self.progress.settled and m.offset not in self._ahead]
        found = self._deliverable(found, now_us)
        if self._filter is not None or self._hashes:
            wanted = [m for m in found if self._wants(m)]
            kept = {m.offset for m in wanted}
            self._leave_out(to_runs(m.offset for m in found if m.offset not in kept))
            found = wanted
        if self._ahead:
            self._ahead = {offset for offset in self._ahead if offset >= end}
        self.next = end
        return found, end - begin

    def _read(self, begin: int, limit: int) -> tuple[list[StoredMessage], int]:
        """The next messages, and the offset behind them; gaps between them are settled."""
        found = self._store.read(self.topic, self.queue, begin, limit, READ_BYTES)
        if self.until is not None:
            found = self._before_until(found, self.until)
        if not found:
            return found, begin
        end = found[-1].offset + 1
        if end - begin != len(found):
            self._settle_gaps(found, begin)
        return found, end

    def _read_tagged(self, begin: int, limit: int, scan: int) -> tuple[list[StoredMessage], int]:
        """The next messages with one of the subscription's tags, by the index, and the offset behind what was looked
        at; messages with other tags are settled."""
        start = self._store.bounds(self.topic, self.queue)[0]
        if begin < start:
            self._settle([(begin, start - begin)], SettleKind.EXPIRED)
            begin = start
        found, end = self._store.read_tagged(self.topic, self.queue, begin, scan, READ_BYTES, self._hashes)
        if self.until is not None:
            found, end = self._before_until(found, self.until), min(end, self.until)
        if len(found) > limit:
            end = found[limit].offset
            del found[limit:]
        self._leave_out(self._between(found, begin, end))
        return found, end

    @staticmethod
    def _before_until(messages: list[StoredMessage], until: int) -> list[StoredMessage]:
        return [m for m in messages if m.offset < until]

    def _between(self, found: list[StoredMessage], begin: int, end: int) -> list[tuple[int, int]]:
        """The runs of [begin, end) that are neither among these messages nor settled."""
        runs: list[tuple[int, int]] = []
        for offset in [*[m.offset for m in found], end]:
            if offset > begin:
                runs += self.progress.unsettled(begin, offset)
            begin = offset + 1
        return runs

    def _leave_out(self, runs: list[tuple[int, int]]) -> None:
        """These are not what the group wants."""
        if runs:
            self._settle(runs, SettleKind.FILTERED)
            self._metrics.filtered += sum([count for _, count in runs])

    def _wants(self, message: StoredMessage) -> bool:
        if self._hashes and decode_payload(message.payload).tag not in self.subscription.tags:
            return False  # another tag of the same hash
        return self._filter is None or self._filter.matches(message.payload)

    def _deliverable(self, messages: list[StoredMessage], now_us: int) -> list[StoredMessage]:
        """Without those that are damaged, or whose time to live is over."""
        for m in messages:
            if m.corrupt or m.expires_us:
                return self._unexpired(self._sound(messages), now_us)
        return messages

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
        gaps = self._between(found, expected, found[-1].offset)
        if gaps:
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
