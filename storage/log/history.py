"""The state and the history of transactions and messages, for administrators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from notify.storage.groups import SettleKind, Settlement
from notify.storage.log.disk import Disk
from notify.storage.log.entry import Entry, EntryKind
from notify.storage.log.journal import Journal
from notify.storage.log.lookup import entries_of, state_of_pending
from notify.storage.log.payloads import Payloads
from notify.storage.log.pending import Pending
from notify.storage.log.reader import Reader
from notify.storage.log.records import Progressed, progressed, records
from notify.storage.log.recovery import walk
from notify.storage.log.segments import Segment, Segments
from notify.storage.log.state import LogState
from notify.storage.records import InDoubt, State, Transaction
from notify.storage.transactions import without_bodies_beyond

MOST_SEARCH_SECONDS = 0.08
"""The CPU time that a search for settlements may use: enough for some 70 MiB of log, less if frames are small."""


class History:
    """Answers from the index, or from the records if the index does not know."""

    def __init__(
        self, state: LogState, journal: Journal, disk: Disk, segments: Segments, payloads: Payloads, reader: Reader
    ) -> None:
        self._state = state
        self._journal = journal
        self._disk = disk
        self._segments = segments
        self._payloads = payloads
        self._reader = reader

    async def transaction(self, transaction_id: bytes) -> Transaction | None:
        return self._transaction(transaction_id)

    def _transaction(self, transaction_id: bytes) -> Transaction | None:
        pending = self._state.pending.by_id.get(transaction_id)
        entries = entries_of(self._state, self._journal, transaction_id)
        stored = [e for e in entries if e[0] == EntryKind.HALF]
        ended = [e for e in entries if e[0] not in (EntryKind.HALF, EntryKind.CARRY)]
        rolled_back = bool(ended) and ended[0][0] == EntryKind.ROLLBACK  # it has one entry, for the first message
        placed = [e for e in ended if e[0] != EntryKind.WITHDRAWN] or ended
        shown = [self._payloads.message(e) for e in (stored if rolled_back and stored else placed or stored)]
        if pending is not None:
            return Transaction(
                transaction_id,
                pending.producer.group,
                state_of_pending(pending),
                pending.stored_us,
                0,
                pending.producer.source,
                pending.producer.instance,
                pending.attempts,
                pending.next_check_us,
                shown,
            )
        if not ended:
            return None
        outcome = Entry.of(ended[0])
        return Transaction(
            transaction_id,
            self._state.producer_group_of(ended[0]) or "",
            State.ROLLED_BACK if rolled_back else State.COMMITTED,
            Entry.of(stored[0]).time_us if stored else outcome.time_us,
            outcome.time_us,
            messages=shown,
            forced=outcome.is_forced,
        )

    async def in_doubt(self) -> InDoubt:
        parked = 0
        oldest: Pending | None = None
        for p in self._state.pending.by_id.values():  # the oldest first
            if p.parked:
                parked += 1
            elif oldest is None:
                oldest = p
        prepared = len(self._state.pending.by_id) - parked
        if oldest is None:
            return InDoubt(prepared, parked)
        return InDoubt(prepared, parked, oldest.stored_us, oldest.producer.group)

    async def undecided(
        self,
        state: State | None,
        producer_group: str | None,
        older_than_us: int | None,
        limit: int,
        most_bytes: int | None = None,
    ) -> list[Transaction]:
        matching = []
        for p in self._state.pending.by_id.values():
            if state is not None and state_of_pending(p) != state:
                continue
            if producer_group is not None and p.producer.group != producer_group:
                continue
            if older_than_us is not None and p.stored_us > older_than_us:
                continue
            matching.append(p)
            if len(matching) >= limit:
                break
        shown = map(self._transaction, [p.id for p in matching])  # one by one, because their payloads are read
        return without_bodies_beyond((t for t in shown if t is not None), most_bytes)

    async def settlements(self, topic: str, queue: int, offset: int) -> tuple[list[Settlement], bool]:
        state = self._state
        where = state.queue(topic, queue)
        entry = self._reader.entry_at(topic, queue, offset)
        if entry is None:
            return [], False
        awaited: dict[str, int] = {}
        for group, name in state.subscriptions:
            if name == topic:
                progress = state.group_progress(group, where.topic.id, queue)
                ends = progress.attempts.get(offset, 0) + progress.interruptions.get(offset, 0)
                if progress.is_settled(offset) or ends:
                    awaited[group] = ends or -1
        if not awaited:
            return [], True
        # The entry lies in its part's segment; its payload may be older.
        start = max(state.parts[state.parts.number_of(where.key, offset)].base, entry.position)
        place = Place(where.topic.id, queue, offset, start)
        return await asyncio.to_thread(find_settlements, self._disk, self._segments.all(), place, awaited)


# --- the settlements of one message -------------------------------------------------------------------------------


class Place(NamedTuple):
    """A message in a queue, and the position in the log after which its settlements follow."""

    topic: int
    queue: int
    offset: int
    start: int


def find_settlements(
    disk: Disk,
    segments: list[Segment],
    place: Place,
    awaited: dict[str, int],
    worked: Callable[[], float] = time.thread_time,
) -> tuple[list[Settlement], bool]:
    """The settlements of the message at `place`, from the records after it: an index would cost deliveries.

    `awaited`: the number of attempts and interruptions by group, -1 for a group that has settled it; reading ends once
    all of these were found. The second value is False if it ended early: after MOST_SEARCH_SECONDS, or at a segment
    that is gone.
    `worked`: a clock in seconds of this thread's work. Takes no part in the store's state, so it may run in any thread.
    """
    met: list[Settlement] = []
    left = dict(awaited)
    until = worked() + MOST_SEARCH_SECONDS
    for segment in segments:
        if not left or worked() > until:
            break
        if segment.sealed_end and segment.sealed_end <= place.start:
            continue
        for time_us, record in _progress(disk, segment, place.start, lambda: worked() > until):
            if (record.topic, record.queue) != (place.topic, place.queue):
                continue
            if isinstance(record.what, str):  # ATTEMPTS
                tried = [
                    settlement
                    for attempt in record.runs
                    if attempt[0] == place.offset
                    and (settlement := Settlement.of_attempt(record.group, time_us, attempt)) is not None
                ]
                met += tried
                if tried and 0 <= left.get(record.group, -1) <= tried[-1].attempts + tried[-1].interruptions:
                    del left[record.group]
            elif any(first <= place.offset < first + count for first, count in record.runs):
                met.append(Settlement(record.group, SettleKind(record.what), time_us))
                left.pop(record.group, None)
            if not left:
                break
    return met, not left


def _progress(
    disk: Disk, segment: Segment, start: int, is_over: Callable[[], bool]
) -> Iterator[tuple[int, Progressed]]:
    """The records of progress in a segment, with the time of each; empty if the segment was dropped meanwhile."""
    try:
        fd = disk.open(segment.name)
    except FileNotFoundError:
        return
    try:
        again = Segment(segment.base, segment.name, fd, segment.created_us)
        again.sealed_end = segment.sealed_end
        for frame in walk(disk, again, start, not again.sealed_end, []):
            if is_over():
                return
            for record in records(frame.body):
                for progress in progressed(record.kind, record.data):
                    yield frame.time_us, progress
    finally:
        disk.close(fd)
