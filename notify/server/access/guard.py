"""Checks a request before FastAPI gets it: whether a foreign page sent it, who sent it, and the size of its body."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from starlette.exceptions import HTTPException

from notify.errors import TooLarge, Unauthorized, Unavailable
from notify.server.access.browsers import refuse_foreign_pages
from notify.server.access.gate import SHOWN_BYTES, Access
from notify.server.access.principal import EVERYONE, NOBODY
from notify.server.settings import Settings

COOKIE = "notify_token"
"""The console's cookie with the token; scripts cannot read it, and pages of other sites do not send it."""
_IN_COOKIE = re.compile(COOKIE.encode() + rb"[ \t]*=([^;]*)")

ADMIN_BYTES = 1 << 20
LOGIN_BYTES = SHOWN_BYTES + (8 << 10)
"""The largest form to sign in: a token and a path."""
OPEN = ("/livez", "/readyz", "/login", "/static/")
"""Paths that are served to anyone: health, and the page to log in."""

NOT_RUNNING = "the server is starting or stopping; try again"

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Door(Protocol):
    """The part of a server that says who may send requests."""

    @property
    def settings(self) -> Settings:
        """The current settings."""

    @property
    def access(self) -> Access | None:
        """None while the server is starting or stopping."""


async def admit(scope: dict[str, Any], door: Door) -> None:
    """Store the request's principal in the scope's state. Raises Unauthorized, Forbidden, Backpressure, Unavailable."""
    state = scope.setdefault("state", {})
    state["principal"] = EVERYONE if not door.settings.access else NOBODY
    state["shown"] = b""
    refuse_foreign_pages(scope["method"], scope["headers"], door.settings)
    access = door.access
    if access is None:
        # The server is starting or stopping: only open paths are answered.
        if door.settings.access and not scope["path"].startswith(OPEN):
            raise Unavailable(NOT_RUNNING)
        return
    if not access.on:
        return
    authorization = shown_by(scope["headers"])
    state["shown"] = authorization
    certificate = scope.get("notify.certificate")
    if scope["path"].startswith(OPEN):
        # These are served to everyone, without a lookup, so that health checks do not wait for a database.
        with contextlib.suppress(Unauthorized):
            state["principal"] = access.admit(authorization, certificate) or NOBODY
        return
    principal = await access.principal(authorization, certificate)
    principal.take_request(access.clock())
    state["principal"] = principal


def shown_by(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The authorization header, or what the console's cookie stands for; empty if there is neither."""
    fields = dict(headers)
    return fields.get(b"authorization", b"") or token_of_cookie(fields.get(b"cookie", b""))


def token_of_cookie(header: bytes) -> bytes:
    """The authorization header that the console's cookie stands for; empty if there is no such cookie.

    Tokens have no quotes, so that nothing is unquoted here: Python's SimpleCookie took minutes for some headers.
    """
    for match in _IN_COOKIE.finditer(header):
        if header[match.start() - 1 : match.start()] in (b"", b" ", b"\t", b";"):
            return b"Bearer " + match[1].strip()
    return b""


def most_bytes(path: str) -> int:
    """The largest body of a request for another route than a data route."""
    return LOGIN_BYTES if path == "/login" else ADMIN_BYTES


def check_declared(path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises TooLarge for a request that declares a larger body, before any of it is read or held."""
    for name, value in headers:
        if name == b"content-length" and int(value) > (most := most_bytes(path)):
            raise TooLarge(_too_large(most), "request_too_large")


def _too_large(most: int) -> str:
    return f"the request has more than {most} bytes"


def bounded(receive: Receive, seconds: float, limit: int = ADMIN_BYTES) -> Receive:
    """`receive` with bounds: it raises HTTPException for a body that is too large, or not complete in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    size = 0
    complete = False

    async def next_part() -> dict[str, Any]:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                part = await receive()
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time") from None
        if part["type"] == "http.request":
            size += len(part.get("body", b""))
            complete = not part.get("more_body", False)
            if size > limit:
                raise HTTPException(413, _too_large(limit))
        return part

    return next_part
