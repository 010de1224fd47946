"""Transactions that wait for their outcome, and when each one's check is due."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Sequence
from typing import TypeVar

import msgspec

from notify.storage.checks import Due, new_token
from notify.storage.log.entry import Entry, topic_of
from notify.storage.log.queues import TopicsById
from notify.storage.log.records import Sender

T = TypeVar("T")

LEAST_COMPACTED = 1000
"""With this many ids that came due, or twice as many as were open the last time, a schedule drops the decided ones."""

LONGEST_WAIT_US = 86_400 * 1_000_000
"""The longest time that a half, or a setting, may delay a check."""


class Pending(msgspec.Struct, eq=False, gc=False):
    """One undecided transaction."""

    id: bytes
    producer: Sender
    """Shared by all halves of one record."""
    entries: list[bytes]
    """The index entry of each message of the half."""
    stored_us: int
    next_check_us: int
    attempts: int = 0
    parked: bool = False
    token: int = 0


class Asked(dict[bytes, dict[int, T]]):
    """Requests of messages whose transaction is undecided, by transaction id and message number."""

    def ask(self, transaction_id: bytes, number: int, what: T) -> None:
        """Note the request of a stored message."""
        self.setdefault(transaction_id, {})[number] = what

    def taken(self, half: bytes) -> T | None:
        """Take the request of a message that commits now; None if damage took it."""
        entry = Entry.of(half)
        of_transaction = self.get(entry.transaction_id)
        if of_transaction is None:
            return None
        what = of_transaction.pop(entry.message_no, None)
        if not of_transaction:
            del self[entry.transaction_id]
        return what

    def saved(self) -> list[tuple[bytes, int, T]]:
        """All requests, in the form that `ask` takes."""
        return [(i, number, what) for i, some in self.items() for number, what in some.items()]


class _Schedule:
    """Due times of one producer group.

    Most halves wait the same time, so their due times rise: ids are kept in batches in a deque, one append a request.
    Other ids go into a heap. An id whose due time has changed is skipped when it comes up.
    """

    __slots__ = ("_compact_at", "batches", "heap")

    def __init__(self) -> None:
        self.batches: deque[tuple[int, Sequence[bytes]]] = deque()
        self.heap: list[tuple[int, bytes]] = []
        self._compact_at = LEAST_COMPACTED

    def add(self, due_us: int, ids: Sequence[bytes]) -> None:
        if not self.batches or self.batches[-1][0] <= due_us:
            self.batches.append((due_us, ids))
        else:
            for transaction_id in ids:
                heapq.heappush(self.heap, (due_us, transaction_id))

    def next_us(self) -> int | None:
        if self.batches and (not self.heap or self.batches[0][0] <= self.heap[0][0]):
            return self.batches[0][0]
        return self.heap[0][0] if self.heap else None

    def ripen(self, now_us: int, open_ids: Container[bytes]) -> None:
        """Move due and open ids into the heap, so that decided ids do not stay in memory for long."""
        while self.batches and self.batches[0][0] <= now_us:
            due_us, ids = self.batches.popleft()
            for transaction_id in ids:
                if transaction_id in open_ids:
                    heapq.heappush(self.heap, (due_us, transaction_id))
        if len(self.heap) >= self._compact_at:
            # Otherwise only a poll takes ids out, and this group may have no poller.
            self.heap = [entry for entry in self.heap if entry[1] in open_ids]
            heapq.heapify(self.heap)
            self._compact_at = max(LEAST_COMPACTED, 2 * len(self.heap))

    def pop_due(self, now_us: int) -> tuple[int, bytes] | None:
        """Take one due id."""
        return heapq.heappop(self.heap) if self.heap and self.heap[0][0] <= now_us else None


class PendingTable:
    """All undecided transactions by id, with each producer group's schedule."""

    def __init__(self, topics: TopicsById) -> None:
        self.by_id: dict[bytes, Pending] = {}
        self._topics = topics
        self._schedules: dict[str, _Schedule] = {}

    def schedule(self, group: str, due_us: int, ids: Sequence[bytes]) -> None:
        schedule = self._schedules.get(group)
        if schedule is None:
            schedule = self._schedules[group] = _Schedule()
        schedule.add(due_us, ids)

    def reschedule(self, pending: Pending, due_us: int) -> None:
        pending.next_check_us = due_us
        self.schedule(pending.producer.group, due_us, (pending.id,))

    def bring_forward(self, now_us: int) -> None:
        """Make checks due now that are due later than is possible: a clock was ahead when they were recorded."""
        for pending in self.by_id.values():
            if pending.next_check_us > now_us + LONGEST_WAIT_US:
                self.reschedule(pending, now_us)

    def ripen(self, now_us: int) -> None:
        """Called at each tick of the server, for groups without pollers; a group without open ids is forgotten."""
        for group, schedule in list(self._schedules.items()):
            schedule.ripen(now_us, self.by_id)
            if schedule.next_us() is None:
                del self._schedules[group]

    def next_us(self, group: str) -> int | None:
        """When the group's next check is due, or an earlier time if that one was decided meanwhile."""
        schedule = self._schedules.get(group)
        return None if schedule is None else schedule.next_us()

    def claim(self, group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        schedule = self._schedules.get(group)
        if schedule is None or limit <= 0:
            return []
        schedule.ripen(now_us, self.by_id)
        claimed: list[Pending] = []
        while len(claimed) < limit and (popped := schedule.pop_due(now_us)) is not None:
            due_us, transaction_id = popped
            pending = self.by_id.get(transaction_id)
            if pending is not None and pending.next_check_us == due_us:
                claimed.append(pending)
        due = []
        for pending in claimed:
            pending.token = new_token()
            self.reschedule(pending, now_us + answer_within_us)
            topics = tuple({self._topics[topic_of(entry)].name: None for entry in pending.entries})
            due.append(
                Due(
                    pending.id,
                    pending.token,
                    pending.producer.source,
                    pending.producer.instance,
                    pending.attempts,
                    topics,
                )
            )
        return due
