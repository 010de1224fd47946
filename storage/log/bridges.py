"""Appends a bridge's batches: transactions and position in one frame, so that both are stored or neither."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from notify.protocol import ids
from notify.protocol.wire import BridgeBatch
from notify.storage import crash_point
from notify.storage.bridged import BridgeState, IdsInUse, check_bridge, is_prepared_by, refuse_foreign
from notify.storage.log.entry import ENTRY_SIZE
from notify.storage.log.halves import Halves
from notify.storage.log.journal import Journal
from notify.storage.log.meta import BridgeBased, BridgeMoved, encoded
from notify.storage.log.outcomes import Outcomes
from notify.storage.log.records import RecordType
from notify.storage.log.state import LogState
from notify.storage.records import NewTransaction, Put, PutResult, State


class Bridges:
    """The position of each source."""

    def __init__(self, state: LogState, journal: Journal, halves: Halves, outcomes: Outcomes) -> None:
        self._state = state
        self._journal = journal
        self._halves = halves
        self._outcomes = outcomes

    def all(self) -> list[BridgeState]:
        return list(self._state.bridges.values())

    def base(self, source: str) -> str:
        return self._state.bridge_bases.get(source, "")

    async def append(
        self, source: str, batch: BridgeBatch, transactions: Sequence[NewTransaction], now_us: int
    ) -> list[PutResult]:
        known = self._state.bridges.get(source) or BridgeState(source)
        check_bridge(known, batch)
        # An earlier attempt may have prepared a part of this batch: these are halves to commit.
        by_id = self._state.pending.by_id

        def is_ours(transaction_id: bytes) -> bool:
            producer = by_id[transaction_id].producer
            return is_prepared_by(source, producer.source, producer.instance)

        commit = [ids.from_text(text) for text in batch.commit]
        rollback = [ids.from_text(text) for text in batch.rollback]
        refuse_foreign(source, [i for i in (*commit, *rollback) if i in by_id and not is_ours(i)])
        halves = [t for t in transactions if t.committed and t.id in by_id and is_ours(t.id)]
        prepared = dict.fromkeys(t.id for t in halves if self._is_same_half(t))  # in the order of the source
        commit += prepared
        fresh = [t for t in transactions if t.id not in prepared] if prepared else transactions
        if batch.refuse_whole:
            decided = {*commit, *rollback}
            in_use = self._halves.in_use([t for t in fresh if t.id not in decided] if decided else fresh)
            if in_use:
                raise IdsInUse(in_use)
        # Do not await before all of it is in the open frame: a frame is written whole or not at all.
        size = sum([len(m.payload) + 4 * ENTRY_SIZE + 128 for t in fresh for m in t.messages])
        size += sum([2 * ENTRY_SIZE * len(by_id[i].entries) for i in (*commit, *rollback) if i in by_id])
        texts = (batch.position, known.position, batch.base or "")
        room = self._state.withdrawals.room
        self._journal.reserve(16384 + sum([len(text.encode()) for text in texts]) + size + room)
        if rollback:
            self._outcomes.decide_soon([(i, None, State.ROLLED_BACK) for i in rollback], now_us)
        if commit:  # before the transactions that follow them in the source
            self._outcomes.decide_soon([(i, None, State.COMMITTED) for i in commit], now_us)
        stored = iter(self._halves.put_soon(fresh, now_us)[0])
        results = [PutResult(Put.ALREADY, State.COMMITTED) if t.id in prepared else next(stored) for t in transactions]
        rows = known.rows + sum([r.put is Put.STORED for r in results])
        bridge = BridgeState(source, batch.epoch, batch.position, rows, now_us, known.position)
        self._state.bridges[source] = bridge
        if batch.base is not None:
            self._state.bridge_bases[source] = batch.base
            self._journal.append(RecordType.META, encoded(BridgeBased(source, batch.base)))
        self._journal.append(RecordType.META, encoded(BridgeMoved(bridge)), point="bridge")
        await self._journal.sync()
        crash_point.reached("bridge.after_append")
        return results

    def _is_same_half(self, t: NewTransaction) -> bool:
        return self._halves.compare(msgspec.structs.replace(t, committed=False)).put is Put.ALREADY
