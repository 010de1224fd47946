"""Fair delivery: the tenants of a queue take turns, so that one tenant's million does not delay another's ten.

A fair cursor looks ahead. It reads the queue once up to its end, only the index if tenants are keys, and notes each
offset in the lane of its tenant. Messages are handed out by turns of the lanes, and read again for that. Progress is
stored as for every group, so that a restart makes the lanes again from the first offset that is not settled.
"""

from __future__ import annotations

import heapq

import msgspec
import numpy as np
from numpy.typing import NDArray

from notify.errors import NotifyError
from notify.protocol.keys import key_hash
from notify.protocol.limits import fair_header
from notify.protocol.wire import decode_payload
from notify.server.delivery.cursor import READ_BYTES, RUNS_BOUND, Cursor, is_full
from notify.server.delivery.lanes import Lanes, OffsetQueue, Waits
from notify.server.delivery.ordered import OrderedCursor
from notify.server.metrics import Metrics
from notify.storage.groups import SettleKind, Subscription
from notify.storage.progress import to_runs
from notify.storage.queues import Store
from notify.storage.records import StoredMessage

AHEAD_BYTES = 32 << 20
"""The memory for what waits in a queue of a group: at least 4 million messages, and any number of neighbours of one
tenant. Beyond it the queue is read no further until some are settled."""
KEY_BYTES = 256
"""About what a busy key takes in mode ordered, and a tenant with messages behind one."""
ENTRIES_AT_ONCE, MESSAGES_AT_ONCE = 10_000, 1_000
"""How many messages a request looks at: their index, or themselves. Then other work of the loop is done."""
LOOK_US = 10_000_000
"""How long nothing is handed out before the end of the queue is seen: it may move on faster than it is looked at."""
DUE_AT_ONCE = 1_000
"""How many due retries, and messages whose key has become free, a request looks at."""
READ_TOGETHER = 64
"""How many messages are read in the order of their offsets, and not in that of their turns."""
MANY_GAPS = RUNS_BOUND // 2
"""With this many gaps between settled offsets every other message is the oldest waiting one, which closes a gap; with
RUNS_BOUND each is."""


class _Headers(msgspec.Struct):
    """The part of a payload that has the headers."""

    headers: dict[str, str] | None = None


_decode_headers = msgspec.msgpack.Decoder(_Headers).decode
_NOBODY = OffsetQueue()
"""Behind a busy key for which nothing waits; it stays empty."""


class _Read:
    """Messages of a part of the turns while they are read in order of their offsets."""

    __slots__ = ("messages", "offsets", "turns")

    def __init__(self, turns: list[tuple[int, int]]) -> None:
        self.turns = turns
        self.offsets = sorted([offset for offset, _ in turns])
        """Those that are not read yet."""
        self.messages: dict[int, StoredMessage] = {}

    def in_order(self) -> list[StoredMessage]:
        """The messages in the order of the turns."""
        return [self.messages[offset] for offset, _ in self.turns if offset in self.messages]

    def unread(self) -> list[tuple[int, int]]:
        """The turns that are not read, in their order."""
        unread = set(self.offsets)
        return [turn for turn in self.turns if turn[0] in unread]


class FairTurns(Cursor):
    """The part that both fair cursors have in common."""

    looks_ahead = True

    def __init__(self, store: Store, subscription: Subscription, queue: int, metrics: Metrics) -> None:
        self.lanes = Lanes()
        self.header = fair_header(subscription.fair_by)
        """The header that names the tenant; None: the key does."""
        self._left: list[list[tuple[int, int]]] = []
        """Turns for which the last answer had no room, by parts that are read together; at most those of a request."""
        self._looks_since_us = 0
        """Since when it looks ahead without having seen the end; 0: it has."""
        self._is_outrun = False
        """Whether this has lasted for LOOK_US."""
        super().__init__(store, subscription, queue, metrics)

    def is_paused(self) -> bool:
        """Whether only retries are handed out, being too many, or nothing because the filter is refused."""
        return bool(self.refused) or len(self.retries) >= RUNS_BOUND

    def is_through(self, offset: int) -> bool:
        """Whether each message below `offset` is settled or no longer retained."""
        start = self._store.bounds(self.topic, self.queue)[0]
        return self.progress.next_unsettled(start) >= offset

    def is_behind(self, messages: int) -> bool:
        return self.lanes.count > messages or super().is_behind(messages)

    def has_more(self) -> bool:
        if self.refused:
            return False
        waits = self.lanes.has_again() if self.is_paused() else self.lanes.count > 0
        return waits or bool(self._left) or self._can_look_ahead()

    def take_run(self, limit: int, now_us: int) -> None:
        """None: messages of a turn do not lie side by side."""

    def take(self, limit: int, now_us: int) -> list[StoredMessage]:
        """Up to `limit` messages to deliver now, in the order of their tenants' turns.

        None as long as more is to be looked at: the tenants that are found first would have all turns. Only a filter's
        share of time is too small to wait for, and a queue that grows faster than it is looked at.
        """
        if self.refused:
            return []
        self._join_due(now_us)
        if self._can_look_ahead():
            try:
                passed = self._look_at_messages(now_us) if self._reads_messages() else self._look_at_index()
            except NotifyError:
                if not self.lanes.count and not self._left:
                    raise
            else:
                if passed and not self.evaluates and self._must_look_on(now_us):
                    return []
        else:
            self._looks_since_us, self._is_outrun = 0, False
        return self._read_picked(self._picked(limit), limit, now_us)

    # --- looking ahead ----------------------------------------------------------------------------------------

    def _can_look_ahead(self) -> bool:
        """Whether messages lie ahead that may be looked at now."""
        end = self._store.bounds(self.topic, self.queue)[1]
        end = end if self.until is None else min(end, self.until)
        return self.next < end and not self._is_full() and self.progress.next_unsettled(self.next) < end

    def _must_look_on(self, now_us: int) -> bool:
        """Whether nothing is handed out before more was looked at."""
        if not self._can_look_ahead():
            self._looks_since_us, self._is_outrun = 0, False
            return False
        self._looks_since_us = self._looks_since_us or now_us
        self._is_outrun = now_us - self._looks_since_us >= LOOK_US
        return not self._is_outrun

    def _is_full(self) -> bool:
        leaves_out = self._filter is not None or bool(self._hashes)
        return self.lanes.bytes >= AHEAD_BYTES or (leaves_out and len(self.progress.settled) >= MANY_GAPS)

    def _reads_messages(self) -> bool:
        """Whether the index does not say all that is needed."""
        return self.header is not None or self._filter is not None

    def _look_at_index(self) -> bool:
        """Note the tenants of the next messages, by the index; whether there were any."""
        begin = self.progress.next_unsettled(self.next)
        offsets, keys, tags = self._store.read_hashes(self.topic, self.queue, begin, ENTRIES_AT_ONCE)
        if self.until is not None:
            offsets = offsets[: int(np.searchsorted(offsets, self.until))]
            keys, tags = keys[: len(offsets)], tags[: len(offsets)]
        if not len(offsets):
            self.next = self._pass_dropped(begin)
            return self.next > begin
        end = int(offsets[-1]) + 1
        if end - begin != len(offsets):
            self._settle_missing(offsets, begin)
        fresh = np.ones(len(offsets), bool)
        if self.progress.settled.between(begin, end):
            fresh = ~self.progress.settled.mask(offsets)
        if self._ahead:
            fresh &= ~np.isin(offsets, np.fromiter(self._ahead, np.uint64))
        if self._hashes:
            wanted = np.isin(tags, np.fromiter(self._hashes, np.uint32))
            self._leave_out(to_runs(offsets[fresh & ~wanted].tolist()))
            fresh &= wanted
        if self._ahead:
            self._ahead = {offset for offset in self._ahead if offset >= end}
        self.next = end
        self._wait(offsets[fresh], keys[fresh], keys[fresh])
        return True

    def _settle_missing(self, offsets: NDArray[np.uint64], begin: int) -> None:
        """Settle offsets from `begin` on that retention or a backlog's bound dropped."""
        places = np.flatnonzero(offsets[1:] != offsets[:-1] + np.uint64(1))
        gaps = [(begin, int(offsets[0]))]
        gaps += [(int(offsets[place]) + 1, int(offsets[place + 1])) for place in places.tolist()]
        runs = [run for first, end in gaps for run in self.progress.unsettled(first, end)]
        if runs:
            self._settle(runs, SettleKind.EXPIRED)

    def _look_at_messages(self, now_us: int) -> bool:
        """Note the tenants of the next messages, which are read; whether there were any."""
        most = MESSAGES_AT_ONCE if self._filter is None else min(MESSAGES_AT_ONCE, self._filter.at_once)
        messages, passed = self._take_new(most, most, now_us)
        offsets = np.array([m.offset for m in messages], np.uint64)
        keys = np.array([m.key_hash for m in messages], np.uint64)
        self._wait(offsets, keys, np.array([self._tenant(m) for m in messages], np.uint64))
        return passed > 0

    def _wait(self, offsets: NDArray[np.uint64], keys: NDArray[np.uint64], tenants: NDArray[np.uint64]) -> None:
        """Have messages wait for the turns of their tenants."""
        self.lanes.add_each(offsets, tenants)

    def _tenant(self, message: StoredMessage) -> int:
        """The hash of a message's tenant; 0 if it names none."""
        if self.header is None:
            return message.key_hash
        if message.corrupt:
            return 0
        return key_hash((_decode_headers(message.payload).headers or {}).get(self.header))

    def _tenant_at(self, offset: int) -> int:
        """The hash of the tenant of the message at an offset; 0 also if it is no longer retained."""
        if self.header is None:
            offsets, keys, _ = self._store.read_hashes(self.topic, self.queue, offset, 1)
            return int(keys[0]) if len(offsets) and int(offsets[0]) == offset else 0
        messages = self._store.read(self.topic, self.queue, offset, 1, READ_BYTES)
        return self._tenant(messages[0]) if messages and messages[0].offset == offset else 0

    def _join_due(self, now_us: int) -> None:
        """Have due retries wait for the turns of their tenants."""
        for _ in range(DUE_AT_ONCE):
            if not self.retries or self.retries[0][0] > now_us:
                return
            offset = self.retries[0][1]
            self.lanes.add_again(self._tenant_at(offset), offset)
            heapq.heappop(self.retries)

    # --- handing out ------------------------------------------------------------------------------------------

    def _picked(self, limit: int) -> list[list[tuple[int, int]]]:
        """(offset, number of its lane) of the next messages, by parts that are read together: at first those for which
        the last answer had no room, and which may be more than `limit`."""
        parts, self._left = self._left, []
        turns = self._next_turns(max(0, limit - sum(map(len, parts))))
        return parts + [turns[at : at + READ_TOGETHER] for at in range(0, len(turns), READ_TOGETHER)]

    def _next_turns(self, limit: int) -> list[tuple[int, int]]:
        if self.is_paused():
            return self.lanes.take_again(limit)
        gaps = len(self.progress.settled)
        if gaps < MANY_GAPS:
            return self.lanes.take(limit)
        lowest = self.lanes.take_lowest(limit if gaps >= RUNS_BOUND else (limit + 1) // 2)
        return lowest + self.lanes.take(limit - len(lowest))

    def _read_picked(self, parts: list[list[tuple[int, int]]], limit: int, now_us: int) -> list[StoredMessage]:
        """Up to `limit` messages of these turns, in this order; those that are not read are the first of the next
        answer. A part is read to its end before the next one: otherwise its highest offsets could wait for ever."""
        taken: list[StoredMessage] = []
        size = 0
        try:
            while parts and len(taken) < limit and not is_full(size, len(taken)):
                read = _Read(parts[0])
                try:
                    self._read_together(read, limit - len(taken), size, len(taken), now_us)
                except NotifyError:
                    if not taken and not read.messages:
                        raise
                    limit = 0
                finally:
                    parts[0] = read.unread()
                taken += read.in_order()
                size = sum([len(m.payload) for m in taken])
                if not parts[0]:
                    del parts[0]
        finally:
            self._left = parts
        return taken

    def _read_together(self, read: _Read, room: int, size: int, count: int, now_us: int) -> None:
        """Read messages of a part, neighbours at once: as many as there is room for, after `count` of `size` bytes."""
        retry_at = self.progress.retry_at
        while read.offsets and room > 0 and not is_full(size, count):
            first, run = read.offsets[0], 1
            while run < min(room, len(read.offsets)) and read.offsets[run] == first + run:
                run += 1
            messages, passed = self._read_run(first, run, READ_BYTES - size, now_us)
            if retry_at:
                for offset in read.offsets[:passed]:
                    retry_at.pop(offset, None)
            del read.offsets[:passed]
            read.messages |= {m.offset: m for m in messages}
            size += sum([len(m.payload) for m in messages])
            room -= len(messages)
            count += len(messages)

    def _read_run(self, first: int, count: int, most_bytes: int, now_us: int) -> tuple[list[StoredMessage], int]:
        """(the messages that can be delivered of `count` offsets from the first on, how many of these were read)."""
        if self.progress.is_settled(first):
            return [], 1
        messages = self._store.read(self.topic, self.queue, first, count, most_bytes)
        messages = [m for m in messages if m.offset < first + count]
        passed = messages[-1].offset + 1 - first if messages else count
        if len(messages) < passed and (gone := self._between(messages, first, first + passed)):
            self._settle(gone, SettleKind.EXPIRED)
        if self.progress.settled.offsets:
            messages = [m for m in messages if m.offset not in self.progress.settled]
        messages = self._deliverable(messages, now_us)
        if self._filter is not None or self._hashes:  # they may have changed since the message was looked at
            wanted = [m for m in messages if self._wants(m)]
            kept = {m.offset for m in wanted}
            self._leave_out(to_runs([m.offset for m in messages if m.offset not in kept]))
            messages = wanted
        return messages, passed

    # --- for people -------------------------------------------------------------------------------------------

    def uneven(self) -> str:
        """Why turns are not even now, as the end of a sentence about the queue; "" if they are."""
        if self._is_full() and self.next < self._store.bounds(self.topic, self.queue)[1]:
            return "is read no further until some of its messages are settled: too much waits for turns of tenants."
        if self._is_outrun:
            return "gives turns among what it has read so far: messages come faster than their tenants are read."
        gaps = len(self.progress.settled)
        if gaps >= MANY_GAPS:
            share = "all" if gaps >= RUNS_BOUND else "half"
            return f"gives {share} of its turns to the oldest messages: too many later ones are already settled."
        return ""

    def waits(self) -> dict[int, Waits]:
        """The messages that wait, by lane: the hash of a tenant (0: none is named), or below 0 for several."""
        return self.lanes.waiting()

    def oldest(self, waits: Waits) -> tuple[str | None, int]:
        """(the tenant's name, when the message was committed) of what waits the longest; it is read.

        (None, 0) if it is no longer retained.
        """
        messages = self._store.read(self.topic, self.queue, waits.first, 1, READ_BYTES)
        if not messages or messages[0].offset != waits.first or messages[0].corrupt:
            return None, 0
        payload = decode_payload(messages[0].payload)
        name = payload.key if self.header is None else (payload.headers or {}).get(self.header)
        return name, messages[0].committed_us


class FairCursor(FairTurns):
    """Mode shared: tenants take turns, and their messages have no order."""


class FairOrderedCursor(FairTurns, OrderedCursor):
    """Mode ordered: of each key one message at a time waits in a lane or is in flight, the others wait behind it."""

    def __init__(self, store: Store, subscription: Subscription, queue: int, metrics: Metrics) -> None:
        self._held_back: dict[int, Waits] = {}
        """The messages behind busy keys, by the hash of its tenant: for people."""
        super().__init__(store, subscription, queue, metrics)

    def has_more(self) -> bool:
        return super().has_more() or (bool(self._turn_come) and not self.refused)

    def _is_full(self) -> bool:
        size = KEY_BYTES * (len(self._behind) + len(self._held_back)) + 8 * (self._waiting + self._behind_held)
        return super()._is_full() or self.lanes.bytes + size >= AHEAD_BYTES or self.is_held_up()

    def _join_due(self, now_us: int) -> None:
        for _ in range(min(DUE_AT_ONCE, len(self._turn_come))):
            offset = self._turn_come[0]
            tenant = self._key_of.get(offset, 0) if self.header is None else self._tenant_at(offset)
            self.lanes.add_again(tenant, offset)
            self._turn_come.popleft()
            self._note_held_back(tenant, offset, -1)
        super()._join_due(now_us)

    def _wait(self, offsets: NDArray[np.uint64], keys: NDArray[np.uint64], tenants: NDArray[np.uint64]) -> None:
        for offset, key, tenant in zip(offsets.tolist(), keys.tolist(), tenants.tolist(), strict=True):
            if self._is_first(offset, key, tenant):
                self.lanes.add(tenant, offset, 1)

    def _may_go(self, message: StoredMessage) -> bool:
        return self._is_first(message.offset, message.key_hash, self._tenant(message))

    def _is_first(self, offset: int, key: int, tenant: int) -> bool:
        """Whether nothing of the key is in flight or waits; otherwise the offset waits behind it."""
        if not key:
            return True
        behind = self._behind.get(key)
        if behind is None:
            self._behind[key] = _NOBODY
            self._key_of[offset] = key
            return True
        if behind is _NOBODY:
            behind = self._behind[key] = OffsetQueue()
        behind.append(offset)
        if key in self._set_aside:
            self._behind_held += 1
        else:
            self._waiting += 1
        self._note_held_back(tenant, offset, 1)
        return False

    def _note_held_back(self, tenant: int, offset: int, change: int) -> None:
        count, first = self._held_back.get(tenant, Waits(0, offset))
        if count + change > 0:
            # The oldest of them is the next one of some key, or nearly so.
            self._held_back[tenant] = Waits(count + change, first if change > 0 else max(first, offset))
        else:
            self._held_back.pop(tenant, None)
        if not self._waiting and not self._behind_held:
            self._held_back.clear()

    def waits(self) -> dict[int, Waits]:
        waits = super().waits()
        for tenant, back in self._held_back.items():
            number = self.lanes.number_of(tenant)
            count, first = waits.get(number, Waits(0, back.first))
            waits[number] = Waits(count + back.messages, first)
        return waits
