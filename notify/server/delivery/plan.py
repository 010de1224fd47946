"""The plan of a request that settles: the changes that its items ask for, before any is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from notify.errors import Forbidden, InvalidRequest, NotifyError, StaleReceipt
from notify.limits import LIMITS, check_between
from notify.server.delivery.cursor import Cursor
from notify.server.delivery.leases import Lease
from notify.server.delivery.receipts import places_of_each
from notify.storage.groups import Subscription
from notify.wire import SettleItem

RENEW_SECONDS = 30.0
"""How long a lease is renewed if the request does not say."""


class Acked:
    """Messages of one lease that are acknowledged."""

    __slots__ = ("items", "places")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.items: list[int] = []
        """The numbers of the request's items that acknowledge them."""


class Attempt(NamedTuple):
    """A message of a lease whose attempt failed: the number of attempts, and when the next one is due (0: now)."""

    lease: Lease
    place: int
    attempts: int
    due_us: int
    item: int = 0
    """The number of the request's item that asks for the retry."""
    reason: str = ""


class Dead(NamedTuple):
    """A message of a lease that becomes a dead letter, and why."""

    lease: Lease
    place: int
    reason: str
    item: int = 0


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
        self.settled: dict[Lease, set[int]] = {}
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
                if lease is None or places.stop > len(lease.offsets) or not lease.open.issuperset(places):
                    raise StaleReceipt("the lease is over: the message was settled, or it is with another consumer now")
                settled = self.settled.get(lease)
                if settled is not None and not settled.isdisjoint(places):
                    raise StaleReceipt("another item of this request settles the message already")
                if may is not None and not may(lease.cursor.serves):
                    raise Forbidden(f"these are messages of topic {lease.cursor.serves!r}, which you may not consume")
                if item.action == "renew":
                    self._renew(item, lease, places)
                    continue
                if item.action == "ack":
                    self._ack(number, lease, places)
                elif item.action == "give_back":
                    self.returned.append(Returned(lease, places))
                else:
                    self._refuse(number, item, lease, places)
                self.settled.setdefault(lease, set()).update(places)
            except NotifyError as error:
                self.refused[number] = error

    def _ack(self, number: int, lease: Lease, places: range) -> None:
        by_lease = self.acked.get(lease.cursor)
        if by_lease is None:
            by_lease = self.acked[lease.cursor] = {}
        acked = by_lease.get(lease)
        if acked is None:
            acked = by_lease[lease] = Acked()
        acked.places += places
        acked.items.append(number)

    def _refuse(self, number: int, item: SettleItem, lease: Lease, places: range) -> None:
        """Plan a retry or a dead letter. Raises InvalidRequest."""
        cursor = lease.cursor
        if item.action == "dead_letter":
            reason = item.reason or "refused by the consumer"
            self.dead.setdefault(cursor, []).extend([Dead(lease, place, reason, number) for place in places])
            return
        if item.action != "retry":
            raise InvalidRequest(
                f"action {item.action[:20]!r} is not ack, retry, dead_letter, give_back or renew", "invalid_action"
            )
        if item.delay is not None:
            check_between("delay", item.delay, 0, LIMITS.delay_seconds)
        for place in places:
            attempts = cursor.attempts(lease.offsets[place]) + 1
            if attempts >= cursor.subscription.max_attempts:
                reason = item.reason or f"{attempts} attempts failed"
                self.dead.setdefault(cursor, []).append(Dead(lease, place, reason, number))
            else:
                due_us = self._now_us + _back_off_us(cursor.subscription, attempts, item.delay)
                self.again.setdefault(cursor, []).append(
                    Attempt(lease, place, attempts, due_us, number, item.reason or "")
                )

    def _renew(self, item: SettleItem, lease: Lease, places: range) -> None:
        """Plan the renewal of a lease. Raises InvalidRequest."""
        seconds = RENEW_SECONDS if item.lease is None else item.lease
        check_between("lease", seconds, LIMITS.lease_min_seconds, LIMITS.lease_max_seconds)
        self.renewed.append(Renewed(lease, places, self._now_us + round(seconds * 1_000_000)))


def _back_off_us(s: Subscription, attempts: int, delay: float | None) -> int:
    if delay is not None:
        return round(delay * 1_000_000)
    return min(s.retry_max_us, s.retry_min_us << min(attempts - 1, 40))
