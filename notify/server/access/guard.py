"""Before a request reaches FastAPI: whether a foreign page sent it, who asks, and how much it may carry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from fastapi import HTTPException, Request

from notify.errors import Unauthorized, Unavailable
from notify.server.access.browsers import refuse_foreign_pages
from notify.server.access.gate import Access
from notify.server.access.principal import EVERYONE, NOBODY, Principal
from notify.settings import Settings

COOKIE = "notify_token"
"""Where a browser keeps its token: the console's, out of reach of scripts, and not sent by other sites' pages."""

ADMIN_BYTES = 1 << 20
OPEN = ("/livez", "/readyz", "/login", "/static/")
"""Paths that are served to anyone: health, and the page to log in."""

NOT_RUNNING = "the server is starting or stopping; try again"

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Door(Protocol):
    """Where a server says who may come in."""

    @property
    def settings(self) -> Settings:
        """Those that hold now."""

    @property
    def access(self) -> Access | None:
        """None while the server is starting or stopping."""


async def admit(scope: dict[str, Any], door: Door) -> None:
    """Note who asks in the scope's state. Raises Unauthorized, Forbidden, Backpressure or Unavailable."""
    state = scope.setdefault("state", {})
    state["principal"] = EVERYONE if not door.settings.access else NOBODY
    state["shown"] = b""
    refuse_foreign_pages(scope["method"], scope["headers"], door.settings)
    access = door.access
    if access is None:
        # Started or stopped: what is not open is not answered.
        if door.settings.access and not scope["path"].startswith(OPEN):
            raise Unavailable(NOT_RUNNING)
        return
    if not access.on:
        return
    headers = dict(scope["headers"])
    shown = headers.get(b"authorization", b"") or token_of_cookie(headers.get(b"cookie", b""))
    state["shown"] = shown
    certificate = scope.get("notify.certificate")
    if scope["path"].startswith(OPEN):
        # Whoever asks for these is served: nobody is looked up for it, so that health waits for no database.
        with contextlib.suppress(Unauthorized):
            state["principal"] = access.admit(shown, certificate) or NOBODY
        return
    principal = await access.principal(shown, certificate)
    principal.take_request(access.clock())
    state["principal"] = principal


def token_of_cookie(header: bytes) -> bytes:
    """The authorization that the console's cookie stands for; empty where there is none.

    A token needs no quotes, so that nothing is unquoted: Python's SimpleCookie took minutes for some headers.
    """
    for pair in header.split(b";"):
        name, _, value = pair.partition(b"=")
        if name.strip() == COOKIE.encode():
            return b"Bearer " + value.strip()
    return b""


def bounded(receive: Receive, seconds: float, limit: int = ADMIN_BYTES) -> Receive:
    """The same body, cut off where it is larger, or not complete in time: FastAPI answers its HTTPException."""
    deadline = asyncio.get_running_loop().time() + seconds
    taken = 0
    complete = False

    async def next_part() -> dict[str, Any]:
        nonlocal taken, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                part = await receive()
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time") from None
        if part["type"] == "http.request":
            taken += len(part.get("body", b""))
            complete = not part.get("more_body", False)
            if taken > limit:
                raise HTTPException(413, f"the request has more than {limit} bytes")
        return part

    return next_part


def check_admin(request: Request) -> None:
    """Reading takes `view`, a write `admin` of what it names. Raises Forbidden."""
    principal: Principal = request.state.principal
    path = request.scope["path"]
    if request.method in ("GET", "HEAD"):
        principal.check("view")
    elif path.startswith(("/v1/admin/topics/", "/v1/admin/groups/")):
        _check_admin_of_named(principal, request.path_params)
    elif path.startswith(("/v1/admin/transactions/", "/v1/admin/jobs/")):
        principal.check_some("admin")  # the route knows the producer group once it has the transaction, or the job
    else:
        principal.check("admin")


def check_subscriber(request: Request) -> None:
    """A consumer says itself how it wants its topics; others need `admin` of both. Raises Forbidden."""
    principal: Principal = request.state.principal
    named = request.path_params
    if not principal.may("consume", named["name"], named["topic"]):
        _check_admin_of_named(principal, named)


def check_topic_reader(request: Request) -> None:
    """Whoever may pull from a topic may know its queues; others need `view`. Raises Forbidden."""
    principal: Principal = request.state.principal
    if not principal.may("read", request.path_params["name"]):
        principal.check("view")


def _check_admin_of_named(principal: Principal, named: Mapping[str, str]) -> None:
    """Whoever follows a topic has it kept: that takes a right to both, group and topic. Raises Forbidden."""
    for name in {named["name"], named.get("topic", named["name"])}:
        principal.check("admin", name)
