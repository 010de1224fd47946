"""The places of all connections together: who gets one, which connection gives way, which stay free for operators."""

from __future__ import annotations

import gc
import resource
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from notify.protocol.limits import LIMITS
from notify.server.connections import protocol
from notify.server.connections import quota as connections
from notify.server.connections.quota import Connections, allowed_by_files
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.connection import Served, head, settled
from tests.support.http import ask
from tests.support.virtual_loop import pass_seconds

pytestmark = pytest.mark.virtual_time

DATA = head("known", 2) + b"{}"
PAGE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


async def page(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def several(count: int, bound: Connections) -> list[Served]:
    return [Served(connections=bound) for _ in range(count)]


def busy(count: int, bound: Connections) -> list[Served]:
    """Open connections whose requests wait for their answers."""
    made = several(count, bound)
    for served in made:
        served.may_answer.clear()
        served.send(DATA)
    return made


def told_of_the_bound(served: Served) -> bool:
    said = served.transport.written
    return b'"code":"too_many_connections"' in said and b"retry-after: 1\r\n" in said and b"connection: close" in said


async def test_the_oldest_that_never_sent_a_request_goes_first() -> None:
    bound = Connections(4)
    answered, *silent = several(4, bound)
    answered.send(DATA)
    await settled()
    await pass_seconds(connections.SILENT_SECONDS + 0.1)
    newest = several(2, bound)
    for served in silent[:2]:
        assert served.statuses() == [503] and told_of_the_bound(served) and served.transport.is_closed
    assert silent[2].statuses() == [] and not silent[2].transport.is_closed
    for served in (answered, *newest):
        served.send(DATA)
    await settled()
    assert [s.statuses() for s in (answered, *newest)] == [[200, 200], [200], [200]] and bound.count == 4


async def test_then_goes_who_has_been_idle_for_longest() -> None:
    bound = Connections(3)
    first, second = several(2, bound)
    waiting = busy(1, bound)[0]
    for served in (second, first):
        served.send(DATA)
        await settled()
        await pass_seconds(1)
    await pass_seconds(connections.IDLE_SECONDS)
    newest = Served(connections=bound)
    newest.send(DATA)
    await settled()
    assert second.transport.is_aborted and not first.transport.is_closed and newest.statuses() == [200]
    waiting.may_answer.set()
    await settled()
    assert waiting.statuses() == [200]


async def test_a_connection_that_ends_leaves_nothing_behind() -> None:
    """This holds also for a connection that was listed as idle and ended by itself before its turn."""
    bound = Connections(3)
    for served in (idle := several(3, bound)):
        served.send(DATA)
    await settled()
    await pass_seconds(connections.IDLE_SECONDS + 0.1)
    newest = Served(connections=bound)
    kept = [weakref.ref(served.protocol) for served in (*idle, newest)]
    for served in (*idle, newest):
        served.protocol.connection_lost(None)
    del served, idle, newest
    gc.collect()
    assert bound.count == 0 and [ref() for ref in kept] == [None] * 4


async def test_while_all_wait_for_answers_only_operators_get_a_place() -> None:
    bound = Connections(3, operators=2)
    held = busy(3, bound)
    data, operator = several(2, bound)
    operator.use_asgi(page)
    data.send(DATA)
    operator.send(PAGE)
    await settled()
    assert data.statuses() == [503] and told_of_the_bound(data)
    # It gets an answer, and keeps its place no longer than that.
    assert operator.statuses() == [200] and b"connection: close" in operator.transport.written
    assert operator.transport.is_closed and not any(served.transport.is_closed for served in held)
    # A connection that only holds an operator's place loses it to the next one.
    for served in (data, operator):
        served.protocol.connection_lost(None)
    holding = several(2, bound)
    late = Served(connections=bound)
    late.use_asgi(page)
    late.send(PAGE)
    await settled()
    assert told_of_the_bound(holding[0]) and late.statuses() == [200]
    assert bound.turned_away == 2


async def test_nobody_gets_a_place_beyond_the_operators() -> None:
    bound = Connections(1, operators=1)
    busy(1, bound)
    operator = Served(connections=bound)
    operator.use_asgi(page)
    operator.send(b"POST /v1/admin/limits HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
    await settled()
    beyond = Served(connections=bound)
    assert told_of_the_bound(beyond) and beyond.transport.is_closed and bound.count == 2


async def test_a_place_that_becomes_free_serves_who_waits_beyond_the_bound() -> None:
    bound = Connections(1, operators=1)
    held = busy(1, bound)[0]
    waiting = Served(connections=bound)
    held.transport.close()
    held.protocol.connection_lost(None)
    waiting.send(DATA)
    await settled()
    assert waiting.statuses() == [200] and not waiting.transport.is_closed
    waiting.send(DATA)
    await settled()
    assert waiting.statuses() == [200, 200]


async def test_a_refused_lingering_connection_frees_its_place_immediately() -> None:
    bound = Connections(1, operators=1)
    lingering = Served(connections=bound)
    lingering.send(b"no request\r\n\r\n")
    await settled()
    assert lingering.statuses() == [400] and protocol.LINGER_SECONDS > connections.SILENT_SECONDS
    await pass_seconds(connections.SILENT_SECONDS + 0.1)
    newest = Served(connections=bound)
    newest.send(DATA)
    await settled()
    assert lingering.transport.is_aborted and lingering.statuses() == [400] and newest.statuses() == [200]


def test_the_limit_of_open_files_goes_before_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    assert allowed_by_files(1000) == 1000 and limits[-1] == (4096, 4096)
    assert allowed_by_files(10_000) == 4096 * 3 // 4 - LIMITS.operator_connections
    limits.append((256, 256))
    assert allowed_by_files(10_000) == 128 - LIMITS.operator_connections
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert allowed_by_files(10_000) == 10_000


@pytest.fixture
def small(tmp_path: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_CONNECTIONS": "20"}).start()
    yield server
    server.stop()


def test_a_flood_of_idle_connections_locks_nobody_out(small: ServerProcess) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        flood = [stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(200)]
        body = {"messages": [{"topic": "t", "body": "b"}]}
        assert ask(small.url, "GET", "/v1/admin/overview")[0] == ask(small.url, "GET", "/livez")[0] == 200
        assert ask(small.url, "POST", "/v1/messages", body)[0] == 200
        assert flood[0].recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        metrics = ask(small.url, "GET", "/metrics")[1]
        shown = dict(line.split() for line in metrics.splitlines() if line.startswith("notify_connections"))
        assert float(shown["notify_connections"]) <= 20 + LIMITS.operator_connections
        assert float(shown["notify_connections_most"]) == 20 and float(shown["notify_connections_turned_away"]) >= 140


def test_operators_are_served_while_polls_have_every_place(small: ServerProcess) -> None:
    ended = threading.Event()

    def wait(n: int) -> None:
        body = {"topics": ["t"], "instance": f"i{n}", "wait": 60}
        while not ended.is_set():
            # Without room, a connection that has not asked yet loses its place to one that has: the poll is sent again.
            with suppress(OSError):
                ask(small.url, "POST", "/v1/groups/g/receive", body)

    ask(small.url, "PUT", "/v1/admin/groups/g/subscriptions/t", {"reason": "a test"})
    polls = [threading.Thread(target=wait, args=(n,), daemon=True) for n in range(20)]
    for poll in polls:
        poll.start()
    body = {"messages": [{"topic": "u", "body": "b"}]}

    def answer(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        with suppress(OSError):  # a poll that connected later took its place before its head had arrived
            return ask(small.url, method, path, body)
        return 0, None

    refused = eventually(lambda: (a := answer("POST", "/v1/messages", body))[0] == 503 and a, "all to be taken")
    assert refused[1]["code"] == "too_many_connections" and "setting connections" in refused[1]["detail"]
    for path in ("/livez", "/readyz", "/v1/admin/overview", "/v1/admin/groups"):
        assert eventually(lambda path=path: answer("GET", path)[0], path) == 200  # type: ignore[misc]
    ended.set()
    small.kill()
    for poll in polls:
        poll.join(60)
