"""Addresses of a server: of one that listens on all, and of a name with several, the first of which never answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from notify.client import AsyncTransactionProducer, Message
from notify.client.producer.blocking import BlockingConnection
from notify.client.transport.http import HttpClient
from notify.errors import Unavailable
from notify.runtime.addresses import addresses_of, first_connection
from notify.runtime.timed_call import answer_to
from notify.server import webhooks
from notify.server.data.routes import reached
from notify.server.settings import Settings
from notify.testing import InMemoryServer
from tests.support.answering import answering, reply


def members(*urls: str, **more: Any) -> dict[str, Any]:
    return {"version": 1, "members": [{"name": f"worker-{n}", "url": url} for n, url in enumerate(urls, 1)], **more}


@pytest.mark.parametrize(
    ("announced", "host", "told"),
    [
        ("http://0.0.0.0:7400/worker-1", "notify.example:8400", "http://notify.example:8400/worker-1"),
        ("http://[::]:7400/worker-1", "[2001:db8::1]:7400", "http://[2001:db8::1]:7400/worker-1"),
        ("https://0.0.0.0:7401/worker-2", "notify.example:7400", "https://notify.example:7401/worker-2"),
        ("https://0.0.0.0:7401/worker-2", "notify.example", "https://notify.example:7401/worker-2"),
        ("https://[::]:7401/worker-2", "[2001:db8::1]", "https://[2001:db8::1]:7401/worker-2"),
        ("http://10.0.0.7:7400/worker-1", "notify.example:8400", "http://10.0.0.7:7400/worker-1"),
        ("http://0.0.0.0:7400/worker-1", "", "http://0.0.0.0:7400/worker-1"),
    ],
)
def test_all_addresses_are_the_one_that_was_asked(announced: str, host: str, told: str) -> None:
    (member,) = reached(members(announced, keys=["worker-1"]), host)["members"]
    assert member["url"] == told


def test_one_server_alone_too_and_no_member_of_a_registry() -> None:
    alone = members("http://0.0.0.0:7400") | {"version": 0}
    assert reached(alone, "notify.example")["members"][0]["url"] == "http://notify.example"
    others = members("http://0.0.0.0:7400")
    assert reached(others, "notify.example") == others


# --- A name with several addresses, the first of which never answers: what waited for it alone never came to the next

NAME = "localhost"  # a server without access control refuses other names
SILENT = "127.0.0.2"


@pytest.fixture
def silent() -> Iterator[Callable[[int], int]]:
    """Makes a port of SILENT one that never answers, because the queue of its connections is full; returns it."""
    with contextlib.ExitStack() as stack:

        def fall_silent(port: int) -> int:
            listening = stack.enter_context(socket.socket())
            listening.bind((SILENT, port))
            listening.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listening.getsockname())
            return port

        yield fall_silent


@pytest.fixture
def port(silent: Callable[[int], int]) -> Iterator[int]:
    """A port at which a server answers with the path of each request, and SILENT never does."""
    with answering(lambda request: reply(request, json.dumps({"path": request.path}).encode())) as server:
        yield silent(server.port)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of NAME, in this order."""
    given = [SILENT, "127.0.0.1"]
    look_up = socket.getaddrinfo

    def found(host: Any, port: Any, *arguments: Any, **named: Any) -> Any:
        if host != NAME:
            return look_up(host, port, *arguments, **named)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in given]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return given


def test_a_producer_sends_to_the_next_address(
    addresses: list[str], silent: Callable[[int], int], memory: InMemoryServer, unique: str
) -> None:
    async def run(url: str) -> str:
        async with AsyncTransactionProducer(url, group=unique) as producer:
            return await producer.publish(Message(unique, "1"))

    assert asyncio.run(run(f"http://{NAME}:{silent(int(memory.url.rpartition(':')[2]))}"))
    assert [message.text for message in memory.messages(unique)] == ["1"]


async def test_the_address_that_answered_comes_first(addresses: list[str], port: int) -> None:
    client = HttpClient(f"http://{NAME}:{port}")
    try:
        connection = await client._connect(asyncio.get_running_loop().time() + 10)
        assert client.reached == "127.0.0.1"
        connection.cut()
        addresses[:] = [SILENT, SILENT, "127.0.0.1"]
        assert (await client._connect(asyncio.get_running_loop().time() + 10)) is not None
        blocking = BlockingConnection()
        blocking.open(client, 10)
        blocking.close()
    finally:
        client.close()


async def test_all_addresses_that_refuse_are_one_failure(addresses: list[str]) -> None:
    addresses[:] = ["127.0.0.1", "127.0.0.3"]
    client = HttpClient(f"http://{NAME}:1")
    with pytest.raises(Unavailable, match=f"no server at http://{NAME}:1"):
        await client.call("GET", "/v1/members", b"", 10)
    client.close()


def test_a_webhook_is_posted_to_the_next_address(addresses: list[str], port: int) -> None:
    settings = Settings(webhook_hosts=f"{NAME}:{port}", webhook_secret="s")
    body = asyncio.run(webhooks.post(f"http://{NAME}:{port}/hook", b"{}", settings))
    assert json.loads(body) == {"path": "/hook"}


def test_a_call_of_urllib_comes_to_the_next_address(addresses: list[str], port: int) -> None:
    assert json.loads(answer_to(f"http://{NAME}:{port}/keys", 4.0, 1000)) == {"path": "/keys"}


async def test_a_connection_that_comes_too_late_is_dropped() -> None:
    dropped: list[str] = []
    both = asyncio.Barrier(2)

    async def connect(address: str) -> str:
        await both.wait()  # both come about in one turn of the loop
        return address

    won = await first_connection(["a", "b"], connect, dropped.append)
    assert sorted([won, *dropped]) == ["a", "b"]
    assert await addresses_of("::1", 1) == ["::1"]
