"""One group's cursor in one queue: which messages it gets next, and which are retried."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from notify.errors import InvalidRequest, NotifyError
from notify.protocol.filter import Filter
from notify.protocol.keys import tag_hash
from notify.protocol.wire import decode_payload
from notify.server.metrics import Metrics
from notify.storage.groups import SettleKind, Subscription
from notify.storage.message_run import MessageRun
from notify.storage.progress import to_runs
from notify.storage.queues import Store
from notify.storage.records import StoredMessage

RUNS_BOUND = 100_000
"""The most runs of settled offsets above the floor, and retries: beyond it the queue pauses for the group until gaps
close. A message that keeps failing is one gap, however many messages after it are settled meanwhile."""

READ_BYTES = 8 << 20
MOST_SKIPPED = 50_000
MOST_EVALUATED = 2_000
"""The most messages that are looked at in one turn for a few that match, without order (MOST_SKIPPED) and with order; a
filter has its own bound (`Filter.at_once`)."""
WIDEST_SCAN = 8192


class Cursor:
    """Position and retries of a group in a queue. The group holds the leases."""

    keeps_order = False
    """Whether messages wait until others are settled: then `finished` must be called."""
    looks_ahead = False
    """Whether messages below the position may wait without having been handed out."""

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
        """Retries from before the last start, which the position has not passed yet."""
        self.serves = subscription.of_topic or subscription.topic
        """The topic that its messages were sent to; for redriven messages not the retry topic that the cursor reads."""
        self.is_awake = False
        self.turn_left = 0
        self.until: int | None = None
        """The first offset that waits until all queues of the topic have passed its growth; None: no offset waits."""
        self.change(subscription)

    def change(self, subscription: Subscription) -> None:
        """Continue at the same position with other tags, another filter or other bounds."""
        self.subscription = subscription
        self._hashes = frozenset(tag_hash(tag) for tag in subscription.tags)
        self._filter = None
        self.refused = ""
        """Why the filter, accepted by an earlier version, cannot be evaluated; then the cursor is paused."""
        if subscription.filter:
            try:
                self._filter = Filter(subscription.filter)
            except InvalidRequest as error:
                self.refused = str(error)
        self.evaluates = self._filter is not None
        """Whether a filter has to be evaluated for each message."""

    def lag(self) -> int:
        """Messages not settled yet; 0 for a broadcast topic, whose lag is counted by each instance's cursor."""
        if self.subscription.mode == "broadcast":
            return 0
        start, end = self._store.bounds(self.topic, self.queue)
        floor, settled = self.progress.floor, self.progress.settled
        if start <= floor or not settled.offsets:
            return max(0, end - max(floor, start) - settled.offsets)
        return max(0, end - start - settled.between(start, end))

    def is_paused(self) -> bool:
        """Whether the cursor reads no further: there are too many gaps to remember, or its filter is refused."""
        if self.refused:
            return True
        settled = self.progress.settled
        # Counting runs is slow, and there are never more runs than offsets.
        return settled.offsets + len(self.retries) >= RUNS_BOUND and len(settled) + len(self.retries) >= RUNS_BOUND

    def is_through(self, offset: int) -> bool:
        """Whether each message below `offset`, where the topic grew, was handed out once, is settled or no longer
        retained: then later messages of the same keys may be delivered from their new queues."""
        start = self._store.bounds(self.topic, self.queue)[0]
        return max(self.next, self.progress.next_unsettled(start)) >= offset

    def take(self, limit: int, now_us: int) -> list[StoredMessage]:
        """Up to `limit` messages to deliver now, retries first; no more is read once they have READ_BYTES.

        Raises the storage's error if no message can be delivered: position and retries are then unchanged.
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

    def take_run(self, limit: int, now_us: int) -> MessageRun | None:
        """Up to `limit` messages to deliver now, as a run; None if some have to be looked at one by one, by `take`.

        Raises the storage's error; position and retries are then unchanged.
        """
        if self._hashes or self._filter is not None or self._ahead or self.is_paused():
            return None
        if self.retries and self.retries[0][0] <= now_us:
            return None
        begin = self.progress.next_unsettled(self.next)
        if self.until is not None:
            limit = min(limit, self.until - begin)
        if self.progress.settled.offsets and self.progress.settled.between(begin, begin + limit):
            return None
        run = self._store.read_run(self.topic, self.queue, begin, limit, READ_BYTES)
        if run is None or 0 < run.expires_us <= now_us:
            return None
        self.next = begin + run.count
        return run

    def _take_ahead(self, taken: list[StoredMessage], limit: int, now_us: int) -> None:
        """Add messages from the position on, until `taken` has `limit` messages, or READ_BYTES."""
        most = MOST_SKIPPED if self._filter is None else self._filter.at_once
        scan, skipped = min(limit, most), 0
        size = _size(taken)
        while len(taken) < limit and not is_full(size, len(taken)) and skipped < most and not self.is_paused():
            wanted, passed = self._take_new(min(limit - len(taken), most - skipped), scan, now_us)
            if not passed:
                break
            taken += wanted
            size += _size(wanted)
            skipped += passed - (0 if self.evaluates else len(wanted))
            if len(taken) >= limit or self.next >= self._store.bounds(self.topic, self.queue)[1]:
                break
            scan = min(WIDEST_SCAN, most, scan * 2)

    def is_behind(self, messages: int) -> bool:
        """Whether more than `messages` messages lie ahead of the position."""
        return self._store.bounds(self.topic, self.queue)[1] - self.progress.next_unsettled(self.next) > messages

    def has_more(self) -> bool:
        """Whether messages lie ahead that may be read now."""
        end = self._store.bounds(self.topic, self.queue)[1]
        end = end if self.until is None else min(end, self.until)
        return self.next < end and not self.is_paused() and self.progress.next_unsettled(self.next) < end

    def may_sleep(self) -> bool:
        """Whether the cursor has nothing to hand out until it is woken: no retry, and no message ahead."""
        return not self.retries and not self.has_more()

    def _take_retries(self, taken: list[StoredMessage], limit: int, now_us: int) -> None:
        """Add due retries until `taken` has `limit` messages, or READ_BYTES."""
        size = 0
        while self.retries and self.retries[0][0] <= now_us and len(taken) < limit and not is_full(size, len(taken)):
            offset = self.retries[0][1]
            found = self._take_one(offset, now_us)
            taken += found
            size += _size(found)
            heapq.heappop(self.retries)
            self.progress.retry_at.pop(offset, None)

    def _take_one(self, offset: int, now_us: int) -> list[StoredMessage]:
        """The message at an offset that was passed before; empty if it is settled, damaged or no longer retained."""
        if self.progress.is_settled(offset):
            return []
        messages = self._store.read(self.topic, self.queue, offset, 1, READ_BYTES)
        if messages and messages[0].offset == offset:
            return self._deliverable(messages, now_us)
        self._settle([(offset, 1)], SettleKind.EXPIRED)
        return []

    def _take_new(self, limit: int, scan: int, now_us: int) -> tuple[list[StoredMessage], int]:
        """(at most `limit` messages to deliver among the next `scan` ones, how many offsets the cursor passed).

        The position moves only after all skipped messages are settled in the storage.
        """
        begin = self.progress.next_unsettled(self.next)
        if self.until is not None and begin >= self.until:
            return [], 0
        messages, end = self._read_tagged(begin, limit, scan) if self._hashes else self._read(begin, limit)
        if self.progress.settled.offsets or self._ahead:
            messages = [m for m in messages if m.offset not in self.progress.settled and m.offset not in self._ahead]
        messages = self._deliverable(messages, now_us)
        if self._filter is not None or self._hashes:
            wanted = [m for m in messages if self._wants(m)]
            wanted_offsets = {m.offset for m in wanted}
            self._leave_out(to_runs(m.offset for m in messages if m.offset not in wanted_offsets))
            messages = wanted
        if self._ahead:
            self._ahead = {offset for offset in self._ahead if offset >= end}
        self.next = end
        return messages, end - begin

    def _read(self, begin: int, limit: int) -> tuple[list[StoredMessage], int]:
        """(the next messages, the offset after them); gaps between them are settled."""
        messages = self._store.read(self.topic, self.queue, begin, limit, READ_BYTES)
        if self.until is not None:
            messages = self._before_until(messages, self.until)
        if not messages:
            return messages, self._pass_dropped(begin)
        end = messages[-1].offset + 1
        if end - begin != len(messages):
            self._settle_gaps(messages, begin)
        return messages, end

    def _pass_dropped(self, begin: int) -> int:
        """The end of what was dropped from `begin` on, where no message follows it; it is settled."""
        start = self._store.bounds(self.topic, self.queue)[0]
        end = start if self.until is None else min(start, self.until)
        if end <= begin:
            return begin
        self._settle(self.progress.unsettled(begin, end), SettleKind.EXPIRED)
        return end

    def _read_tagged(self, begin: int, limit: int, scan: int) -> tuple[list[StoredMessage], int]:
        """(the next messages with one of the subscription's tags, found by the index, the offset after the last one
        looked at); messages with other tags are settled."""
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

    def _between(self, messages: list[StoredMessage], begin: int, end: int) -> list[tuple[int, int]]:
        """The runs of offsets in [begin, end) that are neither among these messages nor settled."""
        runs: list[tuple[int, int]] = []
        for offset in [*[m.offset for m in messages], end]:
            if offset > begin:
                runs += self.progress.unsettled(begin, offset)
            begin = offset + 1
        return runs

    def _leave_out(self, runs: list[tuple[int, int]]) -> None:
        """Settle messages that the group's tags or filter exclude."""
        if runs:
            self._settle(runs, SettleKind.FILTERED)
            self._metrics.filtered += sum([count for _, count in runs])

    def _wants(self, message: StoredMessage) -> bool:
        if self._hashes and decode_payload(message.payload).tag not in self.subscription.tags:
            return False  # another tag has the same hash
        return self._filter is None or self._filter.matches(message.payload)

    def _deliverable(self, messages: list[StoredMessage], now_us: int) -> list[StoredMessage]:
        """The messages without damaged and expired ones, which are settled."""
        for m in messages:
            if m.corrupt or m.expires_us:
                return self._unexpired(self._sound(messages), now_us)
        return messages

    def _sound(self, messages: list[StoredMessage]) -> list[StoredMessage]:
        """The messages without damaged ones, which can never be delivered, and are settled as corrupt."""
        corrupt = [m.offset for m in messages if m.corrupt]
        if not corrupt:
            return messages
        self._settle(to_runs(corrupt), SettleKind.CORRUPT)
        return [m for m in messages if not m.corrupt]

    def _unexpired(self, messages: list[StoredMessage], now_us: int) -> list[StoredMessage]:
        """The messages without expired ones, which are settled: the topic or the producer set their time to live."""
        expired = [m.offset for m in messages if m.expires_us and m.expires_us <= now_us]
        if not expired:
            return messages
        self._settle(to_runs(expired), SettleKind.EXPIRED)
        expired_offsets = set(expired)
        return [m for m in messages if m.offset not in expired_offsets]

    def _settle_gaps(self, messages: list[StoredMessage], expected: int) -> None:
        """Settle offsets that retention or a backlog's bound dropped: otherwise the floor could never pass them."""
        gaps = self._between(messages, expected, messages[-1].offset)
        if gaps:
            self._settle(gaps, SettleKind.EXPIRED)

    def _settle(self, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        self._store.settle_soon(self.subscription.group, self.topic, self.queue, runs, kind)
        if kind is SettleKind.EXPIRED:
            self._metrics.expired += sum([count for _, count in runs])
        for first, count in runs:
            self.finished(range(first, first + count))

    def finished(self, offsets: Iterable[int]) -> None:
        """Note that these offsets are settled; messages that waited for them may be delivered."""

    def come_back(self, offset: int, due_us: int) -> None:
        """Deliver an offset again from `due_us` on."""
        heapq.heappush(self.retries, (due_us, offset))

    def attempts(self, offset: int) -> int:
        """How many attempts at the offset have ended so far without settling it."""
        return self.progress.attempts.get(offset, 0)

    def deaths(self, offset: int) -> int:
        """How many of these attempts ended because the lease ran out."""
        return self.progress.deaths.get(offset, 0)

    def bounds(self, offset: int) -> tuple[int, int]:
        """The max_attempts and max_deaths that hold for the message at an offset: it keeps earlier ones if larger, and
        what was forgiven does not count."""
        subscription = self.subscription
        attempts, deaths = subscription.max_attempts, subscription.max_deaths
        if subscription.earlier:
            messages = self._store.read(self.topic, self.queue, offset, 1, READ_BYTES)
            if messages and messages[0].offset == offset:
                attempts, deaths = subscription.bounds(messages[0].committed_us)
        failures_forgiven, deaths_forgiven = self.forgiven(offset)
        return attempts + failures_forgiven, deaths + deaths_forgiven

    def forgiven(self, offset: int) -> tuple[int, int]:
        """(failures, deaths) at the offset that no longer count, because its key was released since."""
        attempts, deaths = self.progress.forgiven.get(offset, (0, 0))
        return attempts - deaths, deaths

    def holds(self, offset: int) -> bool:
        """Whether the message at an offset that has used up its attempts holds its key instead of being passed."""
        return False

    def hold(self, offset: int) -> None:
        """Note that the key of the message at an offset is held, after the storage has recorded it."""
        raise NotImplementedError

    def interruptions(self, offset: int) -> int:
        """How often the offset was held by a consumer that was told to stop, which counted no attempt."""
        return self.progress.interruptions.get(offset, 0)


def is_full(size: int, count: int) -> bool:
    """Whether one more message of the same size as these would be more than READ_BYTES."""
    return count > 0 and size + size // count > READ_BYTES


def _size(messages: list[StoredMessage]) -> int:
    """The bytes of their payloads."""
    return sum([len(m.payload) for m in messages])
