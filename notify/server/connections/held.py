"""Bounds on the memory for all connections together: answers that clients have not read, and bodies whose sender is not
verified yet. Each single connection has bounds as well."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

UNREAD_BYTES = 24 << 20
"""The most bytes of unread answers of all connections. Beyond it the server cuts the connections that have waited
longest, if they have waited for UNREAD_SECONDS: a client that reads at all has read by then."""
UNREAD_SECONDS = 3.0
WRITE_SECONDS = 30.0
"""How long a client may take to read all but the last 64 kB of an answer; then its connection is cut."""
SCARCE_REPLY_BYTES = 256 << 10
"""The largest reply while half of UNREAD_BYTES is used, so that slow readers get smaller replies."""


class Connection(Protocol):
    """The part of a connection that `Unread` uses."""

    def abort(self) -> None:
        """End the connection immediately."""


class _Waiting(NamedTuple):
    """Unread bytes of a connection, since when (the loop's time), and the timer that cuts the connection."""

    size: int
    since: float
    timer: asyncio.TimerHandle


class Unread:
    """Connections with an unread answer, in the order in which they began to wait."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, _Waiting] = {}
        self.total = 0

    def add(self, connection: Connection, size: int, loop: asyncio.AbstractEventLoop) -> None:
        """Count `size` unread bytes of a connection from now on. Other connections may be cut to keep the bound."""
        self.discard(connection)
        now = loop.time()
        self._waiting[connection] = _Waiting(size, now, loop.call_later(WRITE_SECONDS, connection.abort))
        self.total += size
        while self.total > UNREAD_BYTES:
            oldest, waiting = next(iter(self._waiting.items()))
            if now - waiting.since < UNREAD_SECONDS:
                break
            self.discard(oldest)
            oldest.abort()

    def discard(self, connection: Connection) -> None:
        """Stop counting a connection, whose client has read or is gone."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            waiting.timer.cancel()
            self.total -= waiting.size

    def reply_bytes(self, most: int) -> int:
        """How large a reply may be now, at most `most`."""
        return most if self.total < UNREAD_BYTES // 2 else min(most, SCARCE_REPLY_BYTES)


UNVERIFIED_BYTES = 8 << 20
"""The most bytes of bodies whose sender is not verified yet; beyond it requests are refused for now."""


class Unverified:
    """Counts the bytes of bodies whose sender is not verified yet."""

    def __init__(self) -> None:
        self.total = 0

    def take(self, size: int) -> bool:
        """Whether `size` more bytes may be held; if so, they count until `give_back`."""
        if self.total + size > UNVERIFIED_BYTES:
            return False
        self.total += size
        return True

    def give_back(self, size: int) -> None:
        """Stop counting `size` bytes, which are dropped or whose sender is verified."""
        self.total -= size
