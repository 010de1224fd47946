"""Leases: messages that are handed to an instance until a deadline."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.instances import Instance
from notify.storage.message_run import CommitTimes, MessageRun
from notify.storage.records import StoredMessage

LOOK_AGAIN_US = 250_000
"""When to look again at an expired lease whose end the storage refused to record."""


class Lease:
    """A batch handed to one instance, with one token. Its messages are settled one by one or together."""

    __slots__ = (
        "cursor", "deadline_us", "extended", "id", "instance", "is_interrupted", "length_us", "offsets", "open",
        "times",
    )  # fmt: skip

    def __init__(
        self,
        lease_id: int,
        cursor: Cursor,
        offsets: Sequence[int],
        times: CommitTimes,
        now_us: int,
        length_us: int,
        instance: Instance,
    ) -> None:
        self.id = lease_id
        self.cursor = cursor
        self.offsets = offsets
        self.times = times
        self.open: range | set[int] = range(len(offsets))
        """The places of messages that are not settled; a range while all of them are open."""
        self.length_us = length_us
        self.deadline_us = now_us + length_us
        self.extended: dict[int, int] = {}
        self.instance = instance
        self.is_interrupted = False
        """Whether its consumer has said since that it stops: if it ends without settling, that is not a death."""

    def holds(self, places: range) -> bool:
        """Whether the messages at these places are all leased."""
        return places.stop <= len(self.offsets) and (isinstance(self.open, range) or self.open.issuperset(places))

    def close(self, places: Collection[int]) -> None:
        """End the lease of these messages, which it holds."""
        if len(places) == len(self.open):
            self.open = set()
        elif isinstance(self.open, range):
            self.open = set(self.open).difference(places)
        else:
            self.open.difference_update(places)


@dataclass(slots=True)
class Handed:
    """Messages of one lease on their way to a consumer."""

    token: str
    messages: list[StoredMessage]
    """Empty if they are a run."""
    attempts: list[int] | None
    """The attempt of each message, from 1; None if all are first attempts."""
    replay: int = 0
    """The number of the replay, for the consumer's inbox; see Subscription."""
    run: MessageRun | None = None

    @property
    def count(self) -> int:
        """How many messages these are."""
        return len(self.messages) if self.run is None else self.run.count

    def each(self) -> Iterator[tuple[str, StoredMessage, int]]:
        """(receipt, message, attempt) for each message."""
        for i, message in enumerate(self.messages):
            yield f"{self.token}{i}", message, 1 if self.attempts is None else self.attempts[i]


class Leases:
    """The leases of one group."""

    __slots__ = ("_deadlines", "_group", "_holders", "_ids", "by_id")

    def __init__(self, group: str, ids: Iterator[int], holders: dict[int, str] | None = None) -> None:
        """`ids` yields the id of each new lease. `holders`: a dictionary that gets the group's name for the id of each
        lease while the lease lasts."""
        self.by_id: dict[int, Lease] = {}
        self._group = group
        self._ids = ids
        self._holders = holders
        self._deadlines: list[tuple[int, int]] = []
        """Heap of (when to look at a lease, its id)."""

    def add(
        self,
        cursor: Cursor,
        offsets: Sequence[int],
        times: CommitTimes,
        now_us: int,
        length_us: int,
        instance: Instance,
    ) -> Lease:
        """Make a lease of these offsets; `times`: when their messages were committed."""
        lease = Lease(next(self._ids), cursor, offsets, times, now_us, length_us, instance)
        self.by_id[lease.id] = lease
        if self._holders is not None:
            self._holders[lease.id] = self._group
        heapq.heappush(self._deadlines, (lease.deadline_us, lease.id))
        return lease

    def close(self, lease: Lease, places: Collection[int]) -> None:
        """End the lease of the messages at these places; the lease ends with its last message."""
        lease.close(places)
        if lease.extended:
            for place in places:
                lease.extended.pop(place, None)
        if not lease.open:
            self.by_id.pop(lease.id, None)
            if self._holders is not None:
                self._holders.pop(lease.id, None)

    def extend(self, us: int) -> None:
        """Extend all leases by `us` microseconds."""
        for lease in self.by_id.values():
            lease.length_us += us
            lease.deadline_us += us
            lease.extended = {place: until_us + us for place, until_us in lease.extended.items()}
        self._deadlines = [(at_us + us, lease_id) for at_us, lease_id in self._deadlines]

    def drop(self, topic: str, queue: int) -> None:
        """End all leases of a queue: their receipts become stale."""
        stale = [ls for ls in self.by_id.values() if ls.cursor.topic == topic and ls.cursor.queue == queue]
        for lease in stale:
            lease.instance.drop(lease.cursor.serves, len(lease.open))
            self.close(lease, range(len(lease.offsets)))

    def open_of(self, topic: str) -> list[tuple[Lease, int]]:
        """(lease, place in it) of each leased message of a topic; places of a lease are in order."""
        leases = [lease for lease in self.by_id.values() if lease.cursor.topic == topic]
        return [(lease, place) for lease in leases for place in sorted(lease.open)]

    def held(self) -> Counter[tuple[Instance, str]]:
        """How many messages of each topic each instance holds."""
        counts: Counter[tuple[Instance, str]] = Counter()
        for lease in self.by_id.values():
            counts[(lease.instance, lease.cursor.serves)] += len(lease.open)
        return counts

    def in_flight(self) -> int:
        """How many messages are leased."""
        return sum(len(lease.open) for lease in self.by_id.values())

    def next_us(self) -> int | None:
        """When the next lease has to be looked at; None if there is none."""
        return self._deadlines[0][0] if self._deadlines else None

    def run_out(self, now_us: int) -> list[Lease]:
        """Leases whose deadline has passed, although some of their messages may be extended. Give them to `look_again`
        afterwards."""
        leases: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            lease = self.by_id.get(heapq.heappop(self._deadlines)[1])
            if lease is not None:
                leases.append(lease)
        return leases

    def look_again(self, leases: Iterable[Lease], now_us: int) -> None:
        """Schedule the next look at those of these leases that still have messages, at their earliest deadline."""
        for lease in leases:
            if lease.open:
                until_us = min(lease.extended.get(place, 0) for place in lease.open)
                heapq.heappush(self._deadlines, (max(until_us, now_us + LOOK_AGAIN_US), lease.id))
