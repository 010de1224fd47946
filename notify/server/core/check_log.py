"""The checks of undecided transactions: who was asked, and what was answered. For people to read; in memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

TRANSACTIONS = 10_000
ENTRIES = 20
REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Entry:
    """One step: `asked` of an instance, or what was said, with the reason if one was given."""

    at_us: int
    what: str
    instance: str = ""
    reason: str = ""


class CheckLog:
    """The last steps of the transactions that were checked last, since the server started."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, deque[Entry]] = OrderedDict()

    def add(self, transaction_id: bytes, at_us: int, what: str, instance: str = "", reason: str = "") -> None:
        entries = self._entries.get(transaction_id)
        if entries is None:
            while len(self._entries) >= TRANSACTIONS:
                self._entries.popitem(last=False)
            entries = self._entries[transaction_id] = deque(maxlen=ENTRIES)
        else:
            self._entries.move_to_end(transaction_id)
        entries.append(Entry(at_us, what, instance, reason[:REASON_CHARACTERS]))

    def of(self, transaction_id: bytes) -> list[Entry]:
        """The oldest first."""
        return list(self._entries.get(transaction_id, ()))
