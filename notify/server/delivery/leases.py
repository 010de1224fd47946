"""Leases: messages that are handed out to an instance, each until a time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.instances import Instance
from notify.storage.records import StoredMessage

LOOK_AGAIN_US = 250_000
"""A lease that ran out while the storage refused to record it is looked at again after so long."""


class Lease:
    """A batch handed to one instance: one token, settled message by message or all at once."""

    __slots__ = ("cursor", "deadline_us", "extended", "id", "instance", "length_us", "offsets", "open")

    def __init__(
        self, lease_id: int, cursor: Cursor, offsets: list[int], now_us: int, length_us: int, instance: Instance
    ) -> None:
        self.id = lease_id
        self.cursor = cursor
        self.offsets = offsets
        self.open = set(range(len(offsets)))
        self.length_us = length_us
        self.deadline_us = now_us + length_us
        self.extended: dict[int, int] = {}
        self.instance = instance


@dataclass(slots=True)
class Handed:
    """Messages of one lease on their way to a consumer."""

    token: str
    messages: list[StoredMessage]
    attempts: list[int] | None
    """Which attempt each one is, from 1; None where all are the first."""
    replay: int = 0
    """Which run of the topic's messages it is for an inbox; see Subscription."""

    def each(self) -> Iterator[tuple[str, StoredMessage, int]]:
        """Receipt, message and attempt, one by one."""
        for i, message in enumerate(self.messages):
            yield f"{self.token}{i}", message, 1 if self.attempts is None else self.attempts[i]


class Leases:
    """The leases of one group."""

    __slots__ = ("_deadlines", "_group", "_holders", "_ids", "by_id")

    def __init__(self, group: str, ids: Iterator[int], holders: dict[int, str] | None = None) -> None:
        """`ids` gives the id of each new lease. `holders`: where to note, for as long as there is one, whose a lease
        is, by the group's name."""
        self.by_id: dict[int, Lease] = {}
        self._group = group
        self._ids = ids
        self._holders = holders
        self._deadlines: list[tuple[int, int]] = []
        """Heap of when each lease is looked at, and its id."""

    def add(self, cursor: Cursor, offsets: list[int], now_us: int, length_us: int, instance: Instance) -> Lease:
        """A new lease of these messages."""
        lease = Lease(next(self._ids), cursor, offsets, now_us, length_us, instance)
        self.by_id[lease.id] = lease
        if self._holders is not None:
            self._holders[lease.id] = self._group
        heapq.heappush(self._deadlines, (lease.deadline_us, lease.id))
        return lease

    def close(self, lease: Lease, places: Collection[int]) -> None:
        """These messages of a lease are no longer leased; with its last one it ends."""
        lease.open.difference_update(places)
        if lease.extended:
            for place in places:
                lease.extended.pop(place, None)
        if not lease.open:
            self.by_id.pop(lease.id, None)
            if self._holders is not None:
                self._holders.pop(lease.id, None)

    def extend(self, us: int) -> None:
        """All go on for so much longer."""
        for lease in self.by_id.values():
            lease.length_us += us
            lease.deadline_us += us
            lease.extended = {place: until_us + us for place, until_us in lease.extended.items()}
        self._deadlines = [(at_us + us, lease_id) for at_us, lease_id in self._deadlines]

    def drop(self, topic: str, queue: int) -> None:
        """Receipts of this queue become stale."""
        stale = [ls for ls in self.by_id.values() if ls.cursor.topic == topic and ls.cursor.queue == queue]
        for lease in stale:
            lease.instance.drop(lease.cursor.serves, len(lease.open))
            self.close(lease, range(len(lease.offsets)))

    def open_of(self, topic: str) -> list[tuple[Lease, int]]:
        """The messages of a topic that are leased, each with its place in its lease; within a lease in their order."""
        leases = [lease for lease in self.by_id.values() if lease.cursor.topic == topic]
        return [(lease, place) for lease in leases for place in sorted(lease.open)]

    def held(self) -> Counter[tuple[Instance, str]]:
        """How many messages of each topic each instance has."""
        counts: Counter[tuple[Instance, str]] = Counter()
        for lease in self.by_id.values():
            counts[(lease.instance, lease.cursor.serves)] += len(lease.open)
        return counts

    def in_flight(self) -> int:
        """How many messages are leased."""
        return sum(len(lease.open) for lease in self.by_id.values())

    def next_us(self) -> int | None:
        """When a lease has to be looked at next."""
        return self._deadlines[0][0] if self._deadlines else None

    def run_out(self, now_us: int) -> list[Lease]:
        """Leases whose time is over by now, but for messages that were extended; to be given to `look_again` then."""
        leases: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            lease = self.by_id.get(heapq.heappop(self._deadlines)[1])
            if lease is not None:
                leases.append(lease)
        return leases

    def look_again(self, leases: Iterable[Lease], now_us: int) -> None:
        """Look at these again, if anything of them is still leased, when the first of that runs out."""
        for lease in leases:
            if lease.open:
                until_us = min(lease.extended.get(place, 0) for place in lease.open)
                heapq.heappush(self._deadlines, (max(until_us, now_us + LOOK_AGAIN_US), lease.id))
