"""A record of checks, in memory, for people to read: which instance was asked, and what it answered."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

TRANSACTIONS = 10_000
ENTRIES = 20
REASON_CHARACTERS = 300
ASKED = "asked"
"""The step of a check that an instance was handed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One step: an instance was `asked`, or an answer came, with its reason if it had one. `trace_id`: of a check that
    was asked, the sampled trace of its transaction."""

    at_us: int
    what: str
    instance: str = ""
    reason: str = ""
    trace_id: str = ""


class CheckLog:
    """The last ENTRIES steps of each of the TRANSACTIONS that were checked last, since the server started."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, deque[Entry]] = OrderedDict()

    def add(
        self, transaction_id: bytes, at_us: int, what: str, instance: str = "", reason: str = "", trace_id: str = ""
    ) -> None:
        entries = self._entries.get(transaction_id)
        if entries is None:
            while len(self._entries) >= TRANSACTIONS:
                self._entries.popitem(last=False)
            entries = self._entries[transaction_id] = deque(maxlen=ENTRIES)
        else:
            self._entries.move_to_end(transaction_id)
        entries.append(Entry(at_us, what, instance, reason[:REASON_CHARACTERS], trace_id))

    def asked(self, transaction_id: bytes) -> Entry | None:
        """The last time that a producer was handed the transaction's check; None if it is not known."""
        return next((entry for entry in reversed(self.of(transaction_id)) if entry.what == ASKED), None)

    def of(self, transaction_id: bytes) -> list[Entry]:
        """The steps of a transaction, the oldest first."""
        return list(self._entries.get(transaction_id, ()))
