"""One budget of bytes for all that the server holds for its connections, and who gives way when it is used up.

Half heads, parts of bodies, requests that wait for their turn, and unread answers are counted when a connection has
some; most requests arrive in one read and are never counted. Beyond the budget those give way who hold most: first the
sender (all its connections together), then of its connections one of the largest, so that a connection's share shrinks
with their number. Large bodies of known senders do not give way: each waits for room for all of it (`Room`).
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

HELD_BYTES = 48 << 20
"""The budget of a server. Workers divide it among them."""
LEAST_BYTES = 28 << 20
"""The least budget of a worker: it has room for one of the largest bodies and some smaller ones."""
STRANGERS_SHARE = 8
"""Unknown senders together have this fraction of the budget: one part in this many."""
ANSWERS_SHARE = 0.375
"""The part of the budget for unread answers, and small parts of requests, of known senders."""
SMALL_BODY_BYTES = 64 << 10
"""A body up to this size does not wait for room."""
MIDDLE_BODY_BYTES = 1 << 20
"""Larger bodies leave KEPT_BYTES of the room to those that are not larger."""
KEPT_BYTES = 4 << 20
LEAST_REPLY_BYTES = 64 << 10
"""The least bound on a reply, however much is unread: connections buffer as much without being counted."""
GIVEN_BACK_BYTES = 4 << 20
"""After this much was held at the same time, freed memory is given back to the system."""
GIVEN_BACK_SECONDS = 1.0
"""How soon: later requests may need it again. It takes some ten milliseconds in a thread."""


class Connection(Protocol):
    """The part of a connection that `Held` uses."""

    def give_way(self) -> None:
        """Free what is held for the connection: refuse its request, or end it."""


class _Owner:
    """The bytes that all connections of one sender hold."""

    __slots__ = ("classes", "total")

    def __init__(self) -> None:
        self.total = 0
        self.classes: dict[int, dict[Connection, None]] = {}
        """Connections by the number of binary digits of their size; within a class the oldest first."""

    def largest(self) -> Connection:
        """The oldest of the connections that hold most, to a factor of two."""
        return next(iter(self.classes[max(self.classes)]))


class Held:
    """Counts the bytes that senders' connections hold, and has the largest give way beyond `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self.peak = 0
        """The largest total since this was last set to 0."""
        self._accounts: dict[Connection, tuple[Hashable, int]] = {}
        self._owners: dict[Hashable, _Owner] = {}

    def count(self, connection: Connection, owner: Hashable, size: int) -> None:
        """Count `size` bytes of a connection, instead of what was counted. Any connection may have to give way."""
        before = self._accounts.get(connection)
        if before is not None:
            if before[0] == owner and before[1].bit_length() == size.bit_length():
                self._accounts[connection] = (owner, size)
                self._owners[owner].total += size - before[1]
                self.total += size - before[1]
            else:
                self.discard(connection)
                before = None
        if before is None:
            self._accounts[connection] = (owner, size)
            account = self._owners.setdefault(owner, _Owner())
            account.total += size
            account.classes.setdefault(size.bit_length(), {})[connection] = None
            self.total += size
        self.peak = max(self.peak, self.total)
        while self.total > self.most:
            largest = max(self._owners.values(), key=lambda account: account.total).largest()
            self.discard(largest)
            largest.give_way()

    def discard(self, connection: Connection) -> None:
        """Stop counting a connection."""
        counted = self._accounts.pop(connection, None)
        if counted is None:
            return
        owner, size = counted
        account = self._owners[owner]
        same = account.classes[size.bit_length()]
        del same[connection]
        if not same:
            del account.classes[size.bit_length()]
        if not account.classes:
            del self._owners[owner]
        account.total -= size
        self.total -= size


class Body(Protocol):
    """The part of a request that `Room` uses."""

    def enter(self) -> None:
        """Read on: there is room for the whole body."""

    def give_way(self) -> bool:
        """Refuse the request if its body is not complete yet; whether it was."""


class Room:
    """Room for large bodies. Each gets room for all of it, or waits; senders that have least get it first.

    A body that got a part of its room could wait for ever for the rest, as others do.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self.peak = 0
        self._in: dict[Body, tuple[Hashable, int]] = {}
        self._waiting: dict[Hashable, deque[tuple[Body, int]]] = {}
        self._taken_by: dict[Hashable, int] = {}
        self._is_letting_in = False

    def ask(self, body: Body, owner: Hashable, size: int) -> None:
        """Call `body.enter` when there is room for its `size` bytes, maybe now."""
        if body not in self._in:
            self._waiting.setdefault(owner, deque()).append((body, size))
            self._let_in()

    def leave(self, body: Body) -> None:
        """Give back a body's room, or its place among those that wait."""
        taken = self._in.pop(body, None)
        if taken is None:
            self._forget(body)
            return
        owner, size = taken
        self.taken -= size
        self._taken_by[owner] -= size
        if not self._taken_by[owner]:
            del self._taken_by[owner]
        if self._waiting:
            self._let_in()

    def _forget(self, waiting: Body) -> None:
        for owner, bodies in self._waiting.items():
            for place in bodies:
                if place[0] is waiting:
                    bodies.remove(place)
                    if not bodies:
                        del self._waiting[owner]
                    return

    def _let_in(self) -> None:
        if self._is_letting_in:
            return  # a body that gives way to others leaves its room
        self._is_letting_in = True
        try:
            while self._waiting and self._let_one_in():
                pass
        finally:
            self._is_letting_in = False

    def _let_one_in(self) -> bool:
        """Whether there was room for one of those that wait."""
        for owner in sorted(self._waiting, key=lambda owner: self._taken_by.get(owner, 0)):
            bodies = self._waiting.get(owner)
            if bodies is None:
                continue
            first = body, size = bodies[0]
            has_room = self.taken + size <= self._bound(size) or self._displace(owner, size)
            if not bodies or bodies[0] is not first:
                return True  # its request was refused while another one gave way: look again at those that wait
            if has_room:
                break
        else:
            return False
        bodies.popleft()
        if not self._waiting[owner]:
            del self._waiting[owner]
        self._in[body] = (owner, size)
        self.taken += size
        self._taken_by[owner] = self._taken_by.get(owner, 0) + size
        self.peak = max(self.peak, self.taken)
        body.enter()
        return True

    def _bound(self, size: int) -> int:
        return self.most if size <= MIDDLE_BODY_BYTES else self.most - KEPT_BYTES

    def _displace(self, owner: Hashable, size: int) -> bool:
        """Have bodies of the sender that has most give way, if it has more than `owner` will; whether there is room."""
        while self.taken + size > self._bound(size) and self._taken_by:
            most = max(self._taken_by, key=lambda each: self._taken_by[each])
            if most == owner or self._taken_by[most] <= self._taken_by.get(owner, 0) + size:
                return False
            for body, (holder, _) in self._in.items():
                if holder == most and body.give_way():
                    break
            else:
                return False
        return self.taken + size <= self._bound(size)


class Budget:
    """The budget of one server: what strangers hold, what known senders hold, and room for large bodies."""

    def __init__(self, most: int = HELD_BYTES) -> None:
        """`most`: bytes."""
        self.strangers = Held(most // STRANGERS_SHARE)
        self.known = Held(int(most * ANSWERS_SHARE))
        self.room = Room(most - self.strangers.most - self.known.most)

    def reply_bytes(self, most: int) -> int:
        """How large a reply may be now, at most `most`: half of what is left for all unread answers."""
        return min(most, max(LEAST_REPLY_BYTES, (self.known.most - self.known.total) // 2))

    def give_back(self, loop: asyncio.AbstractEventLoop) -> None:
        """Soon give free memory back to the system, if much was held and little is now."""
        if self._use_returns():
            loop.call_later(GIVEN_BACK_SECONDS, loop.run_in_executor, None, _give_back)

    def _use_returns(self) -> bool:
        parts = (self.strangers, self.known, self.room)
        held = self.strangers.total + self.known.total + self.room.taken
        if sum(part.peak for part in parts) < GIVEN_BACK_BYTES or held > GIVEN_BACK_BYTES // 2:
            return False
        for part in parts:
            part.peak = 0
        return True


def _give_back() -> None:
    """Give free memory back to the system (glibc keeps what lies below memory in use)."""
    if _trim is not None:
        _trim(0)


def _found_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library, which has no such function
        return None


_trim = _found_trim()


def budget_of(workers: int) -> Budget:
    """The budget of one of several workers (0 or 1: of a server without workers)."""
    return Budget(HELD_BYTES if workers < 2 else max(LEAST_BYTES, HELD_BYTES // workers))
