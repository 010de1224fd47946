"""Messages of which one is pending at a time: the pending one of each key, and those whose transaction is undecided.

The pending messages are a hint by key: whether one still is delayed is looked up in the index, so that neither a
release nor a withdrawal has anything to do here.
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
    """The delayed message of a key that came last; `topic` and `key` are the topic's number and the hash of the key."""

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
        """A sweep at the bound is not worth its time until what is due at this moment is released."""
        self.collapsed = 0
        """How many messages were collapsed into another one since the start."""

    def note(self, delayed: bytes, dedupe: Dedupe, released: Moment) -> None:
        """A message is the pending one of its key now; at the bound it is not noted, and delivered all the same."""
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
        """Forget the keys whose messages are released; at the bound only if they may be one in a hundred by now,
        because a sweep looks at all, and every message with a key asks for one there."""
        if len(self.pending) >= MOST_PENDING and released < self._full_until:
            return
        self.pending = {key: one for key, one in self.pending.items() if one.moment > released}
        self._sweep_at = min(MOST_PENDING, max(LEAST_SWEPT, 2 * len(self.pending)))
        if len(self.pending) >= MOST_PENDING:
            moments = (one.moment for one in self.pending.values())
            self._full_until = nsmallest(max(1, MOST_PENDING // 100), moments)[-1]

    def replay(self, entries: memoryview, released: Moment) -> None:
        """Do again what the entries of a commit did."""
        for raw in each_of(entries):
            if transaction_id_of(raw) not in self.asked:
                continue
            if raw[0] == EntryKind.ROLLBACK:
                del self.asked[transaction_id_of(raw)]
            elif raw[0] != EntryKind.WITHDRAWN:
                dedupe = self.asked.taken(raw)
                if dedupe is not None and raw[0] == EntryKind.DELAYED:
                    self.note(raw, dedupe, released)
