"""Reports the fates of withdrawals, and of the messages that they name."""

from __future__ import annotations

from collections.abc import Mapping

from notify.protocol.wire import UNDECODABLE, decode_payload
from notify.protocol.withdrawal import Fate, Wanted, wanted_of
from notify.storage.log.entry import Entry, EntryKind, message_key
from notify.storage.log.journal import Journal
from notify.storage.log.lookup import entries_of, state_of
from notify.storage.log.payloads import Payloads
from notify.storage.log.state import LogState
from notify.storage.log.withdrawals import delayed_entry_of
from notify.storage.records import State
from notify.storage.withdrawals import MOST_PENDING, Standing, Withdrawable, Withdrawal


class Withdrawn:
    """Answers recent decisions from memory, and earlier ones from the index."""

    def __init__(self, state: LogState, journal: Journal, payloads: Payloads) -> None:
        self._state = state
        self._journal = journal
        self._payloads = payloads

    def counts(self) -> Mapping[Fate, int]:
        return self._state.withdrawals.counts

    def collapsed(self) -> int:
        return self._state.dedupes.collapsed

    def is_full_of_keys(self) -> bool:
        dedupes = self._state.dedupes
        if len(dedupes.pending) >= MOST_PENDING:
            dedupes.sweep(self._state.times.released)
        return len(dedupes.pending) + len(dedupes.asked) >= MOST_PENDING

    def withdrawable(self, transaction_id: bytes, number: int) -> Withdrawable | None:
        state = self._state
        pending = state.pending.by_id.get(transaction_id)
        if pending is not None:
            if number >= len(pending.entries):
                return None
            return Withdrawable(self._topic(Entry.of(pending.entries[number]).topic), Standing.UNDECIDED)
        frames = self._journal.on_their_way()
        delayed, withdrawn = delayed_entry_of(state.parts, frames, [], transaction_id, number)
        if not delayed:
            return self._never_delayed(transaction_id, number)
        entry = Entry.of(delayed)
        topic = self._topic(entry.topic)
        if withdrawn:
            return Withdrawable(topic, Standing.WITHDRAWN, entry.due_us, Entry.of(withdrawn).time_us)
        if (entry.due_us, entry.position) <= state.times.released:
            return Withdrawable(topic, Standing.RELEASED)
        return Withdrawable(topic, Standing.DELAYED, entry.due_us)

    def _never_delayed(self, transaction_id: bytes, number: int) -> Withdrawable | None:
        outcome = state_of(self._state, transaction_id)
        raw = entries_of(self._state, self._journal, transaction_id) if outcome is not None else ()
        entries = [Entry.of(entry) for entry in raw]
        for entry in entries:
            if entry.message_no == number and entry.kind == EntryKind.WITHDRAWAL and entry.offset == Fate.COLLAPSED:
                return Withdrawable(self._topic(entry.topic), Standing.COLLAPSED, at_us=entry.time_us)
        for entry in entries:
            if entry.message_no == number or outcome == State.ROLLED_BACK:
                standing = Standing.ROLLED_BACK if outcome == State.ROLLED_BACK else Standing.RELEASED
                return Withdrawable(self._topic(entry.topic), standing)
        return None

    def withdrawal(self, transaction_id: bytes, number: int, now_us: int) -> Withdrawal | None:
        key = message_key(transaction_id, number)
        recent = self._state.withdrawals.recent.get(key)
        if recent is not None:
            fate, wanted, topic, at_us = recent
            return Withdrawal(self._topic(topic), wanted, self._until_now(now_us, key, wanted, fate), at_us=at_us)
        entries = [
            entry
            for entry in map(Entry.of, entries_of(self._state, self._journal, transaction_id))
            if entry.message_no == number and entry.kind not in (EntryKind.WITHDRAWN, EntryKind.CARRY)
        ]
        rolled_back = state_of(self._state, transaction_id) == State.ROLLED_BACK
        found = self._wanted(transaction_id, number, entries)
        if found is None:
            return None
        topic_name, wanted = found
        ended = [entry for entry in entries if entry.kind != EntryKind.HALF]
        if rolled_back or not ended:
            return Withdrawal(topic_name, wanted, None, rolled_back)
        last = ended[-1]
        fate = Fate(last.offset) if last.kind == EntryKind.WITHDRAWAL else Fate.WITHDRAWN
        return Withdrawal(topic_name, wanted, self._until_now(now_us, key, wanted, fate), at_us=last.time_us)

    def _wanted(self, transaction_id: bytes, number: int, entries: list[Entry]) -> tuple[str, Wanted] | None:
        """The topic of a withdrawal, and its request; None for other messages."""
        asked = self._state.withdrawals.asked.get(transaction_id, {}).get(number)
        for entry in entries:
            if asked is not None:
                return self._topic(entry.topic), asked
            payload = self._payloads.read(entry.position, entry.size, entry.payload_crc)
            try:
                wanted = None if payload is None else wanted_of(decode_payload(payload).headers or {})
            except (*UNDECODABLE, ValueError):
                wanted = None
            if wanted is not None:
                return self._topic(entry.topic), wanted
        return None

    def _until_now(self, now_us: int, key: bytes, wanted: Wanted, fate: Fate) -> Fate:
        """A withdrawal that waited too long found nothing; there is no entry for that."""
        is_over = fate is Fate.WAITING and not self._state.withdrawals.is_waiting(wanted, key, now_us)
        return Fate.NOT_FOUND if is_over else fate

    def _topic(self, number: int) -> str:
        topic = self._state.topics_by_id.get(number)
        return topic.name if topic is not None else f"#{number}"
