"""Records outcomes by compare and set: the first recorded outcome stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from notify.storage.log.entry import ENTRY_HEAD, ENTRY_SIZE, FLAG_FORCED, HALF, EntryKind, tail_of
from notify.storage.log.halves import ENTRIES_PER_RECORD
from notify.storage.log.journal import Journal
from notify.storage.log.lookup import state_of, state_of_pending
from notify.storage.log.placing import append_commit, not_to_come, place
from notify.storage.log.queues import Queue
from notify.storage.log.records import RecordType
from notify.storage.log.state import LogState
from notify.storage.records import Decided, State
from notify.storage.transactions import NO_SHARDS, NO_TOKENS

_ROLLBACK = int(EntryKind.ROLLBACK)


class Outcomes:
    """Appends OUTCOME records, and returns the states of transactions."""

    def __init__(self, state: LogState, journal: Journal) -> None:
        self._state = state
        self._journal = journal

    async def decide(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
        shards: Mapping[bytes, str] = NO_SHARDS,
    ) -> list[Decided]:
        results = self.decide_soon(outcomes, now_us, forced, tokens)
        await self._journal.sync(more_comes=True)
        return results

    def decide_soon(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
    ) -> list[Decided]:
        """`decide` without the wait."""
        state, journal = self._state, self._journal
        by_id = state.pending.by_id
        undecided = [by_id.get(outcome[0]) for outcome in outcomes]
        size = sum([len(pending.entries) for pending in undecided if pending is not None])
        journal.reserve(4096 + 2 * ENTRY_SIZE * size + state.withdrawals.room)
        results: list[Decided] = []
        halves: list[bytes] = []
        """The entries of messages whose transactions commit, and that have no place yet."""
        entries: list[bytes] = []
        queues: list[Queue | None] = []
        live = journal.open.part
        numbers = state.producer_numbers
        committed = State.COMMITTED
        committed_result = Decided(True, committed, True)
        rolled_back_result = Decided(True, State.ROLLED_BACK, True)
        for (transaction_id, group, outcome), pending in zip(outcomes, undecided, strict=True):
            if pending is not None and group is not None and pending.producer.group != group:
                results.append(Decided(True, state_of_pending(pending), foreign=True))
                continue
            if tokens and pending is not None and pending.token != tokens.get(transaction_id, pending.token):
                results.append(Decided(True, state_of_pending(pending), stale=True))
                continue
            # An earlier outcome in this request decided it.
            if pending is None or by_id.pop(transaction_id, None) is None:
                results.append(self._decided_before(transaction_id, group))
                continue
            live.decided[transaction_id] = numbers.get(pending.producer.group, 0)
            if outcome is committed:
                halves += pending.entries
                results.append(committed_result)
            else:
                place(state, journal, halves, now_us, entries, queues, forced)
                halves = []
                first = pending.entries[0]
                _, queue_no, topic_id, _ = HALF.unpack_from(first)
                head = ENTRY_HEAD.pack(_ROLLBACK, FLAG_FORCED if forced else 0, queue_no, topic_id, now_us, 0)
                entries.append(head + tail_of(first))
                queues.append(None)
                if state.dedupes.asked or not state.withdrawals.are_none:
                    not_to_come(state, journal, transaction_id, now_us, entries, queues, forced)
                live.rolled_back.add(transaction_id)
                results.append(rolled_back_result)
            if len(entries) + len(halves) > ENTRIES_PER_RECORD:
                place(state, journal, halves, now_us, entries, queues, forced)
                halves = []
                append_commit(journal, RecordType.OUTCOME, b"", entries, queues, "outcome")
                entries, queues = [], []
        if halves:
            place(state, journal, halves, now_us, entries, queues, forced)
        if entries:
            append_commit(journal, RecordType.OUTCOME, b"", entries, queues, "outcome")
        return results

    def _decided_before(self, transaction_id: bytes, group: str | None) -> Decided:
        state = state_of(self._state, transaction_id)
        if state is None:
            return Decided(False)
        owner = None if group is None else self._state.group_of(transaction_id)
        return Decided(True, state, foreign=owner is not None and owner != group)

    async def states(self, ids: Sequence[bytes]) -> list[State | None]:
        states = [state_of(self._state, transaction_id) for transaction_id in ids]
        # A caller that learns of the decision may delete the rows that could prove it, so it must be durable.
        await self._journal.sync()
        return states

    async def producer_groups(self, ids: Sequence[bytes]) -> list[str | None]:
        return [self._state.group_of(transaction_id) for transaction_id in ids]
