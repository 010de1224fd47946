"""Transactions and messages as an administrator asks for them: how they stand, and what became of them."""

from __future__ import annotations

import asyncio

from notify.storage.groups import Settlement
from notify.storage.log import settlements
from notify.storage.log.disk import Disk
from notify.storage.log.entry import Entry, EntryKind
from notify.storage.log.journal import Journal
from notify.storage.log.lookup import entries_of, state_of_pending
from notify.storage.log.payloads import Payloads
from notify.storage.log.pending import Pending
from notify.storage.log.reader import Reader
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState
from notify.storage.records import InDoubt, State, Transaction
from notify.storage.transactions import without_bodies_beyond


class History:
    """Answers from the index, and where that does not say, from the records."""

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
        rolled_back = bool(ended) and ended[0][0] == EntryKind.ROLLBACK  # which has one entry, for its first message
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
        shown = map(self._transaction, [p.id for p in matching])  # one after the other: their payloads are read
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
        place = settlements.Place(where.topic.id, queue, offset, start)
        return await asyncio.to_thread(settlements.search, self._disk, self._segments.all(), place, awaited)
