"""The management application, served by FastAPI: admin routes, the console, /metrics, and the OpenAPI document.

It is most of what a server imports, and producers and consumers need none of it. So `notify serve` is ready without it,
and loads it then (`App.management`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope, Send

from notify import __version__
from notify.errors import NotifyError, StorageFailed, Unavailable
from notify.server import admin, exposition, health, problems
from notify.server.access import guard
from notify.server.connections.quota import Connections
from notify.server.console.router import router as console_router
from notify.server.data.answer import Answer, fault_of
from notify.server.data.openapi import describe_data_routes
from notify.server.running import Running
from notify.server.spread.spread import Spread

STOPPED = "the server stopped during this request, which may have been carried out: check, and try again"


class Server(guard.Door, Protocol):
    """The server that is managed."""

    connections: Connections

    def running(self) -> Running:
        """The parts that run. Raises Unavailable while the server is starting or stopping."""

    def running_or_none(self) -> Running | None:
        """The parts that run; None while the server is starting or stopping."""


class Management:
    """Answers, as an ASGI application, all requests but those to data routes and probes."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.fastapi = FastAPI(title="Notify", version=__version__, docs_url=None, redoc_url=None)
        self.spread = Spread(self.fastapi, server.running_or_none)
        self.fastapi.router.routes += _routes()
        problems.answer_errors(self.fastapi)
        describe_data_routes(self.fastapi)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        _asked.set(self)  # uvicorn calls this in a task of each request
        send = _not_cached(send)
        try:
            await guard.admit(scope, self.server)
        except NotifyError as error:
            await problems.refused(scope, error)(scope, receive, send)
            return
        except Exception:
            fault = fault_of("admission_failed", scope["method"], scope["path"])
            await problems.refused(scope, fault)(scope, receive, send)
            return
        # FastAPI parses the cookies of every request, and took minutes for some (CVE-2024-7592). The guard has read
        # the only cookie that matters.
        scope["headers"] = [field for field in scope["headers"] if field[0] != b"cookie"]
        most_bytes = guard.most_bytes(scope["path"])
        await self._answer(scope, guard.bounded(receive, self.server.settings.body_timeout_seconds, most_bytes), send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            with contextlib.suppress(Exception):  # Starlette raises it again after `problems` has answered
                await self.spread(scope, receive, sending)
        except asyncio.CancelledError:  # by uvicorn, some seconds after this server was told to stop
            if has_begun:
                raise
            await problems.refused(scope, Unavailable(STOPPED))(scope, receive, send)
            return
        if not has_begun:  # otherwise uvicorn would answer, in words that no client takes for this server's
            fault = StorageFailed("the server failed on this request; its log says why")
            await problems.refused(scope, fault)(scope, receive, send)


def _not_cached(send: Send) -> Send:
    """`send` for answers that no cache of a proxy keeps, unless they say otherwise."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"]
            if all(name != b"cache-control" for name, _ in headers):
                message["headers"] = [*headers, (b"cache-control", b"no-store")]
        await send(message)

    return sending


_asked: ContextVar[Management] = ContextVar("asked")
"""The application that answers the request of this task."""


def _server() -> Server:
    return _asked.get().server


async def _call(scope: Scope, receive: Receive, send: Send) -> None:
    """Call an admin route for a page of the console."""
    await _asked.get().spread(scope, receive, send)


@functools.cache
def _routes() -> Sequence[BaseRoute]:
    """The routes of all servers in this process: to make them, and what FastAPI adds at the first request, takes 0.5 s
    of CPU. Each server in memory of a suite paid it again, and each forked one."""
    routes = APIRouter()
    routes.include_router(_health())
    routes.include_router(admin.router(lambda: _server().running()), prefix="/v1/admin")
    routes.include_router(console_router(_call, _server))
    return routes.routes


def _health() -> APIRouter:
    """The metrics, and the probes for the OpenAPI document: connections answer probes without this application."""
    routes = APIRouter()

    @routes.get("/livez")
    async def livez() -> Response:
        """Answer 200 while the core's timer task makes progress, else 503."""
        return _response(health.answer(_server().running_or_none(), "/livez"))

    @routes.get("/readyz")
    async def readyz() -> Response:
        """Answer 200 once the storage is recovered and while it takes writes."""
        return _response(health.answer(_server().running_or_none(), "/readyz"))

    @routes.get("/metrics")
    async def metrics(request: Request) -> PlainTextResponse:
        request.state.principal.check("view")
        server = _server()
        running = server.running_or_none()
        if running is None:
            return PlainTextResponse("", 503)
        kind = exposition.kind_for(request.headers.get("accept", ""))
        return PlainTextResponse(await exposition.text_of(running, server.connections, kind), media_type=kind)

    return routes


def _response(answered: Answer) -> Response:
    headers = {"retry-after": str(answered.retry_after)} if answered.retry_after else {}
    return Response(answered.body, answered.status, headers, answered.kind)
