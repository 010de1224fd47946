"""A connection to a server in memory, driven byte by byte; a test sees what it reads, holds and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from notify.errors import NotifyError
from notify.server.access.principal import Principal
from notify.server.connections.held import Budget
from notify.server.connections.protocol import Protocol
from notify.server.connections.quota import Connections
from notify.server.connections.turns import Turns
from notify.server.data.answer import Answer
from notify.server.data.request import Request
from notify.server.settings import Settings

READ_BYTES = 16 << 10
"""The most bytes of one read of the socket."""
SERVICE = Principal("service", None)


class Transport(asyncio.Transport):
    """One end of a socket, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = self.is_closed = self.is_aborted = self.wrote_eof = False
        self.written = b""
        self.unread_bytes = 0
        """How many written bytes wait for the client, as the test sets it."""

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def write(self, data: Any) -> None:
        assert not self.wrote_eof, "a write behind the end, which a socket refuses"
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.wrote_eof = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes


class SlowAccess:
    """An access check that knows no caller at first, and each header (`Bearer NAME`) once a test says who it is."""

    on = True
    clock = staticmethod(int)

    def __init__(self) -> None:
        self.asked: dict[bytes, asyncio.Future[Principal]] = {}
        self.principals = {b"Bearer known": SERVICE}
        """Senders that it knows at once, by header."""

    def admit(self, authorization: bytes, certificate: str | None) -> Principal | None:
        return self.principals.get(authorization)

    recognised = admit

    async def verify(self, authorization: bytes, certificate: str | None) -> Principal:
        self.asked[authorization] = asyncio.get_running_loop().create_future()
        return await self.asked[authorization]

    async def principal(self, authorization: bytes, certificate: str | None) -> Principal:
        return self.admit(authorization, certificate) or await self.verify(authorization, certificate)

    def let_in(self, name: str) -> None:
        self.asked[f"Bearer {name}".encode()].set_result(SERVICE)

    def refuse(self, name: str, error: NotifyError) -> None:
        self.asked[f"Bearer {name}".encode()].set_exception(error)


def of_uvicorn(app: Any) -> dict[str, Any]:
    """The arguments that uvicorn gives to each connection."""
    config = uvicorn.Config(app, loop="none", http=Protocol, ws="none", lifespan="off", log_config=None,
                            timeout_keep_alive=75, proxy_headers=False)  # fmt: skip
    config.load()
    return {"config": config, "server_state": ServerState(), "app_state": {}, "_loop": asyncio.get_running_loop()}


class Served:
    """One connection to an application that echoes requests, and the driver of its loop."""

    def __init__(
        self,
        settings: Settings | None = None,
        budget: Budget | None = None,
        connections: Connections | None = None,
        strangers: Turns | None = None,
        access: SlowAccess | None = None,
    ) -> None:
        self.access = access or SlowAccess()
        self.answered: list[Request] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asgi_bodies: list[int] = []
        self.settings = settings or Settings()
        self.protocol = Protocol(**of_uvicorn(self._app()))
        self.protocol.app = SimpleNamespace(access=self.access, settings=self.settings, budget=budget or Budget(),
            data=SimpleNamespace(answer=self._answer), open_answer=self._open_answer,
            strangers=strangers or Turns(1.0), operators=Turns(1.0),
            connections=connections or Connections(1000))  # type: ignore[assignment]  # fmt: skip
        self.transport = Transport()
        self.protocol.connection_made(self.transport)

    def _app(self) -> Callable[..., Coroutine[Any, Any, None]]:
        async def never(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("a data route does not pass ASGI")

        return never

    def use_asgi(self, app: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Set the application that answers routes other than data routes."""
        for name in ("access", "settings", "data", "open_answer", "budget", "strangers", "operators", "connections"):
            setattr(app, name, getattr(self.protocol.app, name))
        self.protocol.app = app  # type: ignore[assignment]

    async def _answer(self, request: Request) -> Answer:
        await self.may_answer.wait()
        self.answered.append(request)
        return Answer(200, "text/plain", b"answered")

    async def _open_answer(self, request: Request) -> Answer:
        return Answer(200, "text/plain", b"live")

    def send(self, data: bytes) -> int:
        """Send as the network does, read by read while the server reads. Returns the bytes that it took."""
        taken = 0
        while taken < len(data) and not self.transport.is_paused:
            self.protocol.data_received(data[taken : taken + READ_BYTES])
            taken += READ_BYTES
        return min(taken, len(data))

    def statuses(self) -> list[int]:
        """The statuses of the answers so far."""
        lines = self.transport.written.split(b"HTTP/1.1 ")[1:]
        return [int(line[:3]) for line in lines]


def head(token: str, size: int = 0, *lines: str) -> bytes:
    shown = (f"authorization: Bearer {token}", f"content-length: {size}", *lines)
    return "\r\n".join(("POST /v1/messages HTTP/1.1", "host: x", *shown, "", "")).encode()


async def settled() -> None:
    """Run the loop until nothing can continue without new input."""
    for _ in range(20):
        await asyncio.sleep(0)  # a turn of the loop
