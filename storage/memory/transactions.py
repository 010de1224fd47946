"""Halves, outcomes, checks, and bridges' batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from notify.protocol import ids
from notify.protocol.keys import tag_hash
from notify.protocol.wire import BridgeBatch, Payload, decode_payload
from notify.storage.bridged import BridgeState, IdsInUse, check_bridge, is_prepared_by, refuse_foreign
from notify.storage.checks import CheckAnswer, Checking, Due, new_token
from notify.storage.memory.queues import MemoryQueues
from notify.storage.records import (
    Decided,
    InDoubt,
    NewMessage,
    NewTransaction,
    Put,
    PutResult,
    State,
    StoredMessage,
    Transaction,
)
from notify.storage.topics import Flush
from notify.storage.transactions import COUNTED_TO, NO_SHARDS, NO_TOKENS, without_bodies_beyond


@dataclass(slots=True)
class _Record:
    new: NewTransaction
    stored_us: int
    state: State
    decided_us: int = 0
    attempts: int = 0
    next_check_us: int = 0
    token: int = 0
    forced: bool = False


class MemoryTransactions:
    """A record for each transaction."""

    def __init__(self, queues: MemoryQueues) -> None:
        self._queues = queues
        self._records: dict[bytes, _Record] = {}
        self._bridges: dict[str, BridgeState] = {}
        self._bridge_bases: dict[str, str] = {}
        queues.withdrawals.transaction_of = self._content

    def _content(self, transaction_id: bytes) -> tuple[State, Sequence[NewMessage]] | None:
        record = self._records.get(transaction_id)
        return None if record is None else (record.state, record.new.messages)

    def payloads(self) -> Iterator[bytes]:
        """The payloads of all messages that a transaction still has."""
        for record in self._records.values():
            yield from (message.payload for message in record.new.messages)

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        results = []
        touched: set[str] = set()
        flush = max(self._flush(m.topic) for t in transactions for m in t.messages)
        for t in transactions:
            known = self._records.get(t.id)
            if known is not None:
                results.append(PutResult(Put.IN_USE if self._is_in_use(t) else Put.ALREADY, known.state, flush))
                continue
            record = _Record(t, now_us, State.PREPARED, next_check_us=now_us + t.check_after_us)
            self._records[t.id] = record
            if t.committed:
                touched |= self._commit(record, now_us)
            results.append(PutResult(Put.STORED, record.state, flush))
        self._queues.tell(touched)
        return results

    def _is_in_use(self, t: NewTransaction) -> bool:
        """Whether an id already belongs to a transaction with other content or of another producer group."""
        known = self._records.get(t.id)
        if known is None:
            return False
        same = known.new.messages == t.messages and known.new.producer_group == t.producer_group
        return not same or (t.committed and known.state == State.PREPARED)

    def _flush(self, name: str) -> Flush:
        topic = self._queues.topic(name)
        assert topic is not None, "a transaction is stored only once its topics are made"
        return topic.flush

    def _commit(self, record: _Record, now_us: int) -> set[str]:
        record.state = State.COMMITTED
        record.decided_us = now_us
        return self._queues.commit(record.new.id, record.new.messages, now_us)

    async def decide(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
        shards: Mapping[bytes, str] = NO_SHARDS,
    ) -> list[Decided]:
        results = []
        touched: set[str] = set()
        for transaction_id, group, outcome in outcomes:
            record = self._records.get(transaction_id)
            if record is None:
                results.append(Decided(False))
            elif group is not None and (record.new.producer_group or group) != group:
                results.append(Decided(True, record.state, foreign=True))
            elif record.state not in (State.PREPARED, State.PARKED):
                results.append(Decided(True, record.state, False))
            elif record.token != tokens.get(transaction_id, record.token):
                results.append(Decided(True, record.state, stale=True))
            else:
                if outcome == State.COMMITTED:
                    touched |= self._commit(record, now_us)
                else:
                    record.state, record.decided_us = State.ROLLED_BACK, now_us
                    self._queues.withdrawals.rolled_back(transaction_id, record.new.messages, now_us)
                record.forced = forced
                results.append(Decided(True, outcome, True))
        self._queues.tell(touched)
        return results

    async def states(self, ids: Sequence[bytes]) -> list[State | None]:
        return [self._records[i].state if i in self._records else None for i in ids]

    async def producer_groups(self, ids: Sequence[bytes]) -> list[str | None]:
        return [self._records[i].new.producer_group or None if i in self._records else None for i in ids]

    def _open(self, transaction_id: bytes) -> _Record | None:
        record = self._records.get(transaction_id)
        return record if record is not None and record.state in (State.PREPARED, State.PARKED) else None

    async def claim_checks(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        due: list[Due] = []
        for record in sorted(self._undecided(producer_group), key=lambda r: r.next_check_us):
            if record.next_check_us > now_us or len(due) >= limit:
                break
            record.token = new_token()
            record.next_check_us = now_us + answer_within_us
            new = record.new
            topics = tuple({m.topic: None for m in new.messages})
            due.append(Due(new.id, record.token, new.source, new.instance, record.attempts, topics))
        return due

    def _undecided(self, producer_group: str | None) -> list[_Record]:
        return [
            r
            for r in self._records.values()
            if r.state in (State.PREPARED, State.PARKED) and producer_group in (None, r.new.producer_group)
        ]

    async def release_checks(self, claimed: Sequence[Due], due_us: int) -> None:
        for due in claimed:
            record = self._open(due.id)
            if record is not None and record.token == due.token:
                record.token, record.next_check_us = 0, due_us

    async def answer_check(self, answer: CheckAnswer) -> bool:
        record = self._open(answer.id)
        if record is None or not answer.token or record.token != answer.token:
            return False
        record.token, record.attempts, record.next_check_us = 0, answer.attempts, answer.next_check_us
        record.state = State.PARKED if answer.park else State.PREPARED
        return True

    async def resume_checks(self, transaction_id: bytes, now_us: int, *, reset: bool) -> bool:
        record = self._open(transaction_id)
        if record is None:
            return False
        record.token, record.next_check_us = 0, now_us
        if reset:
            record.state, record.attempts = State.PREPARED, 0
        return True

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        record = self._open(transaction_id)
        if record is None:
            return None
        return Checking(record.token, record.attempts, record.state == State.PARKED, record.new.producer_group)

    async def half_contents(self, claimed: Sequence[Due]) -> list[list[Payload]]:
        records = [self._open(due.id) for due in claimed]
        return [[decode_payload(m.payload) for m in r.new.messages] if r is not None else [] for r in records]

    def next_check_us(self, producer_group: str) -> int | None:
        return min((r.next_check_us for r in self._undecided(producer_group)), default=None)

    async def transaction(self, transaction_id: bytes) -> Transaction | None:
        return self._transaction(transaction_id)

    def _transaction(self, transaction_id: bytes) -> Transaction | None:
        record = self._records.get(transaction_id)
        if record is None:
            return None
        new = record.new
        shown = self._queues.messages(new.id) or [
            StoredMessage(m.topic, 0, 0, new.id, n, record.stored_us, m.payload, tag_hash(m.tag))
            for n, m in enumerate(new.messages)
        ]
        return Transaction(
            new.id,
            new.producer_group,
            record.state,
            record.stored_us,
            record.decided_us,
            new.source,
            new.instance,
            record.attempts,
            record.next_check_us,
            shown,
            forced=record.forced,
        )

    async def in_doubt(self) -> InDoubt:
        prepared = await self.undecided(State.PREPARED, None, None, COUNTED_TO)
        parked = await self.undecided(State.PARKED, None, None, COUNTED_TO)
        oldest_us, group = (prepared[0].stored_us, prepared[0].producer_group) if prepared else (0, "")
        return InDoubt(len(prepared), len(parked), oldest_us, group, COUNTED_TO)

    async def undecided(
        self,
        state: State | None,
        producer_group: str | None,
        older_than_us: int | None,
        limit: int,
        most_bytes: int | None = None,
    ) -> list[Transaction]:
        matching = [
            r
            for r in self._undecided(producer_group)
            if state in (None, r.state) and (older_than_us is None or r.stored_us <= older_than_us)
        ]
        shown = map(self._transaction, [r.new.id for r in matching[:limit]])
        return without_bodies_beyond((t for t in shown if t is not None), most_bytes)

    # --- from a bridge ----------------------------------------------------------------------------------------

    def bridges(self) -> list[BridgeState]:
        return list(self._bridges.values())

    def bridge_base(self, source: str) -> str:
        return self._bridge_bases.get(source, "")

    async def append_from_bridge(
        self, source: str, batch: BridgeBatch, transactions: Sequence[NewTransaction], now_us: int
    ) -> list[PutResult]:
        known = self._bridges.get(source) or BridgeState(source)
        check_bridge(known, batch)

        def is_ours(transaction_id: bytes) -> bool:
            half = self._records[transaction_id].new
            return is_prepared_by(source, half.source, half.instance)

        commit = [ids.from_text(text) for text in batch.commit]
        rollback = [ids.from_text(text) for text in batch.rollback]
        refuse_foreign(source, [i for i in (*commit, *rollback) if self._open(i) is not None and not is_ours(i)])
        halves = [t.id for t in transactions if t.committed and self._open(t.id) is not None and is_ours(t.id)]
        if batch.refuse_whole:
            decided = {*commit, *rollback, *halves}
            in_use = [t.id for t in transactions if t.id not in decided and self._is_in_use(t)]
            if in_use:
                raise IdsInUse(in_use)
        await self.decide([(i, None, State.ROLLED_BACK) for i in rollback], now_us)
        await self.decide([(i, None, State.COMMITTED) for i in (*commit, *halves)], now_us)
        results = await self.put(transactions, now_us) if transactions else []
        rows = known.rows + sum(r.put is Put.STORED for r in results)
        self._bridges[source] = BridgeState(source, batch.epoch, batch.position, rows, now_us, known.position)
        if batch.base is not None:
            self._bridge_bases[source] = batch.base
        return results
