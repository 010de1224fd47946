"""The plan of a request that settles: the changes that its items ask for, before any is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from notify.errors import Forbidden, InvalidRequest, NotifyError, StaleReceipt
from notify.protocol.limits import LIMITS, check_between
from notify.protocol.wire import SettleItem
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.leases import Lease
from notify.server.delivery.receipts import places_of_each
from notify.storage.groups import Subscription

RENEW_SECONDS = 30.0
"""How long a lease is renewed if the request does not say."""
FREE_INTERRUPTIONS = 16
"""How often a message counts no attempt if its consumer was told to stop. Each further time counts as a death: a
message that keeps its consumers from stopping must become a dead letter in the end."""


class Acked:
    """Messages of one lease that are acknowledged."""

    __slots__ = ("items", "places")

    def __init__(self) -> None:
        self.places: list[range] = []
        self.items: list[int] = []
        """The numbers of the request's items that acknowledge them."""


class Tally(NamedTuple):
    """How the attempts at a message have ended so far, without settling it."""

    attempts: int
    """All of them, deaths included."""
    deaths: int
    """Those that ended because the lease ran out."""
    interruptions: int
    """How often a consumer that was told to stop held the message. These counted no attempt."""

    @classmethod
    def of(cls, lease: Lease, place: int) -> Tally:
        """Before the attempt that a lease stands for."""
        return cls.at(lease.cursor, lease.offsets[place])

    @classmethod
    def at(cls, cursor: Cursor, offset: int) -> Tally:
        """So far, at the message at an offset."""
        return cls(cursor.attempts(offset), cursor.deaths(offset), cursor.interruptions(offset))

    @property
    def failures(self) -> int:
        """The attempts whose consumer said that they failed."""
        return self.attempts - self.deaths

    def failed(self) -> Tally:
        return self._replace(attempts=self.attempts + 1)

    def died(self) -> Tally:
        return self._replace(attempts=self.attempts + 1, deaths=self.deaths + 1)

    def interrupted(self) -> Tally:
        return self._replace(interruptions=self.interruptions + 1)

    def text(self) -> str:
        """In words, for people."""
        parts = [f"{count} {'attempt' if count == 1 else 'attempts'} {how}" for count, how in (
            (self.failures, "failed"), (self.deaths, "ended with the death of the consumer, whose lease ran out"),
        ) if count]  # fmt: skip
        return ", ".join(parts)


class Attempt(NamedTuple):
    """A message of a lease whose attempt did not settle it: the tally after it, when the next is due (0: now)."""

    lease: Lease
    place: int
    tally: Tally
    due_us: int
    item: int = 0
    """The number of the request's item that asks for the retry."""
    reason: str = ""
    is_interruption: bool = False
    """Whether no attempt counts, because the consumer was told to stop."""
    trace: str = ""


class Dead(NamedTuple):
    """A message of a lease that becomes a dead letter, or whose key is held; why, and the tally of its attempts."""

    lease: Lease
    place: int
    reason: str
    tally: Tally
    item: int = 0
    is_exhausted: bool = False
    """Whether it has used up its attempts; otherwise its consumer gives it up."""
    trace: str = ""


class Renewed(NamedTuple):
    """Messages whose lease is renewed until `until_us`."""

    lease: Lease
    places: range
    until_us: int


class Returned(NamedTuple):
    """Messages that their consumer returns untried: no attempt counts."""

    lease: Lease
    places: range


class Plan:
    """The changes that a request's items ask for."""

    __slots__ = ("_now_us", "acked", "again", "dead", "refused", "renewed", "returned", "settled")

    def __init__(
        self,
        items: Sequence[SettleItem],
        leases: Mapping[int, Lease],
        now_us: int,
        may: Callable[[str], bool] | None = None,
    ) -> None:
        """`leases`: the group's, by id. `may`: whether the consumer may settle messages of a topic; None: of all."""
        self._now_us = now_us
        self.acked: dict[Cursor, dict[Lease, Acked]] = {}
        self.again: dict[Cursor, list[Attempt]] = {}
        self.dead: dict[Cursor, list[Dead]] = {}
        self.renewed: list[Renewed] = []
        self.returned: list[Returned] = []
        self.settled: dict[Lease, range | set[int]] = {}
        """The places in each lease of the messages that an item settles, retries or returns."""
        self.refused: dict[int, NotifyError] = {}
        """The errors of refused items, by the item's number."""
        for number, parsed in enumerate(places_of_each([item.receipt for item in items])):
            item = items[number]
            try:
                if isinstance(parsed, InvalidRequest):
                    raise parsed
                lease_id, places = parsed
                lease = leases.get(lease_id)
                if lease is None or not lease.holds(places):
                    raise StaleReceipt("the lease is over: the message was settled, or it is with another consumer now")
                settled = self.settled.get(lease)
                if settled is not None and _overlaps(settled, places):
                    raise StaleReceipt("another item of this request settles the message already")
                if may is not None and not may(lease.cursor.serves):
                    raise Forbidden(f"these are messages of topic {lease.cursor.serves!r}, which you may not consume")
                if item.action == "renew":
                    self._renew(item, lease, places)
                    continue
                if item.action == "ack":
                    self._ack(number, lease, places)
                elif item.action == "interrupted":
                    self._interrupt(number, item, lease, places)
                elif item.action == "give_back":
                    self.returned.append(Returned(lease, places))
                else:
                    self._refuse(number, item, lease, places)
                self.settled[lease] = places if settled is None else _joined(settled, places)
            except NotifyError as error:
                self.refused[number] = error

    def _ack(self, number: int, lease: Lease, places: range) -> None:
        by_lease = self.acked.get(lease.cursor)
        if by_lease is None:
            by_lease = self.acked[lease.cursor] = {}
        acked = by_lease.get(lease)
        if acked is None:
            acked = by_lease[lease] = Acked()
        if acked.places and acked.places[-1].stop == places.start:
            acked.places[-1] = range(acked.places[-1].start, places.stop)
        else:
            acked.places.append(places)
        acked.items.append(number)

    def _refuse(self, number: int, item: SettleItem, lease: Lease, places: range) -> None:
        """Plan a retry or a dead letter. Raises InvalidRequest."""
        cursor, trace = lease.cursor, item.trace or ""
        if item.action == "dead_letter":
            reason = item.reason or "refused by the consumer"
            self.dead.setdefault(cursor, []).extend(
                [Dead(lease, place, reason, Tally.of(lease, place).failed(), number, trace=trace) for place in places]
            )
            return
        if item.action != "retry":
            raise InvalidRequest(
                f"action {item.action[:20]!r} is not ack, retry, dead_letter, give_back, interrupted or renew",
                "invalid_action",
            )
        if item.delay is not None:
            check_between("delay", item.delay, 0, LIMITS.delay_seconds)
        for place in places:
            tally = Tally.of(lease, place).failed()
            offset = lease.offsets[place]
            if tally.failures >= cursor.subscription.max_attempts and tally.failures >= cursor.bounds(offset)[0]:
                reason = item.reason or tally.text()
                exhausted = Dead(lease, place, reason, tally, number, is_exhausted=True, trace=trace)
                self.dead.setdefault(cursor, []).append(exhausted)
            else:
                failures = tally.failures - cursor.forgiven(offset)[0]
                due_us = self._now_us + _back_off_us(cursor.subscription, failures, item.delay)
                self.again.setdefault(cursor, []).append(
                    Attempt(lease, place, tally, due_us, number, item.reason or "", trace=trace)
                )

    def _interrupt(self, number: int, item: SettleItem, lease: Lease, places: range) -> None:
        """Plan that messages are available again at once, because their consumer stops while it handles them."""
        for place in places:
            message = ended(lease, place, item.reason or "its consumer stopped", is_interrupted=True, item=number)
            if isinstance(message, Dead):
                self.dead.setdefault(lease.cursor, []).append(message)
            else:
                self.again.setdefault(lease.cursor, []).append(message)

    def _renew(self, item: SettleItem, lease: Lease, places: range) -> None:
        """Plan the renewal of a lease. Raises InvalidRequest."""
        seconds = RENEW_SECONDS if item.lease is None else item.lease
        check_between("lease", seconds, LIMITS.lease_min_seconds, LIMITS.lease_max_seconds)
        self.renewed.append(Renewed(lease, places, self._now_us + round(seconds * 1_000_000)))


def ended(lease: Lease, place: int, reason: str, *, is_interrupted: bool, item: int = 0) -> Attempt | Dead:
    """Plan for a message whose attempt ended without a result: its consumer died, or was told to stop.

    `is_interrupted`: whether it was told to stop; this counts no attempt, within FREE_INTERRUPTIONS.
    """
    tally = Tally.of(lease, place)
    if is_interrupted and tally.interruptions < FREE_INTERRUPTIONS:
        reason = f"{reason}; its consumer was stopping, so no attempt counts"
        return Attempt(lease, place, tally.interrupted(), 0, item, reason, is_interruption=True)
    tally = tally.died()
    cursor, offset = lease.cursor, lease.offsets[place]
    if tally.deaths >= cursor.subscription.max_deaths and tally.deaths >= cursor.bounds(offset)[1]:
        return Dead(lease, place, tally.text(), tally, item, is_exhausted=True)
    return Attempt(lease, place, tally, 0, item, reason)


def _overlaps(settled: range | set[int], places: range) -> bool:
    if isinstance(settled, range):
        return settled.start < places.stop and places.start < settled.stop
    return not settled.isdisjoint(places)


def _joined(settled: range | set[int], places: range) -> range | set[int]:
    """All these places, as a range if they are neighbours, as most are."""
    if isinstance(settled, range):
        return range(settled.start, places.stop) if settled.stop == places.start else {*settled, *places}
    settled.update(places)
    return settled


def _back_off_us(s: Subscription, failures: int, delay: float | None) -> int:
    if delay is not None:
        return round(delay * 1_000_000)
    return min(s.retry_max_us, s.retry_min_us << min(failures - 1, 40))
