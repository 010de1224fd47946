"""Capabilities that only some storages have. Whoever needs one asks for it with isinstance, and does without.

They are apart from the roles (transactions.py, queues.py), so that no storage has a method that does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Retaining(Protocol):
    """Lets go of what is over: a storage that would fill its disk otherwise."""

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        """Another retention from now on: microseconds, and bytes of the log; 0: no bound."""
        ...

    async def retain(self, now_us: int) -> int:
        """Let go of what is decided and whose retention is over; how many segments, or rows, were dropped."""
        ...


@runtime_checkable
class Tended(Protocol):
    """Has something to do now and then: called at every tick of the server."""

    def tend(self, now_us: int) -> None:
        """Do what is due by now, without waiting."""
        ...


@runtime_checkable
class Complaining(Protocol):
    """Knows of damage to what it has stored."""

    def complaints(self) -> list[str]:
        """The damage of this storage, in a sentence each: an administrator has to look at it."""
        ...


@runtime_checkable
class Shippable(Protocol):
    """Is a log on a disk, whose finished segments can be copied elsewhere while it is written to."""

    def begin_segment(self) -> int:
        """Finish the segment that is written to, soon, if it holds anything; the position that bounds all of it.

        Raises DiskFull, Unavailable or StorageFailed where that cannot be done now.
        """
        ...

    def hold_from(self, position: int | None) -> None:
        """Let retention drop nothing behind a position; None: everything that is over."""
        ...

    def behind(self, position: int) -> tuple[int, int]:
        """How many finished segments, and how many durable bytes, lie behind a position."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """Names the shards that it consists of."""

    def shards(self) -> Sequence[str]:
        """The names of its shards, one at least."""
        ...


def shard_names(store: object, own: str) -> tuple[str, ...]:
    """The shards that a storage consists of; `own`, the name in the server's settings, where it names none."""
    return tuple(store.shards()) if isinstance(store, Sharded) else (own,)
