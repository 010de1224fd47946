"""Places committed messages: in their queues, or among the delayed ones. Withdrawals take such a place
away from a message, and may have no place themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from notify.protocol.withdrawal import ANY_TOPIC, Dedupe, Fate, Wanted
from notify.storage.log.entry import (
    ENTRY_HEAD,
    ENTRY_HEAD_SIZE,
    FLAG_DEDUPE,
    FLAG_FORCED,
    FLAG_TTL,
    FLAG_WITHDRAWS,
    HALF,
    Entry,
    EntryKind,
    Fixed,
    message_key,
    message_key_of,
    topic_of,
    transaction_id_of,
)
from notify.storage.log.frame import Frame
from notify.storage.log.journal import Journal
from notify.storage.log.lookup import entries_of
from notify.storage.log.queues import Queue
from notify.storage.log.records import RecordType
from notify.storage.log.state import LogState
from notify.storage.log.withdrawals import (
    delayed_entry_of,
    is_waited_for,
    may_withdraw,
    withdrawal_entry,
    withdrawn_entry,
)

MOST_ENTRIES = 0xFFFF
_QUEUE, _DELAYED = int(EntryKind.QUEUE), int(EntryKind.DELAYED)


def place(
    state: LogState,
    journal: Journal,
    halves: Sequence[bytes],
    now_us: int,
    entries: list[bytes],
    queues: list[Queue | None],
    forced: bool = False,
) -> None:
    """Place messages that commit now, and add their entries to those of the next record.

    `halves`: their entries as halves. `entries`, `queues`: the record's entries, and the queue of each; None if the
    message is delayed. `forced`: whether an administrator decided the transactions.
    """
    if concerns_others(state, halves):
        Withdrawing(state, journal, halves, now_us, entries, queues, forced).place()
    else:
        _place(state, journal.open, halves, now_us, entries, queues, forced)


def concerns_others(state: LogState, halves: Iterable[bytes]) -> bool:
    """Whether one of these messages withdraws another one, has a dedupe key, or has a withdrawal waiting for it."""
    if state.withdrawals.are_none and not state.dedupes.asked:
        return False
    waiting = state.withdrawals.waiting
    return any(half[1] & (FLAG_WITHDRAWS | FLAG_DEDUPE) or transaction_id_of(half) in waiting for half in halves)


def append_commit(
    journal: Journal, kind: RecordType, data: bytes, entries: list[bytes], queues: list[Queue | None], point: str
) -> None:
    """Append the record of a commit. Entries beyond the largest count of a record, which only withdrawals cause, go
    into further records of the same frame."""
    if len(entries) <= MOST_ENTRIES:
        journal.append(kind, data, entries, queues, point)
        return
    journal.append(kind, data, entries[:MOST_ENTRIES], queues[:MOST_ENTRIES], point)
    for first in range(MOST_ENTRIES, len(entries), MOST_ENTRIES):
        last = first + MOST_ENTRIES
        journal.append(RecordType.OUTCOME, b"", entries[first:last], queues[first:last], point)


def not_to_come(
    state: LogState,
    journal: Journal,
    transaction_id: bytes,
    now_us: int,
    entries: list[bytes],
    queues: list[Queue | None],
    forced: bool,
) -> None:
    """Roll back a transaction's withdrawals, and end the withdrawals that wait for its messages."""
    state.withdrawals.asked.pop(transaction_id, None)
    state.dedupes.asked.pop(transaction_id, None)
    ending = Withdrawing(state, journal, (), now_us, entries, queues, forced)
    for waiting in state.withdrawals.for_rolled_back(transaction_id):
        ending.end(waiting.half, waiting.wanted, Fate.NOT_FOUND)


def _place(
    state: LogState,
    frame: Frame,
    halves: Iterable[bytes],
    now_us: int,
    entries: list[bytes],
    queues: list[Queue | None],
    forced: bool,
) -> None:
    before = len(frame.entries)
    first = before + len(entries)
    topics, times = state.topics_by_id.rows, state.times
    for half in halves:
        flags, queue_no, topic_id, deliver_us = HALF.unpack_from(half)
        if forced:
            flags |= FLAG_FORCED
        tail = half[ENTRY_HEAD_SIZE:]
        if deliver_us:
            entry = ENTRY_HEAD.pack(_DELAYED, flags, queue_no, topic_id, now_us, 0) + tail
            due_us = Entry.of(entry).due_us
            # A message due later than the last release may wait. One due earlier, after a clock was set back, must not.
            if due_us > max(now_us, times.released[0]):
                position = Fixed.of(tail).position
                times.add(due_us, position, entry)
                frame.delayed.append((due_us, position, before + len(entries)))
                entries.append(entry)
                queues.append(None)
                continue
        topic = topics[topic_id]
        assert topic is not None  # a topic that was deleted keeps its row
        queue = topic.queue_now(queue_no, tail) if topic.grown else topic.queues[queue_no]
        offset = queue.next_offset
        queue.next_offset = offset + 1
        flags &= FLAG_TTL | FLAG_FORCED
        entries.append(ENTRY_HEAD.pack(_QUEUE, flags, queue.number, topic_id, now_us, offset) + tail)
        queues.append(queue)
    if before + len(entries) > first:
        frame.commits.append((now_us, first, before + len(entries)))


class Withdrawing:
    """Places messages among which withdrawals may be, or messages that withdrawals wait for."""

    def __init__(
        self,
        state: LogState,
        journal: Journal,
        halves: Sequence[bytes],
        now_us: int,
        entries: list[bytes],
        queues: list[Queue | None],
        forced: bool,
    ) -> None:
        """The arguments are those of `place`."""
        self._state = state
        self._withdrawals = state.withdrawals
        self._journal = journal
        self._halves = halves
        self._now_us = now_us
        self._entries = entries
        self._queues = queues
        self._forced = forced
        any_topic = state.topics.get(ANY_TOPIC)
        self._any_topic = None if any_topic is None else any_topic.id
        self._places: dict[bytes, int] | None = None
        """The number of each message among the halves; built on first use."""

    def place(self) -> None:
        run: list[bytes] = []
        for number, half in enumerate(self._halves):
            withdraws = half[1] & (FLAG_WITHDRAWS | FLAG_DEDUPE)
            if not withdraws and transaction_id_of(half) not in self._withdrawals.waiting:
                run.append(half)
                continue
            self._place_all(run)
            run = []
            if withdraws & FLAG_WITHDRAWS:
                self._place_withdrawal(number, half)
            elif withdraws:
                self._place_one_of_a_key(half)
            else:
                self._place_all([half])
                self._end_waiting_for(half, is_placed=True)
        self._place_all(run)

    def _place_all(self, halves: Sequence[bytes]) -> None:
        if halves:
            frame = self._journal.open
            _place(self._state, frame, halves, self._now_us, self._entries, self._queues, self._forced)

    def _place_none(self, half: bytes, fate: Fate) -> None:
        """Add the entry of a message without a place."""
        forced = FLAG_FORCED if self._forced else 0
        self._entries.append(withdrawal_entry(half, fate, self._now_us, forced))
        self._queues.append(None)

    def _delayed(self, transaction_id: bytes, number: int) -> tuple[bytes, bytes]:
        """The entries of a message as delayed and as withdrawn; each empty if there is none."""
        frames = self._journal.on_their_way()
        return delayed_entry_of(self._state.parts, frames, self._entries, transaction_id, number)

    def _place_withdrawal(self, number: int, half: bytes) -> None:
        wanted = self._withdrawals.asked.taken(half)
        if wanted is None:
            self._place_all([half])  # damage took its request: a replacement is delivered as an ordinary message
            return
        fate = self._fate(number, half, wanted)
        self.end(half, wanted, fate)

    def _place_one_of_a_key(self, half: bytes) -> None:
        """Place a message with a dedupe key, unless another message of the key stays pending."""
        state = self._state
        dedupe = state.dedupes.asked.taken(half)
        other = b"" if dedupe is None else self._pending(topic_of(half), dedupe)
        if dedupe is not None and other and not dedupe.last:
            state.dedupes.collapsed += 1
            self._place_none(half, Fate.COLLAPSED)
            self._end_waiting_for(half, is_placed=False)
            return
        if other:
            state.dedupes.collapsed += 1
            self._withdraw(other)
        self._place_all([half])
        if dedupe is not None and self._entries[-1][0] == EntryKind.DELAYED:
            state.dedupes.note(self._entries[-1], dedupe, state.times.released)
        self._end_waiting_for(half, is_placed=True)

    def _pending(self, topic: int, dedupe: Dedupe) -> bytes:
        """The entry of the message of a key that is still delayed; empty if there is none."""
        state = self._state
        one = state.dedupes.pending.get((topic, dedupe.key_hash))
        if one is None or one.moment <= state.times.released:
            return b""
        delayed, withdrawn = self._delayed(one.id, one.number)
        return b"" if withdrawn else delayed

    def _fate(self, number: int, half: bytes, wanted: Wanted) -> Fate:
        state, withdrawals = self._state, self._withdrawals
        own_topic = topic_of(half)
        pending = state.pending.by_id.get(wanted.id)
        if pending is not None:
            if wanted.number >= len(pending.entries):
                return Fate.NOT_FOUND
            target = pending.entries[wanted.number]
            if not may_withdraw(own_topic, topic_of(target), self._any_topic):
                return Fate.NOT_FOUND
            return withdrawals.wait(half, wanted, self._now_us, for_ever=is_waited_for(pending, wanted.number))
        place = self._place_of(wanted)
        if place > number:
            if not may_withdraw(own_topic, topic_of(self._halves[place]), self._any_topic):
                return Fate.NOT_FOUND
            return withdrawals.wait(half, wanted, self._now_us, for_ever=True)
        delayed, withdrawn = self._delayed(wanted.id, wanted.number)
        if delayed and not may_withdraw(own_topic, topic_of(delayed), self._any_topic):
            return Fate.NOT_FOUND
        if withdrawn:
            return Fate.ALREADY
        if not delayed:
            outcome = state.parts.outcome(wanted.id)
            if outcome is None:
                return withdrawals.wait(half, wanted, self._now_us)
            return Fate.TOO_LATE if outcome and not self._is_collapsed(wanted) else Fate.NOT_FOUND
        return self._withdraw(delayed)

    def _is_collapsed(self, wanted: Wanted) -> bool:
        """Whether a committed message was never to be delivered, because another one of its dedupe key was pending."""
        key = message_key(wanted.id, wanted.number)
        entries = [*entries_of(self._state, self._journal, wanted.id), *self._entries]
        of_message = [Entry.of(entry) for entry in entries if message_key_of(entry) == key]
        return any(entry.kind == EntryKind.WITHDRAWAL and entry.offset == Fate.COLLAPSED for entry in of_message)

    def _place_of(self, wanted: Wanted) -> int:
        """The number of a message among the halves that are placed now; -1 if it is not among them."""
        if self._places is None:
            self._places = {message_key_of(half): number for number, half in enumerate(self._halves)}
        return self._places.get(message_key(wanted.id, wanted.number), -1)

    def _withdraw(self, delayed: bytes) -> Fate:
        """Withdraw a delayed message if it is not released."""
        entry, times = Entry.of(delayed), self._state.times
        moment = entry.due_us, entry.position
        if moment <= times.released:
            return Fate.TOO_LATE
        times.withdraw(*moment)
        frame = self._journal.open
        frame.delayed.append((*moment, len(frame.entries) + len(self._entries)))
        self._entries.append(withdrawn_entry(delayed, self._now_us))
        self._queues.append(None)
        return Fate.WITHDRAWN

    def end(self, half: bytes, wanted: Wanted, fate: Fate) -> None:
        """Record the fate of a withdrawal. Only a replacement in time gets a place.

        The same follows for the withdrawals that wait for this one, and so on, in a loop, because a sender may have
        chained any number of them.
        """
        ending = [(half, wanted, fate)]
        while ending:
            half, wanted, fate = ending.pop()
            self._withdrawals.note(half, wanted, fate, self._now_us)
            is_placed = fate is Fate.WITHDRAWN and wanted.replaces
            if is_placed:
                self._place_all([half])
            else:
                self._place_none(half, fate)
            if fate is not Fate.WAITING:
                ending += reversed(self._decided(half, is_placed))

    def _end_waiting_for(self, half: bytes, *, is_placed: bool) -> None:
        """Decide the withdrawals that wait for a message. `is_placed`: whether the last entry is the message's."""
        for withdrawal in self._decided(half, is_placed):
            self.end(*withdrawal)

    def _decided(self, half: bytes, is_placed: bool) -> list[tuple[bytes, Wanted, Fate]]:
        """The withdrawals that waited for a message, each with its fate. The first one with the right withdraws it.
        `is_placed`: whether the last entry is the message's; otherwise it has none."""
        decided = []
        placed = self._entries[-1] if is_placed else b""
        is_withdrawn = False
        for waiting in self._withdrawals.for_message(half, self._now_us):
            if not placed or not may_withdraw(topic_of(waiting.half), topic_of(placed), self._any_topic):
                fate = Fate.NOT_FOUND
            elif is_withdrawn:
                fate = Fate.ALREADY
            else:
                fate = self._withdraw(placed) if placed[0] == EntryKind.DELAYED else Fate.TOO_LATE
                is_withdrawn = fate is Fate.WITHDRAWN
            decided.append((waiting.half, waiting.wanted, fate))
        return decided
