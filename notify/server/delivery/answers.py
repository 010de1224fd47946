"""Answers: which leases an instance was lately given for which of its requests. A request that comes again, because its
answer was lost on the way, gets the same messages with the same receipts, and no attempt counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from notify.server.delivery.instances import Instances
from notify.server.delivery.leases import Handed, Lease, Leases
from notify.server.delivery.owners import Owners
from notify.server.delivery.receipts import lease_of
from notify.server.delivery.settling import Settling
from notify.storage.queues import Store
from notify.storage.records import StoredMessage

MOST_ANSWERS = 8
"""The most answers of an instance that are remembered: a consumer has one request open, or two."""
READ_BYTES = 8 << 20


class Answers:
    """The answers of one group's instances."""

    __slots__ = ("_held", "_instances", "_owners", "_settling", "_store")

    def __init__(self, store: Store, instances: Instances, held: Leases, owners: Owners, settling: Settling) -> None:
        self._store = store
        self._instances = instances
        self._held = held
        self._owners = owners
        self._settling = settling

    def note(self, instance: str, request_id: str, handed: Iterable[Handed]) -> None:
        """Remember what an instance was handed for a request."""
        answers = self._instances[instance].answers
        if len(answers) >= MOST_ANSWERS:
            del answers[next(iter(answers))]
        answers[request_id] = [lease_id for h in handed if (lease_id := lease_of(h.token)) is not None]

    def again(
        self, instance: str, request_id: str, lease_us: int, now_us: int, may: Callable[[str], bool] | None = None
    ) -> list[Handed] | None:
        """The messages that the instance was handed for this request, with leases that begin now; None: the request is
        to be answered like another one, because no answer of it is known.

        Empty if the answer has reached its consumer, or the leases are over. `may`: whether the consumer may consume a
        topic now.
        """
        known = self._instances.get(instance)
        if known is None or request_id not in known.answers:
            return None
        leases = [lease for i in known.answers[request_id] if (lease := self._held.by_id.get(i)) is not None]
        if any(len(lease.open) < len(lease.offsets) for lease in leases):
            return []  # the consumer has settled some of it: this is a copy of the request that comes late
        known.asked_us = known.seen_us = now_us
        handed: list[Handed] = []
        for lease in leases:
            if may is not None and not may(lease.cursor.serves):
                continue
            messages = self._messages(lease)
            if messages is None:
                self._settling.give_back(lease, now_us)
                continue
            lease.extended.update(dict.fromkeys(range(len(lease.offsets)), now_us + lease_us))
            self._owners.prolong(lease.cursor.topic, instance, now_us + lease_us)
            attempts = [lease.cursor.attempts(offset) + 1 for offset in lease.offsets]
            handed.append(Handed(f"{lease.id:x}.", messages, attempts, lease.cursor.subscription.replay))
        return handed

    def forget(self, lease: Lease) -> None:
        """An answer was not sent: its request is answered like another one if it comes again."""
        answers = lease.instance.answers
        for request_id in [request_id for request_id, leases in answers.items() if lease.id in leases]:
            del answers[request_id]

    def _messages(self, lease: Lease) -> list[StoredMessage] | None:
        """The messages of a lease; None if one is gone."""
        messages: list[StoredMessage] = []
        topic, queue, offsets = lease.cursor.topic, lease.cursor.queue, lease.offsets
        while len(messages) < len(offsets):
            place = len(messages)
            count = 1
            while place + count < len(offsets) and offsets[place + count] == offsets[place] + count:
                count += 1
            read = self._store.read(topic, queue, offsets[place], count, READ_BYTES)
            if not read or [m.offset for m in read] != list(offsets[place : place + len(read)]):
                return None
            messages += read
        return messages
