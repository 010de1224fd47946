"""Withdrawals in the log's memory: those of undecided transactions, and those that wait for their message.

Decisions are entries: WITHDRAWN says that a delayed message gets no place, WITHDRAWAL has the fate of a
withdrawal without a place. Both are in the record of the commit that decided them, so the order of the log
decides between a withdrawal and the release of its message.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from notify.protocol.withdrawal import Fate, Wanted
from notify.storage.log.entry import (
    ENTRY_HEAD,
    ENTRY_SIZE,
    ENTRY_TAIL,
    FLAG_DELAY,
    FLAG_WITHDRAWS,
    Entry,
    EntryKind,
    Fixed,
    each_of,
    message_key,
    message_key_of,
    tail_of,
    topic_of,
    transaction_id_of,
)
from notify.storage.log.frame import Frame
from notify.storage.log.parts import Parts
from notify.storage.log.pending import Asked, Pending
from notify.storage.withdrawals import MOST_UNKNOWN, MOST_WAITING, is_in_time

FORGET_EVERY_US = 60_000_000
MOST_RECENT = 20_000
"""How many withdrawals are remembered with their fates; others are looked up in the index."""


class Waiting(msgspec.Struct, array_like=True, gc=False):
    """A committed withdrawal whose message is undecided, or not stored yet."""

    half: bytes
    """Its entry as a half."""
    wanted: Wanted
    since_us: int
    """Since when it waits; 0: its message is stored but undecided, and the wait has no limit."""


class Withdrawals:
    """The withdrawals that `place` and replay need to know."""

    def __init__(self) -> None:
        self.asked = Asked[Wanted]()
        """The withdrawals of undecided transactions."""
        self.waiting: dict[bytes, list[Waiting]] = {}
        """Withdrawals by the transaction id of the message that they wait for. Only methods of this class change it."""
        self.waiting_count = 0
        self._forgot_us = 0
        self.recent: OrderedDict[bytes, tuple[Fate, Wanted, int, int]] = OrderedDict()
        """The fate of each withdrawal, its request, the number of its topic, and when; by message."""
        self.counts: Counter[Fate] = Counter()
        """How many withdrawals had each fate since the start."""

    @property
    def are_none(self) -> bool:
        """Whether no withdrawal is undecided or waits."""
        return not self.asked and not self.waiting

    @property
    def room(self) -> int:
        """How many more bytes of entries a commit may need, for withdrawals that waited for its messages:
        each withdraws a message and gets an entry itself, and another withdrawal may wait for a replacement."""
        return 2 * ENTRY_SIZE * self.waiting_count

    def note(self, half: bytes, wanted: Wanted, fate: Fate, now_us: int) -> None:
        """Remember the fate of a withdrawal."""
        key = message_key_of(half)
        self.recent.pop(key, None)
        self.recent[key] = fate, wanted, topic_of(half), now_us
        if len(self.recent) > MOST_RECENT:
            self.recent.popitem(last=False)
        if fate is not Fate.WAITING:
            self.counts[fate] += 1

    def wait(self, half: bytes, wanted: Wanted, now_us: int, *, for_ever: bool = False) -> Fate:
        """Let a withdrawal wait, at most one for each message and topic, because only a known message shows which
        topic has the right. `for_ever`: without limit, because its message is stored but undecided."""
        topic = topic_of(half)
        for other in self.waiting.get(wanted.id, ()):
            is_same = other.wanted.number == wanted.number and topic_of(other.half) == topic
            if is_same and is_in_time(other.since_us, now_us):
                return Fate.ALREADY
        most = MOST_WAITING if for_ever else MOST_UNKNOWN
        if self.waiting_count >= most:
            self._forget(now_us)
        if self.waiting_count >= most:
            return Fate.NOT_FOUND
        self.add(Waiting(half, wanted, 0 if for_ever else now_us))
        return Fate.WAITING

    def add(self, waiting: Waiting) -> None:
        """Add a waiting withdrawal."""
        self.waiting.setdefault(waiting.wanted.id, []).append(waiting)
        self.waiting_count += 1

    def is_waiting(self, wanted: Wanted, key: bytes, now_us: int) -> bool:
        """Whether the withdrawal of a key (`message_key`) still waits for its message."""
        return any(
            message_key_of(w.half) == key and is_in_time(w.since_us, now_us) for w in self.waiting.get(wanted.id, ())
        )

    def _forget(self, now_us: int) -> None:
        """Drop withdrawals that have waited too long. It checks all of them, so it runs only now and then."""
        if now_us - self._forgot_us < FORGET_EVERY_US:
            return
        self._forgot_us = now_us
        for transaction_id in [
            i for i, some in self.waiting.items() if not any(is_in_time(w.since_us, now_us) for w in some)
        ]:
            self.for_rolled_back(transaction_id)

    def for_message(self, half: bytes, now_us: int) -> list[Waiting]:
        """Take the withdrawals that wait for a message that now has its place, in the order of their arrival."""
        entry = Entry.of(half)
        some = self.waiting.get(entry.transaction_id)
        if some is None:
            return []
        found = []
        for waiting in [w for w in some if w.wanted.number == entry.message_no]:
            some.remove(waiting)
            self.waiting_count -= 1
            if is_in_time(waiting.since_us, now_us):
                found.append(waiting)
        if not some:
            del self.waiting[entry.transaction_id]
        return found

    def for_rolled_back(self, transaction_id: bytes) -> list[Waiting]:
        """Take the withdrawals that wait for messages of a transaction that was rolled back."""
        some = self.waiting.pop(transaction_id, [])
        self.waiting_count -= len(some)
        return some

    def tails(self) -> Iterator[bytes]:
        """The tails of the entries of messages that wait to replace others, because their payloads are needed."""
        for some in self.waiting.values():
            for waiting in some:
                yield tail_of(waiting.half)

    def replay(self, entries: memoryview, undecided: Mapping[bytes, Pending]) -> None:
        """Replay the entries of a commit. `undecided`: the transactions that are still undecided, by id."""
        for raw in each_of(entries):
            kind, transaction_id = raw[0], transaction_id_of(raw)
            if kind == EntryKind.ROLLBACK:
                self.asked.pop(transaction_id, None)
                self.for_rolled_back(transaction_id)
            elif kind != EntryKind.WITHDRAWN:
                entry = Entry.of(raw)
                wanted = self.asked.taken(raw)
                waits = kind == EntryKind.WITHDRAWAL and entry.offset == Fate.WAITING
                if waits and wanted is not None:
                    half = ENTRY_HEAD.pack(EntryKind.HALF, entry.flags, entry.queue, entry.topic, entry.time_us, 0)
                    pending = undecided.get(wanted.id)
                    for_ever = pending is not None and is_waited_for(pending, wanted.number)
                    self.add(Waiting(half + tail_of(raw), wanted, 0 if for_ever else entry.time_us))
                elif not waits and transaction_id in self.waiting:
                    self.for_message(raw, entry.time_us)


def is_waited_for(pending: Pending, number: int) -> bool:
    """Whether a withdrawal waits for an undecided message without limit. If that message is a withdrawal itself,
    which may wait too, the limit is a day."""
    return number < len(pending.entries) and not pending.entries[number][1] & FLAG_WITHDRAWS


def may_withdraw(withdrawal: int, target: int, any_topic: int | None) -> bool:
    """Whether a message of one topic may withdraw one of another, by their numbers."""
    return withdrawal in (target, any_topic)


def withdrawal_entry(half: bytes, fate: Fate, now_us: int, forced: int) -> bytes:
    """The entry of a withdrawal that is not put into a queue."""
    entry = Entry.of(half)
    flags = entry.flags | forced
    return ENTRY_HEAD.pack(EntryKind.WITHDRAWAL, flags, entry.queue, entry.topic, now_us, fate) + tail_of(half)


def withdrawn_entry(delayed: bytes, now_us: int) -> bytes:
    """The entry that withdraws a message, made from its delayed entry. It has the same place in due order."""
    entry = Entry.of(delayed)
    tail = Fixed.of(tail_of(delayed))._replace(deliver_us=entry.due_us)
    flags = entry.flags & ~FLAG_DELAY
    return ENTRY_HEAD.pack(EntryKind.WITHDRAWN, flags, entry.queue, entry.topic, now_us, 0) + ENTRY_TAIL.pack(*tail)


def delayed_entry_of(
    parts: Parts, frames: Iterable[Frame], entries: list[bytes], transaction_id: bytes, number: int
) -> tuple[bytes, bytes]:
    """The entries of a message as delayed and as withdrawn; each empty if there is none.

    `frames`: frames on their way to the disk; `entries`: later entries.
    """
    delayed = withdrawn = b""
    key = message_key(transaction_id, number)
    for frame in frames:
        of_frame = frame.delayed_of(key, entries)
        delayed, withdrawn = of_frame[0] or delayed, of_frame[1] or withdrawn
    for part in parts.holding(transaction_id):
        if delayed and withdrawn:
            break
        of_part = part.delayed_of(transaction_id, number)
        delayed, withdrawn = delayed or of_part[0], withdrawn or of_part[1]
    return delayed, withdrawn
