"""Checks of undecided transactions: claims the due ones and records their answers."""

from __future__ import annotations

from collections.abc import Sequence

from notify.protocol.wire import Payload, decode_payload
from notify.storage.checks import CheckAnswer, Checking, Due
from notify.storage.log.entry import Entry
from notify.storage.log.journal import Journal
from notify.storage.log.payloads import Payloads
from notify.storage.log.records import CheckAnswered, RecordType, encode
from notify.storage.log.state import LogState


class Checks:
    """Claims, answers and CHECK records, over the schedule in pending.py."""

    def __init__(self, state: LogState, journal: Journal, payloads: Payloads) -> None:
        self._pending = state.pending
        self._journal = journal
        self._payloads = payloads

    async def claim(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        return self._pending.claim(producer_group, now_us, limit, answer_within_us)

    async def release(self, claimed: Sequence[Due], due_us: int) -> None:
        for due in claimed:
            pending = self._pending.by_id.get(due.id)
            if pending is not None and pending.token == due.token:
                pending.token = 0
                self._pending.reschedule(pending, due_us)

    async def answer(self, answer: CheckAnswer) -> bool:
        pending = self._pending.by_id.get(answer.id)
        if pending is None or pending.token != answer.token or not answer.token:
            return False
        self._journal.reserve(256)
        changed = answer.attempts != pending.attempts or answer.park != pending.parked
        pending.token = 0
        pending.attempts = answer.attempts
        pending.parked = answer.park
        self._pending.reschedule(pending, answer.next_check_us)
        if changed:
            record = CheckAnswered(answer.id, answer.attempts, answer.park, answer.next_check_us)
            self._journal.append(RecordType.CHECK, encode(record))
            await self._journal.sync()
        return True

    async def resume(self, transaction_id: bytes, now_us: int, *, reset: bool) -> bool:
        pending = self._pending.by_id.get(transaction_id)
        if pending is None:
            return False
        self._journal.reserve(256)
        pending.token = 0
        if reset:
            pending.attempts, pending.parked = 0, False
        self._pending.reschedule(pending, now_us)
        record = CheckAnswered(transaction_id, pending.attempts, pending.parked, now_us)
        self._journal.append(RecordType.CHECK, encode(record))
        await self._journal.sync()
        return True

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        pending = self._pending.by_id.get(transaction_id)
        if pending is None:
            return None
        return Checking(pending.token, pending.attempts, pending.parked, pending.producer.group)

    async def half_contents(self, claimed: Sequence[Due]) -> list[list[Payload]]:
        return [self._contents_of(due.id) for due in claimed]

    def _contents_of(self, transaction_id: bytes) -> list[Payload]:
        pending = self._pending.by_id.get(transaction_id)
        if pending is None:
            return []
        entries = [Entry.of(entry) for entry in pending.entries]
        payloads = [self._payloads.read(entry.position, entry.size, entry.payload_crc) for entry in entries]
        return [decode_payload(payload) for payload in payloads if payload is not None]

    def ripen(self, now_us: int) -> None:
        self._pending.ripen(now_us)

    def next_us(self, producer_group: str) -> int | None:
        return self._pending.next_us(producer_group)
