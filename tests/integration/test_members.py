"""Stateless servers and the registry: each step of a transaction on another server, and who is there."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notify import ids
from notify.binlog_bridge.relay import Relay
from notify.cli.api import call as admin
from notify.client.http import HttpClient
from notify.client.servers import Servers
from notify.client.transactions import TransactionClient, accepted, pack
from notify.errors import InvalidRequest, Unavailable
from notify.message import Message
from notify.testing.process import ServerProcess
from notify.wire import (
    OutcomeItem,
    Outcomes,
    PackedMessage,
    PackedTransaction,
    PackedTransactions,
    Poll,
    encode_msgpack,
)
from storage.sql import registry, schema
from storage.sql.dialects import open_engine
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import subscribe

FOLLOWS_SECONDS = 5.0


@pytest.fixture(params=["postgresql", "mariadb"])
def storage(request: pytest.FixtureRequest, database_urls: dict[str, str], tmp_path: Path) -> Iterator[str]:
    with empty_database(request.param, database_urls, tmp_path) as url:
        engine = open_engine(url)
        schema.upgrade(engine, "main")
        engine.dispose()
        yield url


class Started:
    """Servers over one database."""

    def __init__(self, storage: str, directory: Path, stack: ExitStack) -> None:
        self._storage, self._directory, self._stack = storage, directory, stack
        self.servers: list[ServerProcess] = []

    def add(self, **environment: str) -> ServerProcess:
        place = self._directory / f"s{len(self.servers)}"
        server = ServerProcess(place, environment=environment, flags=["--storage", self._storage]).start()
        self._stack.callback(lambda: server.process.poll() is None and server.stop())  # type: ignore[union-attr]
        self.servers.append(server)
        return server


@pytest.fixture
def started(storage: str, tmp_path: Path) -> Iterator[Started]:
    with ExitStack() as stack:
        yield Started(storage, tmp_path, stack)


async def post(url: str, path: str, request: Any) -> Any:
    http = HttpClient(url)
    try:
        return msgspec.msgpack.decode(await http.call("POST", path, encode_msgpack(request), 30))
    finally:
        http.close()


def test_each_step_may_pass_another_server(started: Started) -> None:
    """Half, check, its answer and a repetition, each by another server; an outcome with a stale token is refused."""
    a, b, c = (started.add(NOTIFY_CHECK_ANSWER_SECONDS="1").url for _ in range(3))
    name = ids.to_text(ids.new_id())
    half = PackedTransactions(
        producer_group="g",
        source="s",
        transactions=[PackedTransaction(id=name, messages=[PackedMessage(topic="t", body=b"x")], check_after=0.5)],
    )

    async def run() -> None:
        stored = (await post(a, "/v1/transactions", half))["items"][0]
        assert (stored["status"], stored["shard"]) == (201, "main")
        assert (await post(b, "/v1/transactions", half))["items"][0]["status"] == 200
        poll = Poll(producer_group="g", instance="i", sources=["s"], wait=10)
        first = (await post(b, "/v1/checks/poll", poll))["checks"][0]
        assert (first["id"], first["messages"][0]["body"]) == (name, b"x")
        # Nobody answers within its second: another server asks again, and the first token is stale.
        again = (await post(c, "/v1/checks/poll", poll))["checks"][0]
        assert again["id"] == name and again["token"] != first["token"]

        def answer(token: str) -> Outcomes:
            item = OutcomeItem(id=name, outcome="COMMIT", shard="main", check=token)
            return Outcomes(producer_group="g", outcomes=[item])

        stale = (await post(a, "/v1/transactions/outcomes", answer(first["token"])))["items"][0]
        assert (stale["status"], stale["code"], stale["state"]) == (410, "stale_check", "PREPARED")
        good = (await post(a, "/v1/transactions/outcomes", answer(again["token"])))["items"][0]
        assert (good["status"], good["state"]) == (200, "COMMITTED")
        wrong = OutcomeItem(id=name, outcome="COMMIT", shard="elsewhere")
        refused = (await post(b, "/v1/transactions/outcomes", Outcomes(producer_group="g", outcomes=[wrong])))["items"]
        assert (refused[0]["status"], refused[0]["code"]) == (421, "wrong_shard")

    asyncio.run(run())
    shown = admin(c, "GET", "transactions", name)
    assert (shown["state"], shown["messages"][0]["body"]) == ("COMMITTED", "x")


def test_a_server_without_queues_says_who_has_them(started: Started, storage: str, tmp_path: Path) -> None:
    server = started.add()
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(post(server.url, "/v1/groups/g/receive", {"instance": "i"}))
    assert refused.value.code == "wrong_role"
    queue = ServerProcess(tmp_path / "queue", flags=["--registry", storage, "--roles", "queue"]).start()
    try:
        eventually(lambda: len(admin(queue.url, "GET", "nodes")["members"]) == 2)
        time.sleep(1.5)  # the other one's next heartbeat
        made = admin(server.url, "PUT", "topics", "orders", body={"reason": "test"})
        assert made["result"]["name"] == "orders", "the SDK finds the queue server by way of the other"
        subscribe(queue.url, "points", "orders")
        engine = open_engine(storage)
        relay = Relay(engine, queue.url)
        asyncio.run(relay.run(once=True))
        engine.dispose()

        def everybody() -> bool:
            found = admin(queue.url, "GET", "nodes")["members"]
            roles = {tuple(m["roles"]) for m in found if m["kind"] == "server"}
            others = {(m["kind"], m["detail"].get("group")) for m in found if m["kind"] != "server"}
            return roles == {("transactions",), ("queue",)} and others == {("relay", None), ("consumer", "points")}

        eventually(everybody)
    finally:
        queue.stop()


def test_traffic_follows_servers_that_come_and_go(started: Started) -> None:
    first = started.add()

    async def run() -> None:
        clients = [TransactionClient(first.url, "g", instance=f"i{n}") for n in range(12)]
        stop = False
        failed = 0

        async def load(client: TransactionClient) -> None:
            nonlocal failed
            while not stop:
                try:
                    accepted(await client.half_soon(ids.to_text(ids.new_id()), [pack(Message("t", "x"))]))
                except Unavailable:
                    failed += 1
                await asyncio.sleep(0.01)

        loads = [asyncio.ensure_future(load(client)) for client in clients]
        await asyncio.sleep(2)
        second = await asyncio.to_thread(started.add)
        before = halves(second.url)
        began = time.monotonic()
        while halves(second.url) < before + 50 and time.monotonic() - began < 15:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        came = time.monotonic() - began
        # The first address that they were given goes away: they know the other one.
        await asyncio.to_thread(first.kill)
        began, at = time.monotonic(), halves(second.url)
        while halves(second.url) < at + 500 and time.monotonic() - began < 15:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        went = time.monotonic() - began
        stop = True
        await asyncio.gather(*loads)
        for client in clients:
            await client.close()
        assert came < FOLLOWS_SECONDS and went < FOLLOWS_SECONDS, (came, went)
        assert failed == 0

    asyncio.run(run())


def halves(url: str) -> int:
    import urllib.request

    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("notify_halves_total "):
                return int(float(line.split()[1]))
    return 0


def test_a_clock_that_is_off_is_said(started: Started, storage: str) -> None:
    """Its own does not count: the database's is used, and doctor names the server."""
    server = started.add()
    engine = open_engine(storage)
    with engine.begin() as connection:
        off = registry.Member("elsewhere", "server", "http://127.0.0.1:9", detail={"clock_offset_seconds": 42.0})
        registry.heartbeat(connection, off)
    engine.dispose()

    def named() -> bool:
        done = subprocess.run(
            [sys.executable, "-m", "notify.cli.main", "doctor", "--url", server.url, "--json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode == 1 and "+42.0 s" in done.stdout and "NTP" in done.stdout

    eventually(named, 4)


def test_the_same_room_comes_first(started: Started) -> None:
    near = {started.add(NOTIFY_ROOM="east").url}
    far = {started.add(NOTIFY_ROOM="west").url}

    async def run() -> None:
        for room, mine in (("east", near), ("west", far)):
            servers = Servers(",".join(near | far), "transactions", room=room)
            for _ in range(50):  # until the server that is asked has heard of the other
                await servers.refresh()
                if len(servers.urls()) == 2 and servers._members:
                    break
                await asyncio.sleep(0.1)
            assert {servers._pick(None, servers.urls()) for _ in range(20)} == mine
            # Where its own room has nobody, another one serves.
            servers._failed(next(iter(mine)))
            assert servers._pick(None, servers.urls()) in near | far
            servers.close()

    asyncio.run(run())


def test_members_at_addresses_that_cannot_be_reached(started: Started, storage: str) -> None:
    """As from outside a container's network: the address that was given still serves."""
    server = started.add(NOTIFY_URL="http://127.0.0.1:9")

    async def run() -> None:
        servers = Servers(server.url, "transactions")
        await servers.refresh()
        assert list(servers.urls()) == ["http://127.0.0.1:9"]
        assert b"members" in await servers.call("GET", "/v1/members", b"", 5.0)
        servers.close()

    asyncio.run(run())


def test_no_caller_waits_beyond_its_deadline() -> None:
    """A server that accepts and never answers, and nobody at all."""

    async def run(port: int) -> None:
        for url in (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port},http://127.0.0.1:9", "http://127.0.0.1:9"):
            servers = Servers(url, "transactions")
            began = time.monotonic()
            with pytest.raises(Unavailable):
                await servers.call("POST", "/v1/transactions", b"", 1.0)
            assert time.monotonic() - began < 1.5
            servers.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections wait in its backlog
        asyncio.run(run(silent.getsockname()[1]))
