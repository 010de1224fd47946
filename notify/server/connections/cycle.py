"""One request to a data route on its connection: its body, its turn, and the task that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl

from notify.errors import InvalidRequest, NotifyError, TooLarge, Unavailable
from notify.limits import LIMITS
from notify.server.connections.application import Application
from notify.server.data.request import Request

UNVERIFIED_BYTES = 64 << 10
"""How much of a body the server reads before it has verified the sender. It also holds the rest of the last read
(uvloop reads up to 256 kB at once)."""

ANSWERED = Request("GET", "/", b"", [])
"""Replaces a request that was answered, so that its body is freed."""


class Connection(Protocol):
    """The part of a connection that its requests use."""

    app: Application
    flow: FlowControl
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that the server waits for when it stops."""

    async def verify(self, request: Request) -> NotifyError | None:
        """Note the sender of a request; returns the error if it is refused."""

    def read_on(self, cycle: DataCycle) -> None:
        """Resume reading, which this request had put off."""

    async def answer(self, cycle: DataCycle) -> None:
        """Answer a request whose body is complete and whose turn it is."""


class DataCycle:
    """One request to a data route and its answer; takes the place of uvicorn's cycle.

    Its work begins when its body is complete, its sender is verified, and the answers of earlier requests are written.
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_held",
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
        self._held = 0
        """Bytes of the body that count as unverified."""
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
        if self._verification is not None:
            self._verification.cancel()
            self._give_back()
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
                if self._verification is not None:
                    if not self._connection.app.unverified.take(len(body)):
                        self._verification.cancel()
                        self._verification = None
                        self.refuse(Unavailable("too many requests wait to be let in; try again"))
                        return
                    self._held += len(body)
                    if self._size > UNVERIFIED_BYTES:
                        self._connection.flow.pause_reading()
                self._chunks.append(body)

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
        self._give_back()
        if refused is not None:
            self.refuse(refused)
        elif not self.waits_for_body:
            self._begin()
        if self._turn:
            self._connection.read_on(self)

    def refuse(self, error: NotifyError) -> None:
        """Answer with an error. If the body is not complete, the connection ends after the answer."""
        self.refusal = error
        self._give_back()
        self._chunks.clear()
        self.request.body = b""
        if self.waits_for_body:
            self.keep_alive = False
            self.complete()
        else:
            self._begin()

    def _give_back(self) -> None:
        """Stop counting the bytes of the body as unverified: the sender is verified, or the bytes are dropped."""
        self._connection.app.unverified.give_back(self._held)
        self._held = 0

    def complete(self) -> None:
        """Take the body as complete."""
        if self.waits_for_body:
            self.waits_for_body = False
            if self._timer is not None:
                self._stop_timer()
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
        if self._turn and self._verification is None:
            self._task = self._connection.run(self._connection.answer(self))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
