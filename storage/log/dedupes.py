"""Dedupe keys: the pending message of each key, and the keys of undecided messages.

The pending message of a key is only a hint: the index says whether it is still delayed. So neither a release nor
a withdrawal changes anything here.
"""

from __future__ import annotations

from heapq import nsmallest

import msgspec

from notify.protocol.withdrawal import Dedupe
from notify.storage.log.entry import Entry, EntryKind, each_of, transaction_id_of
from notify.storage.log.pending import Asked
from notify.storage.log.times import Moment
from notify.storage.withdrawals import MOST_PENDING

LEAST_SWEPT = 1000


class PendingOne(msgspec.Struct, array_like=True, gc=False):
    """The newest delayed message of a key; `topic` and `key` are the topic's number and the hash of the key."""

    topic: int
    key: int
    id: bytes
    number: int
    due_us: int
    position: int

    @property
    def moment(self) -> Moment:
        return self.due_us, self.position


class Dedupes:
    """The dedupe keys that `place` and replay need to know."""

    def __init__(self) -> None:
        self.asked = Asked[Dedupe]()
        """The keys of undecided messages."""
        self.pending: dict[tuple[int, int], PendingOne] = {}
        """By topic number and the hash of a key."""
        self._sweep_at = LEAST_SWEPT
        self._full_until: Moment = (0, 0)
        """When the next sweep at the bound may free anything: once the messages that are due now are released."""
        self.collapsed = 0
        """How many messages were collapsed into another one since the start."""

    def note(self, delayed: bytes, dedupe: Dedupe, released: Moment) -> None:
        """Note a message as the pending one of its key. At the bound it is not noted, but still delivered."""
        if len(self.pending) >= self._sweep_at:
            self.sweep(released)
        if len(self.pending) < MOST_PENDING:
            entry = Entry.of(delayed)
            self.add(
                PendingOne(
                    entry.topic, dedupe.key_hash, entry.transaction_id, entry.message_no, entry.due_us, entry.position
                )
            )

    def add(self, one: PendingOne) -> None:
        self.pending[one.topic, one.key] = one

    def sweep(self, released: Moment) -> None:
        """Forget the keys whose messages are released. At the bound, do so only once these may be 1 % of all keys,
        because a sweep looks at all keys, and every message with a key asks for one."""
        if len(self.pending) >= MOST_PENDING and released < self._full_until:
            return
        self.pending = {key: one for key, one in self.pending.items() if one.moment > released}
        self._sweep_at = min(MOST_PENDING, max(LEAST_SWEPT, 2 * len(self.pending)))
        if len(self.pending) >= MOST_PENDING:
            moments = (one.moment for one in self.pending.values())
            self._full_until = nsmallest(max(1, MOST_PENDING // 100), moments)[-1]

    def replay(self, entries: memoryview, released: Moment) -> None:
        """Replay the entries of a commit."""
        for raw in each_of(entries):
            if transaction_id_of(raw) not in self.asked:
                continue
            if raw[0] == EntryKind.ROLLBACK:
                del self.asked[transaction_id_of(raw)]
            elif raw[0] != EntryKind.WITHDRAWN:
                dedupe = self.asked.taken(raw)
                if dedupe is not None and raw[0] == EntryKind.DELAYED:
                    self.note(raw, dedupe, released)
