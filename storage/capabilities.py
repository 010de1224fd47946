"""Capabilities that only some storages have. A caller tests for one with isinstance and works without it.

They are separate from the roles (transactions.py, queues.py), so that no storage has a method that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Retaining(Protocol):
    """Drops old messages, so that the disk does not fill up."""

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        """Set the retention, in microseconds and in bytes of the log; 0: no bound."""
        ...

    async def retain(self, now_us: int) -> int:
        """Drop decided transactions and messages whose retention is over; returns how many segments, or rows."""
        ...


@runtime_checkable
class Tended(Protocol):
    """Has periodic work. The server calls `tend` at every tick."""

    def tend(self, now_us: int) -> None:
        """Do the work that is due, without waiting."""
        ...


@runtime_checkable
class Dated(Protocol):
    """Knows when it was written to last."""

    written_us: int
    """The time (microseconds since 1970) of what was the last record when it was opened; 0 for none."""


@runtime_checkable
class Placing(Protocol):
    """Tells when committed messages are in their queues."""

    def on_placed(self, callback: Callable[[int, Mapping[str, int]], None]) -> None:
        """Call `callback(committed_us, counts)` on the event loop once messages that were committed together are
        durable in their queues. `counts`: how many by topic, without delayed messages."""
        ...


@runtime_checkable
class Complaining(Protocol):
    """Reports damage to its stored data."""

    def complaints(self) -> list[str]:
        """A sentence for each damage that an administrator has to look at."""
        ...


@runtime_checkable
class Shippable(Protocol):
    """A log on a disk whose finished segments can be copied elsewhere while the log is written."""

    def begin_segment(self) -> int:
        """Have the open segment finished soon, if it is not empty. Returns a position before which all of it lies.

        Raises DiskFull, Unavailable or StorageFailed if a new segment cannot be begun now.
        """
        ...

    def hold_from(self, position: int | None) -> None:
        """Keep retention from dropping segments after `position`; None: retention may drop any segment."""
        ...

    def behind(self, position: int) -> tuple[int, int]:
        """How many finished segments and how many durable bytes follow a position."""
        ...


@runtime_checkable
class NamesBodies(Protocol):
    """Knows which stored bodies (notify/protocol/large_bodies.py) its messages name."""

    async def stored_bodies(self, after: str) -> tuple[set[str], str]:
        """The names that a part of what is stored mentions, from a place on, and where the next part begins.

        `after`: "" for the first part; with the names, "" says that this was the last one. A message that is stored
        before the first call, and until the last one, is in one of the parts, even if it is moved meanwhile; the name
        of a deleted message may appear too. Raises InvalidRequest for an invalid place, Unavailable if a part of the
        storage is unreachable.
        """
        ...


@runtime_checkable
class Sharded(Protocol):
    """Consists of named shards."""

    def shards(self) -> Sequence[str]:
        """The names of the shards; at least one."""
        ...


def shard_names(store: object, own: str) -> tuple[str, ...]:
    """The names of a storage's shards; `own`, the name in the server's settings, if the storage names no shards."""
    return tuple(store.shards()) if isinstance(store, Sharded) else (own,)
