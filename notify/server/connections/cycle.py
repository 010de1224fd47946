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
"""The server holds so much of a body while it verifies who sends it, and then reads no further. It holds all that the
last read brought (uvloop reads up to 256 kB at once)."""

ANSWERED = Request("GET", "/", b"", [])
"""In place of a request that is answered."""


class Connection(Protocol):
    """A connection as its requests need it."""

    app: Application
    flow: FlowControl
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that the server waits for when it stops."""

    async def verify(self, request: Request) -> NotifyError | None:
        """Note who asks. Why they may not, if so."""

    def read_on(self, cycle: DataCycle) -> None:
        """Read what this request had put off."""

    async def answer(self, cycle: DataCycle) -> None:
        """Answer a request whose body is complete and whose turn it is."""


class DataCycle:
    """One request to a data route and its answer; stands where uvicorn's cycle would.

    Its work begins when its body is complete, it is known who asks, and the answers of the requests before it are
    written.
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
        """Bytes that count among those of strangers."""
        self._turn = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._verification: asyncio.Task[None] | None = None

    @classmethod
    def refused(cls, connection: Connection, error: NotifyError) -> DataCycle:
        """In place of a request whose head is refused: nobody waits for its body, and its connection ends with it."""
        cycle = cls(connection, Request("GET", "/", b"", []), keep_alive=False)
        cycle.waits_for_body = False
        cycle.refusal = error
        return cycle

    @property
    def message_event(self) -> DataCycle:
        """Stands for the event that uvicorn sets when the connection is lost."""
        return self

    def set(self) -> None:
        """The connection is lost: a poll that waits for something to hand out is of no use any more."""
        self._stop_timer()
        if self._verification is not None:
            self._verification.cancel()
            self._give_back()
        if self._task is not None and self.request.polls:
            self._task.cancel()

    def add(self, body: bytes) -> None:
        """A part of the body."""
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
        """Whether the rest of its body may come: it is its turn, and known who sends it."""
        return self.waits_for_body and self._turn and self._verification is None

    def expire_after(self, seconds: float) -> None:
        """The body must be complete within this time."""
        if self._timer is None:
            self._timer = self._connection.loop.call_later(seconds, self._expired)

    def _expired(self) -> None:
        self.refuse(InvalidRequest("the body did not arrive in time", "timeout", 408))

    def verify(self) -> None:
        """Find out who asks before anything is done, and before most of the body is taken: it may be anyone."""
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
        """Answer without the rest of the body; where there is such a rest, the connection ends with the answer."""
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
        """Its bytes belong to a verified sender now, or are dropped."""
        self._connection.app.unverified.give_back(self._held)
        self._held = 0

    def complete(self) -> None:
        """The body is complete, or not waited for."""
        if self.waits_for_body:
            self.waits_for_body = False
            if self._timer is not None:
                self._stop_timer()
            chunks, self._chunks = self._chunks, []
            self.request.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._begin()

    def start(self) -> None:
        """It is this request's turn."""
        self._turn = True
        if not self.waits_for_body:
            self._begin()

    def _begin(self) -> None:
        """Do the work, if nothing has to come before it."""
        if self._turn and self._verification is None:
            self._task = self._connection.run(self._connection.answer(self))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
