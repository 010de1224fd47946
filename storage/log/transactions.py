"""The transactions role of the log: halves, outcomes, checks. State changes at once, the answer waits for the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from notify.storage import crash_point
from notify.storage.bridged import BridgeBatch, BridgeState, check_bridge, is_prepared_by, refuse_foreign
from notify.storage.checks import CheckAnswer, Checking, Due
from notify.storage.hashing import key_hash, tag_hash
from notify.storage.log.format import (
    ENTRY_HEAD,
    ENTRY_SIZE,
    ENTRY_TAIL,
    FLAG_DELAY,
    FLAG_FORCED,
    FLAG_TTL,
    RECORD_HEADER_SIZE,
    EntryKind,
    RecordType,
    crc32c,
)
from notify.storage.log.journal import Journal
from notify.storage.log.pending import Pending, PendingMessage, Producer
from notify.storage.log.queues import Queue
from notify.storage.log.state import LogState, due_of, encode
from notify.storage.records import Decided, NewTransaction, Put, PutResult, State
from notify.storage.store import NO_SHARDS, NO_TOKENS
from notify.storage.topics import Flush

ENTRIES_PER_RECORD = 60_000
"""Below what a record's count can say, with room for one more transaction."""

_HALF, _QUEUE, _ROLLBACK, _DELAYED = map(int, (EntryKind.HALF, EntryKind.QUEUE, EntryKind.ROLLBACK, EntryKind.DELAYED))


class LogTransactions:
    """Mixed into LogStore, which gives it state, journal and payload reads."""

    state: LogState
    journal: Journal

    if TYPE_CHECKING:

        def payload_at(self, position: int, size: int, crc: int) -> bytes | None:
            """Given by LogMessages, as is the next."""

        def entries_of(self, transaction_id: bytes) -> list[bytes]: ...

    # --- halves -----------------------------------------------------------------------------------------------

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        results, flush = self._put(transactions, now_us)
        await self.journal.sync(flush)
        return results

    def _put(self, transactions: Sequence[NewTransaction], now_us: int) -> tuple[list[PutResult], Flush]:
        """Everything of `put` but the wait."""
        size = 4096
        flush = Flush.MEMORY
        topics = self.state.topics
        for t in transactions:
            size += 128
            for m in t.messages:
                size += len(m.payload) + 2 * ENTRY_SIZE
                if flush is not Flush.SYNC:
                    flush = max(flush, topics[m.topic].policy.flush)
        self.journal.reserve(size)
        results: list[PutResult] = []
        run: list[NewTransaction] = []
        run_entries = 0
        pending = self.state.pending.by_id
        decided = self.state.live.decided
        seen: set[bytes] = set()
        for t in transactions:
            if t.id in seen:
                # The same id twice in one request: the second is compared once the first is stored.
                self._store(run, now_us)
                run, run_entries = [], 0
                seen.clear()
                decided = self.state.live.decided
            if t.id in pending or t.id in decided or self._is_known_before(t.id):
                results.append(self._compare(t))
                results[-1].flush = flush
                continue
            if run and (
                run_entries + len(t.messages) > ENTRIES_PER_RECORD
                or t.committed != run[0].committed
                or t.producer_group != run[0].producer_group
                or t.instance != run[0].instance
                or t.source != run[0].source
                or t.check_after_us != run[0].check_after_us
            ):
                self._store(run, now_us)
                run, run_entries = [], 0
            run.append(t)
            seen.add(t.id)
            run_entries += len(t.messages)
            results.append(PutResult(Put.STORED, State.COMMITTED if t.committed else State.PREPARED, flush))
        if run:
            self._store(run, now_us)
        return results, flush

    def _is_known_before(self, transaction_id: bytes) -> bool:
        """Whether an earlier part of the log holds the id. New ids are above those: one comparison."""
        state = self.state
        for part in state.being_sealed:
            if transaction_id in part.decided:
                return True
        if int.from_bytes(transaction_id[:8]) > state.sealed_id_max:
            return False
        return state.outcome(transaction_id) is not None

    def _store(self, run: list[NewTransaction], now_us: int) -> None:
        """One record for transactions of one producer: entries, who sent them, payloads."""
        if not run:
            return
        first = run[0]
        committed = first.committed
        producer = Producer(first.producer_group, first.source, first.instance)
        meta = encode((producer.group, producer.source, producer.instance, first.check_after_us))
        group_number = self._number_of(producer.group)
        opened = self.journal.open
        count = sum([len(t.messages) for t in run])
        position = self.journal.end + RECORD_HEADER_SIZE + count * ENTRY_SIZE + 2 + len(meta)
        chunks = [len(meta).to_bytes(2, "little"), meta]
        entries: list[bytes] = []
        queues: list[Queue | None] = []
        topics = self.state.topics
        due_us = now_us + first.check_after_us
        by_id = self.state.pending.by_id
        ids: list[bytes] = []
        live = opened.part
        for t in run:
            transaction_id = t.id
            messages: list[PendingMessage] = []
            number = 0
            for m in t.messages:
                payload = m.payload
                size = len(payload)
                topic = topics[m.topic]
                flags, deliver = (FLAG_DELAY, m.delay_us) if m.delay_us else (0, m.deliver_at_us)
                if m.ttl_us:
                    flags |= FLAG_TTL
                tail = ENTRY_TAIL.pack(
                    position,
                    size,
                    number,
                    group_number,
                    deliver,
                    transaction_id,
                    tag_hash(m.tag) if m.tag is not None else 0,
                    crc32c(payload),
                    key_hash(m.key) if m.key is not None else 0,
                )
                queue_no = topic.queue_for(m.key)
                message = PendingMessage(topic, queue_no, flags, deliver, tail)
                if committed:
                    entry, queue = self._enqueue(message, now_us, len(opened.entries) + len(entries))
                    queues.append(queue)
                else:
                    entry = ENTRY_HEAD.pack(_HALF, flags, queue_no, topic.id, now_us, 0) + tail
                    queues.append(None)
                    messages.append(message)
                entries.append(entry)
                chunks.append(payload)
                position += size
                number += 1
            if committed:
                live.decided[transaction_id] = group_number
            else:
                by_id[transaction_id] = Pending(transaction_id, producer, messages, now_us, due_us)
                ids.append(transaction_id)
        if not committed:
            self.state.pending.schedule(producer.group, due_us, ids)
        kind = RecordType.MESSAGE if committed else RecordType.HALF
        self.journal.append(kind, entries, b"".join(chunks))
        opened.entries += entries
        opened.queues += queues
        live.assigned += len(entries)
        opened.points.add("half")

    def _number_of(self, producer_group: str) -> int:
        """The number by which entries name a producer group, 0 if there are too many of them."""
        state = self.state
        number = state.producer_numbers.get(producer_group)
        if number is None:
            number = len(state.producer_groups)
            if number > 0xFFFF:
                return 0
            state.set_producer_group(number, producer_group)
            self.journal.append(RecordType.META, [], encode(("producer_group", number, producer_group)))
        return number

    def _enqueue(self, message: PendingMessage, now_us: int, number: int) -> tuple[bytes, Queue | None]:
        """The entry of a committed message, the one of this number in the open frame: in its queue, or delayed."""
        topic = message.topic
        if message.deliver_us:
            entry = ENTRY_HEAD.pack(_DELAYED, message.flags, message.queue, topic.id, now_us, 0) + message.tail
            due_us = due_of(entry)
            times = self.state.times
            # A message due later than the last release may wait; a clock that was set back must not hide it behind one.
            if due_us > max(now_us, times.released[0]):
                position = int.from_bytes(message.tail[:8], "little")
                times.add(due_us, position, entry)
                self.journal.open.delayed.append((due_us, position, number))
                return entry, None
        queue = topic.queue_now(message.queue, message.tail)
        offset = queue.next_offset
        queue.next_offset = offset + 1
        flags = message.flags & (FLAG_TTL | FLAG_FORCED)
        return ENTRY_HEAD.pack(_QUEUE, flags, queue.number, topic.id, now_us, offset) + message.tail, queue

    def _compare(self, t: NewTransaction) -> PutResult:
        """The answer to an id that is known: ALREADY for the same content of the same group, else IN_USE."""
        state = self._state_of(t.id)
        assert state is not None
        pending = self.state.pending.by_id.get(t.id)
        if pending is not None:
            group: str | None = pending.producer.group
            places = [m.tail for m in pending.messages]
        else:
            places, group = self._fixed_parts(t.id)
        same = (group is None or group == t.producer_group) and len(places) == len(t.messages)
        if same and places:
            for tail, message in zip(places, t.messages, strict=True):
                position, size, _, _, deliver, _, _, crc, _ = ENTRY_TAIL.unpack(tail)
                payload = message.payload
                if (
                    size != len(payload)
                    or deliver != (message.delay_us or message.deliver_at_us)
                    or crc != crc32c(payload)
                ) or self.payload_at(position, size, crc) not in (None, payload):
                    same = False
        if same and t.committed and state == State.PREPARED:
            same = False
        return PutResult(Put.ALREADY if same else Put.IN_USE, state)

    def _fixed_parts(self, transaction_id: bytes) -> tuple[list[bytes], str | None]:
        """The fixed parts of a decided transaction's entries, one a message, in message order; and its group."""
        by_number: dict[int, bytes] = {}
        group = None
        for entry in self.entries_of(transaction_id):
            by_number.setdefault(int.from_bytes(entry[36:38], "little"), entry[24:])
            group = group or self.state.producer_group_of(entry)
        return [by_number[n] for n in sorted(by_number)], group

    # --- from a bridge ----------------------------------------------------------------------------------------

    def bridges(self) -> list[BridgeState]:
        return list(self.state.bridges.values())

    async def append_from_bridge(self, batch: BridgeBatch, now_us: int) -> list[PutResult]:
        known = self.state.bridges.get(batch.source) or BridgeState(batch.source)
        check_bridge(known, batch)
        # A part that an earlier try prepared may be in the last part of this one: then it is a half to commit.
        by_id = self.state.pending.by_id

        def is_ours(transaction_id: bytes) -> bool:
            producer = by_id[transaction_id].producer
            return is_prepared_by(batch.source, producer.source, producer.instance)

        refuse_foreign(batch, [i for i in batch.commit if i in by_id and not is_ours(i)])
        halves = [t for t in batch.transactions if t.committed and t.id in by_id and is_ours(t.id)]
        prepared = dict.fromkeys(t.id for t in halves if self._is_same_half(t))  # in the source's order
        commit = [*batch.commit, *prepared]
        fresh = [t for t in batch.transactions if t.id not in prepared] if prepared else batch.transactions
        # Nothing is waited for until all of it is in the open frame: one frame is written whole or not at all.
        size = sum([len(m.payload) + 2 * ENTRY_SIZE + 128 for t in fresh for m in t.messages])
        self.journal.reserve(16384 + 2 * ENTRY_SIZE * 100 * len(commit) + 2 * len(batch.position) + size)
        if commit:  # before what follows them in the source
            self._decide([(i, None, State.COMMITTED) for i in commit], now_us)
        stored = iter(self._put(fresh, now_us)[0])
        results = [
            PutResult(Put.ALREADY, State.COMMITTED) if t.id in prepared else next(stored) for t in batch.transactions
        ]
        rows = known.rows + sum([r.put is Put.STORED for r in results])
        self.state.bridges[batch.source] = bridge = BridgeState(
            batch.source, batch.epoch, batch.position, rows, now_us, known.position
        )
        self.journal.append(RecordType.META, [], encode(("bridge", bridge)))
        self.journal.open.points.add("bridge")
        await self.journal.sync()
        crash_point.reached("bridge.after_append")
        return results

    def _is_same_half(self, t: NewTransaction) -> bool:
        return self._compare(msgspec.structs.replace(t, committed=False)).put is Put.ALREADY

    # --- outcomes ---------------------------------------------------------------------------------------------

    async def decide(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
        shards: Mapping[bytes, str] = NO_SHARDS,
    ) -> list[Decided]:
        results = self._decide(outcomes, now_us, forced, tokens)
        await self.journal.sync()
        return results

    def _decide(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
    ) -> list[Decided]:
        """Everything of `decide` but the wait."""
        journal = self.journal
        by_id = self.state.pending.by_id
        undecided = [by_id.get(outcome[0]) for outcome in outcomes]
        size = sum([len(pending.messages) for pending in undecided if pending is not None])
        journal.reserve(4096 + 2 * ENTRY_SIZE * size)
        results: list[Decided] = []
        entries: list[bytes] = []
        queues: list[Queue | None] = []
        opened = journal.open
        live = opened.part
        numbers = self.state.producer_numbers
        committed_result = Decided(True, State.COMMITTED, True)
        rolled_back_result = Decided(True, State.ROLLED_BACK, True)
        for (transaction_id, group, outcome), pending in zip(outcomes, undecided, strict=True):
            if pending is not None and group is not None and pending.producer.group != group:
                results.append(Decided(True, _state_of(pending), foreign=True))
                continue
            if tokens and pending is not None and pending.token != tokens.get(transaction_id, pending.token):
                results.append(Decided(True, _state_of(pending), stale=True))
                continue
            # Not there any more: an outcome before it in this request decided it.
            if pending is None or by_id.pop(transaction_id, None) is None:
                results.append(self._decided_before(transaction_id, group))
                continue
            group_number = numbers.get(pending.producer.group, 0)
            if outcome == State.COMMITTED:
                for message in pending.messages:
                    if forced:
                        message.flags |= FLAG_FORCED
                    entry, queue = self._enqueue(message, now_us, len(opened.entries) + len(entries))
                    entries.append(entry)
                    queues.append(queue)
                live.decided[transaction_id] = group_number
                results.append(committed_result)
            else:
                first = pending.messages[0]
                flags = FLAG_FORCED if forced else 0
                head = ENTRY_HEAD.pack(_ROLLBACK, flags, first.queue, first.topic.id, now_us, 0)
                entries.append(head + first.tail)
                queues.append(None)
                live.decided[transaction_id] = group_number
                live.rolled_back.add(transaction_id)
                results.append(rolled_back_result)
            if len(entries) > ENTRIES_PER_RECORD:
                self._append_outcomes(entries, queues)
                entries, queues = [], []
        if entries:
            self._append_outcomes(entries, queues)
        return results

    def _decided_before(self, transaction_id: bytes, group: str | None) -> Decided:
        state = self._state_of(transaction_id)
        if state is None:
            return Decided(False)
        owner = None if group is None else self.state.group_of(transaction_id)
        return Decided(True, state, foreign=owner is not None and owner != group)

    def _append_outcomes(self, entries: list[bytes], queues: list[Queue | None]) -> None:
        opened = self.journal.open
        self.journal.append(RecordType.OUTCOME, entries, b"")
        opened.entries += entries
        opened.queues += queues
        opened.part.assigned += len(entries)
        opened.points.add("outcome")

    async def states(self, ids: Sequence[bytes]) -> list[State | None]:
        states = [self._state_of(transaction_id) for transaction_id in ids]
        # Whoever hears that a transaction is decided may delete what could decide it: it must be so for good.
        await self.journal.sync()
        return states

    async def producer_groups(self, ids: Sequence[bytes]) -> list[str | None]:
        return [self.state.group_of(transaction_id) for transaction_id in ids]

    def _state_of(self, transaction_id: bytes) -> State | None:
        pending = self.state.pending.by_id.get(transaction_id)
        if pending is not None:
            return _state_of(pending)
        outcome = self.state.outcome(transaction_id)
        return None if outcome is None else State.COMMITTED if outcome else State.ROLLED_BACK

    # --- checks -----------------------------------------------------------------------------------------------

    async def claim_checks(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        return self.state.pending.claim(producer_group, now_us, limit, answer_within_us)

    async def release_checks(self, claimed: Sequence[Due], due_us: int) -> None:
        for due in claimed:
            pending = self.state.pending.by_id.get(due.id)
            if pending is not None and pending.token == due.token:
                pending.token = 0
                self.state.pending.reschedule(pending, due_us)

    async def answer_check(self, answer: CheckAnswer) -> bool:
        pending = self.state.pending.by_id.get(answer.id)
        if pending is None or pending.token != answer.token or not answer.token:
            return False
        self.journal.reserve(256)
        changed = answer.attempts != pending.attempts or answer.park != pending.parked
        pending.token = 0
        pending.attempts = answer.attempts
        pending.parked = answer.park
        self.state.pending.reschedule(pending, answer.next_check_us)
        if changed:
            record = encode((answer.id, answer.attempts, answer.park, answer.next_check_us))
            self.journal.append(RecordType.CHECK, [], record)
            await self.journal.sync()
        return True

    async def resume_checks(self, transaction_id: bytes, now_us: int, *, anew: bool) -> bool:
        pending = self.state.pending.by_id.get(transaction_id)
        if pending is None:
            return False
        self.journal.reserve(256)
        pending.token = 0
        if anew:
            pending.attempts, pending.parked = 0, False
        self.state.pending.reschedule(pending, now_us)
        record = encode((transaction_id, pending.attempts, pending.parked, now_us))
        self.journal.append(RecordType.CHECK, [], record)
        await self.journal.sync()
        return True

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        pending = self.state.pending.by_id.get(transaction_id)
        if pending is None:
            return None
        return Checking(pending.token, pending.attempts, pending.parked, pending.producer.group)

    async def half_payloads(self, claimed: Sequence[Due]) -> list[list[bytes]]:
        return [self._half_payloads(due.id) for due in claimed]

    def _half_payloads(self, transaction_id: bytes) -> list[bytes]:
        pending = self.state.pending.by_id.get(transaction_id)
        if pending is None:
            return []
        places = [ENTRY_TAIL.unpack(m.tail) for m in pending.messages]
        found = [self.payload_at(place[0], place[1], place[7]) for place in places]
        return [payload for payload in found if payload is not None]

    def ripen_checks(self, now_us: int) -> None:
        self.state.pending.ripen(now_us)

    def next_check_us(self, producer_group: str) -> int | None:
        return self.state.pending.next_us(producer_group)


def _state_of(pending: Pending) -> State:
    return State.PARKED if pending.parked else State.PREPARED
