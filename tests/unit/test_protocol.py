"""While a request's token is verified, the server reads, holds and answers no more than it should."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from notify.errors import Unauthorized, Unavailable
from notify.server.settings import Settings
from tests.support.connection import READ_BYTES, SERVICE, Served, head, settled

BODY = b"x" * (1 << 20)
HELD_BYTES = 64 << 10


async def test_a_body_is_held_only_once_its_token_is_verified() -> None:
    served = Served()
    request = head("new", len(BODY)) + BODY
    taken = served.send(request)
    await settled()
    assert taken <= HELD_BYTES + 2 * READ_BYTES and served.transport.is_paused
    assert served.answered == []
    served.access.let_in("new")
    await settled()
    assert not served.transport.is_paused
    served.send(request[taken:])
    await settled()
    (answered,) = served.answered
    assert answered.body == BODY and answered.principal is SERVICE
    assert served.statuses() == [200] and not served.transport.is_closed


async def test_a_small_request_waits_for_its_verification_too() -> None:
    served = Served()
    served.send(head("new", 2) + b"{}")
    await settled()
    assert served.answered == [] and not served.transport.is_paused
    served.access.let_in("new")
    await settled()
    assert [r.body for r in served.answered] == [b"{}"] and served.statuses() == [200]
    # The refused request is complete: nothing is left to be sent, and the connection is kept.
    served.send(head("other", 2) + b"{}")
    await settled()
    served.access.refuse("other", Unavailable("the database is unreachable"))
    await settled()
    assert served.statuses() == [200, 503] and b"retry-after: 1\r\n" in served.transport.written
    assert not served.transport.is_closed
    served.send(head("known", 2) + b"{}")
    await settled()
    assert served.statuses() == [200, 503, 200]


async def test_who_is_refused_is_told_so_before_the_body_is_there() -> None:
    served = Served()
    request = head("stranger", len(BODY)) + BODY
    taken = served.send(request)
    await settled()
    served.access.refuse("stranger", Unauthorized("this server does not know this token"))
    await settled()
    assert served.statuses() == [401] and b"connection: close" in served.transport.written
    assert served.transport.wrote_eof
    # The server reads and drops the rest of the body, so that the client reads its answer.
    assert served.send(request[taken:]) == len(request) - taken
    assert served.answered == []


async def test_an_error_that_nobody_foresaw_is_answered_as_well() -> None:
    served = Served()
    served.send(head("new", 2) + b"{}")
    await settled()
    served.access.asked[b"Bearer new"].set_exception(RuntimeError("a fault in the server"))
    await settled()
    assert served.statuses() == [500] and served.answered == []


async def test_requests_before_and_behind_one_that_is_verified() -> None:
    """Answers to pipelined requests come in order; no body is read for a request before its turn."""
    served = Served()
    served.may_answer.clear()
    served.send(head("known", 2) + b"{}" + head("new", len(BODY)))
    await settled()
    assert served.transport.is_paused and b"Bearer new" in served.access.asked
    served.access.let_in("new")
    await settled()
    assert served.transport.is_paused  # the first request is not answered yet
    served.may_answer.set()
    await settled()
    assert served.statuses() == [200]
    assert served.send(BODY) == len(BODY)
    await settled()
    assert served.statuses() == [200, 200]
    # The first is answered while the second is verified: still no more than the bound is read.
    served.may_answer.clear()
    served.send(head("known", 2) + b"{}" + head("slow", len(BODY)))
    await settled()
    served.may_answer.set()
    await settled()
    taken = served.send(BODY)
    assert taken <= HELD_BYTES + READ_BYTES and served.transport.is_paused
    served.access.let_in("slow")
    await settled()
    assert served.send(BODY[taken:]) == len(BODY) - taken
    await settled()
    assert served.statuses() == [200] * 4 and [len(r.body) for r in served.answered] == [2, len(BODY)] * 2
    # A request behind one that is being verified waits for its turn.
    served.send(head("later", 2) + b"{}" + head("known", 4) + b"null")
    await settled()
    assert len(served.answered) == 4
    served.access.let_in("later")
    await settled()
    assert [r.body for r in served.answered[4:]] == [b"{}", b"null"]


async def test_time_for_the_body_begins_when_it_may_be_sent() -> None:
    served = Served(Settings(body_timeout_seconds=0.5))
    loop = asyncio.get_running_loop()
    set_for: list[float] = []
    call_later = loop.call_later

    def noted(delay: float, callback: Any, *arguments: Any, **context: Any) -> asyncio.TimerHandle:
        if getattr(callback, "__name__", "") == "_expired":
            set_for.append(delay)
        return call_later(delay, callback, *arguments, **context)

    loop.call_later = noted  # type: ignore[method-assign]
    served.send(head("new", len(BODY), "expect: 100-continue"))
    await settled()
    assert set_for == [] and served.transport.written == b""
    served.access.let_in("new")
    await settled()
    assert set_for == [0.5] and served.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    served.send(BODY)
    await settled()
    assert served.statuses() == [100, 200]
    # Behind another request its time begins when that one is answered: nothing is read before.
    served.may_answer.clear()
    served.send(head("known", 2) + b"{}" + head("known", len(BODY)))
    await settled()
    assert set_for == [0.5] and served.transport.is_paused
    served.may_answer.set()
    await settled()
    assert set_for == [0.5, 0.5] and not served.transport.is_paused


async def test_a_client_that_goes_is_verified_no_more() -> None:
    served = Served()
    served.send(head("new", len(BODY)) + BODY)
    await settled()
    served.transport.is_closed = True
    served.protocol.connection_lost(None)
    await settled()
    assert served.access.asked[b"Bearer new"].cancelled()
    assert served.answered == [] and served.transport.written == b""


@pytest.mark.parametrize("is_let_in", [True, False])
async def test_admin_routes_hold_no_more_either(is_let_in: bool) -> None:
    """uvicorn reads on when the application takes the body, and the application first asks who sends it."""
    from notify.server.access import guard

    served = Served()
    app = SimpleNamespace(settings=Settings(access=True), access=served.access)
    taken_by_app = 0

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        nonlocal taken_by_app
        try:
            await guard.admit(scope, app)  # type: ignore[arg-type]
            code = 200
            part = await receive()
            taken_by_app += len(part["body"])
            while part["more_body"]:
                part = await receive()
                taken_by_app += len(part["body"])
        except Unauthorized:
            code = 401
        await send({"type": "http.response.start", "status": code, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    served.use_asgi(asgi)
    body = BODY[: 512 << 10]
    request = head("new", len(body)).replace(b"/v1/messages", b"/v1/admin/limits") + body
    taken = served.send(request)
    await settled()
    assert taken <= HELD_BYTES + 2 * READ_BYTES and served.transport.is_paused and taken_by_app == 0
    if is_let_in:
        served.access.let_in("new")
    else:
        served.access.refuse("new", Unauthorized("no"))
    await settled()
    while taken < len(request):
        assert not served.transport.is_paused
        taken += served.send(request[taken:])
        await settled()
    assert served.statuses() == [200 if is_let_in else 401]
    assert taken_by_app == (len(body) if is_let_in else 0)


@pytest.mark.parametrize("end", [b"no size\r\n", b"2;" + b"x" * (70 << 10)], ids=["a bad chunk", "a long extension"])
@pytest.mark.parametrize("steps", [0, 1])
async def test_a_refused_request_with_a_bad_body_is_answered_once(end: bytes, steps: int) -> None:
    """The bad body began a second answer, behind the end of the connection."""
    served = Served()
    begun = []
    answer = served.protocol.answer
    served.protocol.answer = lambda cycle: begun.append(cycle) or answer(cycle)  # type: ignore[method-assign, func-returns-value]

    def admit(authorization: bytes, certificate: str | None) -> None:
        raise Unauthorized("no token")

    served.access.admit = admit  # type: ignore[method-assign]
    request = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    if steps:
        served.send(request)
        served.send(end)
    else:
        served.protocol.data_received(request + end)
    await settled()
    assert (served.statuses(), len(begun), served.transport.wrote_eof) == ([401], 1, True)
