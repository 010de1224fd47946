"""The plan of a request that settles: what its items ask for, before anything is done."""

from __future__ import annotations

from typing import NamedTuple

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.leases import Lease


class Acked(NamedTuple):
    """Messages of a lease that are acknowledged."""

    lease: Lease
    places: range
    item: int
    """Which item of the request says so."""


class Attempt(NamedTuple):
    """A message of a lease whose attempt failed: how many there were, and when the next is due (0: at once)."""

    lease: Lease
    place: int
    attempts: int
    due_us: int
    item: int = 0
    """Which item of the request asks for it."""


class Dead(NamedTuple):
    """A message of a lease that is tried no more, and why."""

    lease: Lease
    place: int
    reason: str
    item: int = 0


class Plan:
    """The changes that a request's items ask for, by queue. Nothing is done yet."""

    __slots__ = ("acked", "again", "dead", "taken")

    def __init__(self) -> None:
        self.acked: dict[Cursor, list[Acked]] = {}
        self.again: dict[Cursor, list[Attempt]] = {}
        self.dead: dict[Cursor, list[Dead]] = {}
        self.taken: dict[int, set[int]] = {}
        """By lease, the messages that an item settles."""
