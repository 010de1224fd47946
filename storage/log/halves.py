"""Stores halves and transactions without an outcome. State changes immediately; the answer waits for the disk."""

from __future__ import annotations

from collections.abc import Sequence

from notify.protocol.keys import key_hash, tag_hash
from notify.protocol.withdrawal import Dedupe
from notify.storage.log.entry import (
    ENTRY,
    ENTRY_SIZE,
    FLAG_DEDUPE,
    FLAG_DELAY,
    FLAG_TTL,
    FLAG_WITHDRAWS,
    Entry,
    EntryKind,
    Fixed,
    tail_of,
)
from notify.storage.log.format import crc32c
from notify.storage.log.journal import Journal
from notify.storage.log.lookup import entries_of, state_of
from notify.storage.log.meta import Dedupes, ProducerGroupNumbered, Withdraws, encoded
from notify.storage.log.payloads import Payloads
from notify.storage.log.pending import Pending
from notify.storage.log.placing import append_commit, concerns_others, place
from notify.storage.log.queues import Queue
from notify.storage.log.records import RecordType, Sender, sender_head
from notify.storage.log.state import LogState
from notify.storage.records import NewTransaction, Put, PutResult, State
from notify.storage.topics import Flush

ENTRIES_PER_RECORD = 60_000
"""Smaller than the largest count of a record by the messages of one more transaction."""
MOST_NUMBERED_GROUPS = 0xFFFF
_HALF = int(EntryKind.HALF)


class Halves:
    """Appends HALF and MESSAGE records."""

    def __init__(self, state: LogState, journal: Journal, payloads: Payloads) -> None:
        self._state = state
        self._journal = journal
        self._payloads = payloads

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        results, flush = self.put_soon(transactions, now_us)
        await self._journal.sync(flush)
        return results

    def put_soon(self, transactions: Sequence[NewTransaction], now_us: int) -> tuple[list[PutResult], Flush]:
        """`put` without the wait: returns the results, and what to wait for."""
        topics = self._state.topics
        # A half's entry and one with a place. A withdrawal also has its message's entry, and its request.
        size = sum([len(m.payload) + 4 * ENTRY_SIZE for t in transactions for m in t.messages])
        self._journal.reserve(4096 + 128 * len(transactions) + size + self._state.withdrawals.room)
        names = {m.topic for t in transactions for m in t.messages}
        flush = max([topics[name].policy.flush for name in names], default=Flush.MEMORY)
        results: list[PutResult] = []
        run: list[NewTransaction] = []
        run_entries = 0
        pending = self._state.pending.by_id
        parts = self._state.parts
        decided = parts.live.decided
        highest = parts.highest_decided()
        # Python 3.11 takes 0.1 µs to read a member of an enumeration, so read it once a call.
        stored = PutResult(Put.STORED, State.PREPARED, flush)
        stored_as_committed = PutResult(Put.STORED, State.COMMITTED, flush)
        seen: set[bytes] = set()
        for t in transactions:
            transaction_id = t.id
            if transaction_id in seen:
                # If a request has the same id twice, the second is compared after the first is stored.
                self._store(run, now_us)
                run, run_entries = [], 0
                seen.clear()
                decided = parts.live.decided
            if (
                transaction_id in pending
                or transaction_id in decided
                or (transaction_id[:8] <= highest and parts.has_decided(transaction_id))
            ):
                results.append(self.compare(t))
                results[-1].flush = flush
                continue
            if run and (
                run_entries + len(t.messages) > ENTRIES_PER_RECORD
                or t.committed != (first := run[0]).committed
                or t.producer_group != first.producer_group
                or t.instance != first.instance
                or t.source != first.source
                or t.check_after_us != first.check_after_us
            ):
                self._store(run, now_us)
                run, run_entries = [], 0
            run.append(t)
            seen.add(transaction_id)
            run_entries += len(t.messages)
            results.append(stored_as_committed if t.committed else stored)
        if run:
            self._store(run, now_us)
        return results, flush

    def _store(self, run: list[NewTransaction], now_us: int) -> None:
        """One record for transactions of one producer: entries, who sent them, payloads."""
        if not run:
            return
        first = run[0]
        committed = first.committed
        state, journal = self._state, self._journal
        sender = Sender(first.producer_group, first.source, first.instance, first.check_after_us)
        head = sender_head(sender)
        group_number = self._number_of(sender.group)
        for t in run:
            for m in t.messages:
                if m.acts is not None:
                    self._note_acts(t)
                    break
        opened = journal.open
        position = journal.data_position(sum([len(t.messages) for t in run])) + len(head)
        chunks = [head]
        halves: list[bytes] = []
        topics = state.topics
        due_us = now_us + first.check_after_us
        by_id = state.pending.by_id
        decided = opened.part.decided
        for t in run:
            transaction_id = t.id
            own: list[bytes] = []
            for number, m in enumerate(t.messages):
                payload = m.payload
                size = len(payload)
                flags, deliver = (FLAG_DELAY, m.delay_us) if m.delay_us else (0, m.deliver_at_us)
                if m.ttl_us:
                    flags |= FLAG_TTL
                if m.acts is not None:
                    flags |= FLAG_DEDUPE if isinstance(m.acts, Dedupe) else FLAG_WITHDRAWS
                hashed_key = key_hash(m.key) if m.key is not None else 0
                queue = topics[m.topic].queue_for(hashed_key)
                half = ENTRY.pack(
                    _HALF, flags, queue.number, queue.key >> 16, now_us, 0, position, size, number, group_number,
                    deliver, transaction_id, tag_hash(m.tag) if m.tag is not None else 0, crc32c(payload), hashed_key,
                )  # fmt: skip
                own.append(half)
                chunks.append(payload)
                position += size
            if committed:
                decided[transaction_id] = group_number
            else:
                by_id[transaction_id] = Pending(transaction_id, sender, own, now_us, due_us)
            halves += own
        if committed:
            data = b"".join(chunks)
            kind = RecordType.MESSAGE
            if concerns_others(state, halves):
                # The number of entries is not known yet, and the payloads' positions depend on it. So they are stored
                # as halves, and committed later in the same frame.
                journal.append(RecordType.HALF, data, halves, None, "half")
                kind, data = RecordType.OUTCOME, b""
            entries: list[bytes] = []
            queues: list[Queue | None] = []
            place(state, journal, halves, now_us, entries, queues)
            append_commit(journal, kind, data, entries, queues, "half")
        else:
            state.pending.schedule(sender.group, due_us, [t.id for t in run])
            journal.append(RecordType.HALF, b"".join(chunks), halves, None, "half")

    def _note_acts(self, t: NewTransaction) -> None:
        """Record which messages the messages of a transaction withdraw, and their dedupe keys."""
        state, journal = self._state, self._journal
        for number, m in enumerate(t.messages):
            if isinstance(m.acts, Dedupe):
                state.dedupes.asked.ask(t.id, number, m.acts)
                journal.append(RecordType.META, encoded(Dedupes(t.id, number, m.acts)))
            elif m.acts is not None:
                state.withdrawals.asked.ask(t.id, number, m.acts)
                journal.append(RecordType.META, encoded(Withdraws(t.id, number, m.acts)))

    def _number_of(self, producer_group: str) -> int:
        """The number of a producer group in entries; 0 if there are too many groups."""
        state = self._state
        number = state.producer_numbers.get(producer_group)
        if number is None:
            number = len(state.producer_groups)
            if number > MOST_NUMBERED_GROUPS:
                return 0
            state.set_producer_group(number, producer_group)
            self._journal.append(RecordType.META, encoded(ProducerGroupNumbered(number, producer_group)))
        return number

    def in_use(self, transactions: Sequence[NewTransaction]) -> list[bytes]:
        """The ids that already belong to transactions with other content or of another producer group."""
        pending, parts = self._state.pending.by_id, self._state.parts
        decided, highest = parts.live.decided, parts.highest_decided()
        return [
            t.id
            for t in transactions
            if (t.id in pending or t.id in decided or (t.id[:8] <= highest and parts.has_decided(t.id)))
            and self.compare(t).put is Put.IN_USE
        ]

    def compare(self, t: NewTransaction) -> PutResult:
        """The answer to an id that is known: ALREADY for the same content of the same group, else IN_USE."""
        state = state_of(self._state, t.id)
        assert state is not None
        pending = self._state.pending.by_id.get(t.id)
        if pending is not None:
            group: str | None = pending.producer.group
            tails = [tail_of(entry) for entry in pending.entries]
        else:
            tails, group = self._decided_tails(t.id)
        same = (group is None or group == t.producer_group) and len(tails) == len(t.messages)
        if same and tails:
            for tail, message in zip(tails, t.messages, strict=True):
                stored = Fixed.of(tail)
                payload = message.payload
                if (
                    stored.size != len(payload)
                    or stored.deliver_us != (message.delay_us or message.deliver_at_us)
                    or stored.payload_crc != crc32c(payload)
                ) or self._payloads.read(stored.position, stored.size, stored.payload_crc) not in (None, payload):
                    same = False
        if same and t.committed and state == State.PREPARED:
            same = False
        return PutResult(Put.ALREADY if same else Put.IN_USE, state)

    def _decided_tails(self, transaction_id: bytes) -> tuple[list[bytes], str | None]:
        """The fixed parts of a decided transaction's entries, one a message, in message order; and its group."""
        by_number: dict[int, bytes] = {}
        group = None
        for raw in entries_of(self._state, self._journal, transaction_id):
            by_number.setdefault(Entry.of(raw).message_no, tail_of(raw))
            group = group or self._state.producer_group_of(raw)
        return [by_number[n] for n in sorted(by_number)], group
