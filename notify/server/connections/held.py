"""Bounds for all connections together on what the server holds for them: answers that clients do not read, and bodies
whose sender is not verified yet. Each connection has bounds of its own besides."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

UNREAD_BYTES = 24 << 20
"""All answers that wait for their readers may have so many bytes. Beyond it the server cuts the connections that have
waited for longest, and for UNREAD_SECONDS at least: a client that reads at all has read by then."""
UNREAD_SECONDS = 3.0
WRITE_SECONDS = 30.0
"""How long an answer may wait for its client to read it, but for the last 64 kB; then the connection is cut."""
SCARCE_REPLY_BYTES = 256 << 10
"""The largest reply while half of UNREAD_BYTES is taken: clients that read slowly get less at once."""


class Connection(Protocol):
    """A connection as `Unread` needs it."""

    def abort(self) -> None:
        """End it at once."""


class _Waiting(NamedTuple):
    """Bytes that wait for a client, since when (the loop's time), and what cuts its connection when time is over."""

    size: int
    since: float
    timer: asyncio.TimerHandle


class Unread:
    """Connections with an answer that is not read, in the order in which they began to wait."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, _Waiting] = {}
        self.total = 0

    def add(self, connection: Connection, size: int, loop: asyncio.AbstractEventLoop) -> None:
        """`size` bytes wait for this connection's client from now on. Others may be cut for it."""
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
        """The connection's client has read, or is gone."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            waiting.timer.cancel()
            self.total -= waiting.size

    def reply_bytes(self, most: int) -> int:
        """How large a reply may be now, at most `most`."""
        return most if self.total < UNREAD_BYTES // 2 else min(most, SCARCE_REPLY_BYTES)


UNVERIFIED_BYTES = 8 << 20
"""All bodies whose sender is not verified yet may have so many bytes; beyond it a request is refused for now."""


class Unverified:
    """Counts the bytes of bodies whose sender is not verified yet."""

    def __init__(self) -> None:
        self.total = 0

    def take(self, size: int) -> bool:
        """Whether `size` more bytes may be held; if so, they count until they are given back."""
        if self.total + size > UNVERIFIED_BYTES:
            return False
        self.total += size
        return True

    def give_back(self, size: int) -> None:
        """`size` bytes are not held any more, or their sender is verified."""
        self.total -= size
