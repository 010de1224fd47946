"""What is held for clients, bounded for all connections together beside the bounds of each: answers that they do not
read, and bodies of which it is not known yet who sends them."""

from __future__ import annotations

from typing import Protocol

UNREAD_BYTES = 48 << 20
"""Of all answers that wait for their readers. Beyond it those connections are cut that have waited for longest, and for
UNREAD_SECONDS at least: who reads at all has read by then."""
UNREAD_SECONDS = 3.0
SCARCE_REPLY_BYTES = 256 << 10
"""Of a reply, while half of that is taken: who reads slowly gets less at once, and keeps others from little."""


class Connection(Protocol):
    """What `Unread` needs of one."""

    def abort(self) -> None:
        """End it at once."""


class Unread:
    """Connections with an answer that is not read, in the order in which they began to wait."""

    def __init__(self) -> None:
        self._bytes: dict[Connection, tuple[int, float]] = {}
        self.total = 0

    def add(self, connection: Connection, size: int, now: float) -> None:
        """So many bytes wait for this one's client, from now (the loop's time) on. Others may be cut for it."""
        self.discard(connection)
        self._bytes[connection] = (size, now)
        self.total += size
        while self.total > UNREAD_BYTES:
            oldest, (_, since) = next(iter(self._bytes.items()))
            if now - since < UNREAD_SECONDS:
                break
            self.discard(oldest)
            oldest.abort()

    def discard(self, connection: Connection) -> None:
        """Its client has read, or is gone."""
        self.total -= self._bytes.pop(connection, (0, 0.0))[0]

    def reply_bytes(self, most: int) -> int:
        """How large a reply may be now, at most `most`."""
        return most if self.total < UNREAD_BYTES // 2 else min(most, SCARCE_REPLY_BYTES)


UNVERIFIED_BYTES = 16 << 20
"""Of all bodies that are held while it is being found out who sends them; beyond it they are to be sent again later."""


class Unverified:
    """Bytes of such bodies."""

    def __init__(self) -> None:
        self.total = 0

    def take(self, size: int) -> bool:
        """Whether so many more may be held; then they count until they are given back."""
        if self.total + size > UNVERIFIED_BYTES:
            return False
        self.total += size
        return True

    def give_back(self, size: int) -> None:
        """So many are held no more, or it is known now who sent them."""
        self.total -= size
