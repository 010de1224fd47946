"""The plan of a request that settles: what its items ask for, before anything is done."""

from __future__ import annotations

from typing import NamedTuple

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.leases import Lease


class Acked:
    """Messages of one lease that are acknowledged."""

    __slots__ = ("items", "places")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.items: list[int] = []
        """The items of the request that say so."""


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
    """The changes that a request's items ask for. Nothing is done yet."""

    __slots__ = ("acked", "again", "dead", "taken")

    def __init__(self) -> None:
        self.acked: dict[Cursor, dict[Lease, Acked]] = {}
        self.again: dict[Cursor, list[Attempt]] = {}
        self.dead: dict[Cursor, list[Dead]] = {}
        self.taken: dict[Lease, set[int]] = {}
        """The messages of each lease that an item settles."""

    def ack(self, lease: Lease, places: range, item: int) -> None:
        """This item of the request acknowledges these messages."""
        of_cursor = self.acked.get(lease.cursor)
        if of_cursor is None:
            of_cursor = self.acked[lease.cursor] = {}
        acked = of_cursor.get(lease)
        if acked is None:
            acked = of_cursor[lease] = Acked()
        acked.places += places
        acked.items.append(item)

    def take(self, lease: Lease, places: range) -> None:
        """An item settles these messages: no other item of the request may."""
        taken = self.taken.get(lease)
        if taken is None:
            self.taken[lease] = set(places)
        else:
            taken.update(places)
