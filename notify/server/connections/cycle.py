"""One request to a data route on its connection: its body, its turn, and the task that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable
from typing import Any, Protocol

from notify.errors import InvalidRequest, NotifyError, TooLarge, Unavailable
from notify.protocol.limits import LIMITS
from notify.server.access.principal import NOBODY
from notify.server.connections.application import Application
from notify.server.connections.held import SMALL_BODY_BYTES
from notify.server.data.permission import check_large
from notify.server.data.request import Request

UNVERIFIED_BYTES = 64 << 10
"""How much of a body the server reads before it has verified the sender. It also holds the rest of the last read
(uvloop reads up to 256 kB at once)."""
ROOM_SECONDS = 10.0
"""How long a large body waits for room; then its request is refused for now."""
TOO_MUCH = "the server holds as much for its connections as it may; try again"

ANSWERED = Request("GET", "/", b"", [])
"""Replaces a request that was answered, so that its body is freed."""


class Flow(Protocol):
    """The part of a connection's flow control that its requests use."""

    waits_for_room: bool

    def pause_reading(self) -> None:
        """Read nothing more for now."""


class Connection(Protocol):
    """The part of a connection that its requests use."""

    app: Application
    loop: asyncio.AbstractEventLoop

    @property
    def flow(self) -> Flow:
        """The connection's flow control."""

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that the server waits for when it stops."""

    async def verify(self, request: Request) -> NotifyError | None:
        """Note the sender of a request; returns the error if it is refused."""

    def read_on(self, cycle: DataCycle) -> None:
        """Resume reading, which this request had put off."""

    async def answer(self, cycle: DataCycle) -> None:
        """Answer a request whose body is complete and whose turn it is."""

    def answer_in_turn(self, cycle: DataCycle) -> None:
        """As `answer`, when strangers have their turn."""


class DataCycle:
    """One request to a data route and its answer; takes the place of uvicorn's cycle.

    Its work begins when its body is complete, its sender is verified, and the answers of earlier requests are written.
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_has_asked",
        "_has_begun",
        "_size",
        "_task",
        "_timer",
        "_turn",
        "_verification",
        "disconnected",
        "keep_alive",
        "refusal",
        "request",
        "response_complete",
        "waits_for_body",
    )

    def __init__(self, connection: Connection, request: Request, keep_alive: bool) -> None:
        self._connection = connection
        self.request = request
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self.waits_for_body = True
        self.refusal: NotifyError | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._has_asked = False
        """It has asked for room for its body: it waits for it, or has it."""
        self._has_begun = False
        """Its answer has begun, and there is no second one."""
        self._turn = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._verification: asyncio.Task[None] | None = None

    @classmethod
    def refused(cls, connection: Connection, error: NotifyError) -> DataCycle:
        """The cycle for a request whose head is refused: its body is not awaited, and its connection ends."""
        cycle = cls(connection, Request("GET", "/", b"", []), keep_alive=False)
        cycle.waits_for_body = False
        cycle.refusal = error
        return cycle

    @property
    def message_event(self) -> DataCycle:
        """Takes the place of the event that uvicorn sets when the connection is lost."""
        return self

    def set(self) -> None:
        """End the work of this request, if it is a poll, because the connection is lost."""
        self._stop_timer()
        if self.waits_for_body:
            self.leave_room()
            self._chunks.clear()
        if self._verification is not None:
            self._verification.cancel()
        if self._task is not None and self.request.polls:
            self._task.cancel()

    def add(self, body: bytes) -> None:
        """Add a part of the body."""
        if self.waits_for_body:
            self._size += len(body)
            if self._size > LIMITS.request_bytes:
                detail = f"the request has more than {LIMITS.request_bytes} bytes; send fewer items at once"
                self.refuse(TooLarge(detail, "request_too_large"))
            else:
                if self._verification is not None and self._size > UNVERIFIED_BYTES:
                    self._connection.flow.pause_reading()
                self._chunks.append(body)

    @property
    def has_room(self) -> bool:
        """Whether its body is counted as a whole."""
        return self._has_asked and not self._connection.flow.waits_for_room

    def ask_for_room(self, owner: Hashable) -> bool:
        """Whether the rest of its body may be read now; if not, the connection reads on when there is room."""
        if not self._has_asked:
            size = self._declared_bytes()
            if size > SMALL_BODY_BYTES:
                try:
                    check_large(self.request, size)
                except NotifyError as error:
                    self.refuse(error)
                    return False
                self._has_asked = True
                self.request.dropped = self.leave_room
                self._connection.flow.waits_for_room = True
                self._connection.flow.pause_reading()
                self._stop_timer()
                self._connection.app.budget.room.ask(self, owner, size)
                if self._connection.flow.waits_for_room:
                    self._timer = self._connection.loop.call_later(ROOM_SECONDS, self.give_way)
        return not self._connection.flow.waits_for_room

    def _declared_bytes(self) -> int:
        """The size of its body; of one in chunks what it may become, once there is much of it."""
        for name, value in self.request.headers:
            if name == b"content-length":
                return min(int(value), LIMITS.request_bytes)
        return LIMITS.request_bytes if self._size > SMALL_BODY_BYTES else self._size

    def enter(self) -> None:
        """Read on: there is room for the whole body."""
        self._connection.flow.waits_for_room = False
        self._stop_timer()
        self._connection.read_on(self)

    def give_way(self) -> bool:
        """Refuse the request, to leave its room to others, unless its body is complete."""
        if not self.waits_for_body:
            return False
        self.refuse(Unavailable(TOO_MUCH))
        return True

    def leave_room(self) -> None:
        """Give back the room for its body."""
        if self._has_asked:
            self._has_asked = self._connection.flow.waits_for_room = False
            self.request.dropped = None  # it refers to this object, which refers to the request
            budget = self._connection.app.budget
            budget.room.leave(self)
            budget.give_back(self._connection.loop)

    @property
    def is_read(self) -> bool:
        """Whether the rest of its body may be read: it is its turn, and its sender is verified."""
        return self.waits_for_body and self._turn and self._verification is None

    def expire_after(self, seconds: float) -> None:
        """Refuse the request unless its body is complete within this time."""
        if self._timer is None:
            self._timer = self._connection.loop.call_later(seconds, self._expired)

    def _expired(self) -> None:
        self.refuse(InvalidRequest("the body did not arrive in time", "timeout", 408))

    def verify(self) -> None:
        """Verify the sender before any work, and before most of the body is read: it may be anyone."""
        self._verification = self._connection.run(self._verify())

    async def _verify(self) -> None:
        refused = await self._connection.verify(self.request)
        self._verification = None
        if refused is not None:
            self.refuse(refused)
        elif not self.waits_for_body:
            self._begin()
        if self._turn:
            self._connection.read_on(self)

    def refuse(self, error: NotifyError) -> None:
        """Answer with an error, unless an answer has begun. If the body is not complete, the connection then ends."""
        if self._has_begun:
            self.keep_alive = False
            return
        self.refusal = error
        if self._verification is not None:
            self._verification.cancel()
            self._verification = None
        self.leave_room()
        self._chunks.clear()
        self.request.body = b""
        if self.waits_for_body:
            self.keep_alive = False
            self.complete()
        else:
            self._begin()

    def complete(self) -> None:
        """Take the body as complete."""
        if self.waits_for_body:
            self.waits_for_body = False
            if self._timer is not None:
                self._stop_timer()
            if self._connection.flow.waits_for_room:
                self.leave_room()  # it came with what was read before
            chunks, self._chunks = self._chunks, []
            self.request.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._begin()

    def start(self) -> None:
        """Note that it is this request's turn, and begin if the body is complete."""
        self._turn = True
        if not self.waits_for_body:
            self._begin()

    def _begin(self) -> None:
        """Begin the work, if it is this request's turn and the sender is verified."""
        if self._turn and self._verification is None and not self._has_begun:
            self._has_begun = True
            if self.refusal is None and self.request.principal is not NOBODY:
                self._task = self._connection.run(self._connection.answer(self))
            else:
                self._connection.answer_in_turn(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
