"""LeftBehind: what a producer in mode `auto` knows of transactions whose halves the server did not store in time.

It decides whether a commit asks the server. While the server is unreachable (the circuit is open) no commit does. Once
the server is back, only those commits wait behind others that have a key of a transaction that still waits in the
table: the order per key is kept. `LeftSender` sends what was left behind.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from notify.client.tables.left_rows import Key
from notify.errors import Closed, NotifyError, Unavailable
from notify.protocol.wire import PackedMessage

MOST_LEFT = 100_000
"""The most transactions that are remembered. With more, every commit with a key goes by row until the table has none
left."""
COMMIT_SECONDS = 5.0
"""How long after its rows were inserted a transaction may still commit without the knowledge of this process."""
_NOT_NOW = (421, 429, 500, 503, 504, 507)


def may_be_left(error: NotifyError) -> bool:
    """Whether a transaction may commit although its half was not stored: the server is unreachable, or cannot take it
    now.

    Not if the server refused it permanently, or if the producer is closed.
    """
    return not isinstance(error, Closed) and (error.retryable or error.status in _NOT_NOW)


def means_away(error: NotifyError) -> bool:
    """Whether the next half would most likely not be stored either. A rate or a full backlog concerns one topic."""
    return (isinstance(error, Unavailable) and error.status != 429) or error.status in (500, 503)


class Origin(NamedTuple):
    """Where the rows of a transaction are: the schema, and its source id, since a connection of the same engine may
    find the schema of another database."""

    schema: str
    source: str


@dataclass(slots=True)
class _Left:
    """A transaction that was left behind, its keys, where its rows are, and when they were inserted."""

    keys: frozenset[Key]
    origin: Origin
    at: float
    has_ended: bool = False


class LeftBehind:
    """The circuit, and the keys of what was left behind. Any thread may use it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._left: dict[str, _Left] = {}
        """The transactions of this process, by id."""
        self._last: dict[Key, str] = {}
        """The last such transaction with a key."""
        self._others: Collection[Key] = frozenset()
        """The keys of all that waited in the tables at the last look, also of other processes."""
        self._full_until: float | None = None
        """If there are too many to be remembered: when those that may still be committing have ended."""
        self.is_away = False
        """Whether the server is unreachable, so that commits do not ask it."""
        self.times_away = 0
        """How often the server did not take something."""
        self.on_change: Callable[[], None] | None = None
        """Called, in any thread, when there is something to send, or the server is unreachable."""

    def holds(self, messages: Iterable[PackedMessage]) -> bool:
        """Whether a transaction with these messages goes by row, without asking the server.

        Each commit asks this first. In a forked child nothing is left behind: the parent sends what it has left, and a
        thread of it may have held the lock.
        """
        if self._process != os.getpid():
            self._renew()
        if self.is_away:
            return True
        is_full = self._full_until is not None
        if not self._last and not self._others and not is_full:
            return False
        keys = _keys_of(messages)
        return (is_full and bool(keys)) or any(key in self._last or key in self._others for key in keys)

    def away(self) -> None:
        """The server did not take something: from now on commits go by row."""
        self.times_away += 1
        if not self.is_away:
            self.is_away = True
            self._notify()

    def back(self, times_away: int) -> None:
        """The server answers again, and has what it did not take before, unless it was found away since then."""
        if times_away == self.times_away:
            self.is_away = False

    def leave(self, transaction_id: str, messages: Iterable[PackedMessage], origin: Origin) -> None:
        """The rows of a transaction that is left behind are about to be inserted at `origin`."""
        keys = frozenset(_keys_of(messages))
        now = self._monotonic()
        with self._lock:
            if len(self._left) >= MOST_LEFT:
                self._full_until = now + COMMIT_SECONDS
                return
            self._left[transaction_id] = _Left(keys, origin, now)
            self._last.update(dict.fromkeys(keys, transaction_id))

    def ended(self, transaction_id: str) -> None:
        """The transaction has committed."""
        left = self._left.get(transaction_id)
        if left is not None:
            left.has_ended = True
        if not self.is_away:
            self._notify()

    def forget(self, transaction_ids: Iterable[str]) -> None:
        """The server has these transactions, or they were not committed."""
        with self._lock:
            for transaction_id in transaction_ids:
                left = self._left.pop(transaction_id, None)
                for key in () if left is None else left.keys:
                    if self._last.get(key) == transaction_id:
                        del self._last[key]

    def ids(self) -> list[str]:
        """The transactions of this process that wait, or may."""
        with self._lock:
            return list(self._left)

    def decided(self) -> dict[Origin, list[str]]:
        """Those of `ids` that have committed, or will not any more: without a waiting row they need no sending."""
        before = self._monotonic() - COMMIT_SECONDS
        decided: dict[Origin, list[str]] = {}
        with self._lock:
            for name, left in self._left.items():
                if left.has_ended or left.at < before:
                    decided.setdefault(left.origin, []).append(name)
        return decided

    def looked(self, others: Collection[Key], *, are_all: bool, began: float) -> None:
        """Take the keys of what waits in the tables, as a look that `began` then found them.

        `are_all`: whether these are the keys of all that waits; otherwise every commit goes by row.
        """
        with self._lock:
            self._others = others
            if not are_all:
                self._full_until = began + COMMIT_SECONDS
            elif self._full_until is not None and began >= self._full_until:
                self._full_until = None

    def meet(self, keys: Collection[Key]) -> None:
        """A transaction found that another process has left behind transactions with these keys."""
        if keys:
            with self._lock:
                self._others = frozenset([*self._others, *keys])
            self._notify()

    def _renew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._left, self._last, self._others, self._full_until = {}, {}, frozenset(), None
        self.is_away, self.on_change = False, None

    def _notify(self) -> None:
        on_change = self.on_change
        if on_change is not None:
            on_change()


def _keys_of(messages: Iterable[PackedMessage]) -> set[Key]:
    return {(message.topic, message.key) for message in messages if message.key is not None}
