"""Messages that are handed out, and how they are settled: leases, owners, and the plan of a request that settles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from notify.server.delivery.cursor import Cursor
from notify.server.delivery.instances import Instance
from notify.storage.records import StoredMessage


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


@dataclass(slots=True)
class Owner:
    """The instance that alone receives a topic, until it has asked for nothing, and settled nothing, for its lease."""

    instance: str
    until_us: int
