"""Stateless servers and the registry: each step of a transaction on another server, and the list of members."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.cli.api import call as call_by_registry
from notify.client.producer.packing import pack
from notify.client.producer.transactions import TransactionClient, accepted
from notify.client.transport.servers import Servers
from notify.errors import Unavailable
from notify.movers.relay.relay import Relay
from notify.protocol.message import Message
from notify.protocol.wire import JSON
from notify.server.cluster.membership import Idle, Membership
from notify.storage.members import Member
from notify.storage.sql import registry
from notify.storage.sql.engines import open_engine
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.groups import Caller, subscribe
from tests.support.http import REASON, admin, ask, call, metric, post
from tests.support.proxy import Proxy
from tests.support.servers import Started, make_storage, stop_if_running, until_known
from tests.support.transactions import half_request, new_id
from tests.support.virtual_loop import JumpingLoop


@pytest.fixture(scope="module", params=["postgresql", pytest.param("mariadb", marks=pytest.mark.long)])
def three(
    request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """Three servers over one database, two of them in rooms; tests leave them running."""
    directory = tmp_path_factory.mktemp("three")
    with empty_database(request.param, database_urls, directory) as url, ExitStack() as stack:
        make_storage(url)
        started = Started(url, directory, stack)
        for room in ("east", "west", ""):
            started.add(NOTIFY_ROOM=room, NOTIFY_CHECK_ANSWER_SECONDS="0.5")
        until_known(started.servers)
        yield started


@pytest.mark.long
def test_each_step_may_pass_another_server(three: Started) -> None:
    """Half, check, answer and a repetition go to different servers; an answer with a stale token is refused."""
    a, b, c = (server.url for server in three.servers)
    name = new_id()
    request = half_request("g", name) | {"source": "s"}
    request["transactions"][0]["check_after"] = 0.5
    stored = post(a, "/v1/transactions", request)["items"][0]
    assert (stored["status"], stored["shard"]) == (201, "main")
    assert post(b, "/v1/transactions", request)["items"][0]["status"] == 200

    def check(url: str) -> dict[str, Any]:
        poll = {"producer_group": "g", "instance": "i", "sources": ["s"], "wait": 2}
        checks: list[dict[str, Any]] = eventually(lambda: post(url, "/v1/checks/poll", poll)["checks"], "a check")
        return checks[0]

    first = check(b)
    assert (first["id"], first["messages"][0]["body"]) == (name, "x")
    # No answer within check_answer_seconds: another server asks again, and the first token is stale.
    again = check(c)
    assert again["id"] == name and again["token"] != first["token"]

    def decide(url: str, **fields: str) -> dict[str, Any]:
        outcome = {"id": name, "outcome": "COMMIT", "shard": "main"} | fields
        answer = post(url, "/v1/transactions/outcomes", {"producer_group": "g", "outcomes": [outcome]})
        return dict(answer["items"][0])

    stale = decide(a, check=first["token"])
    assert (stale["status"], stale["code"], stale["state"]) == (410, "stale_check", "PREPARED")
    good = decide(a, check=again["token"])
    assert (good["status"], good["state"]) == (200, "COMMITTED")
    wrong = decide(b, shard="elsewhere")
    assert (wrong["status"], wrong["code"]) == (421, "wrong_shard")
    shown = admin(c, "GET", f"transactions/{name}")
    assert (shown["state"], shown["messages"][0]["body"]) == ("COMMITTED", "x")


def halves(server: ServerProcess) -> float:
    """How many halves the server has stored."""
    return metric(server.url, "notify_halves_total")


@pytest.mark.long
def test_the_same_room_comes_first(three: Started) -> None:
    """A client keeps to servers of its own room; if there is none, the others serve it."""
    addresses = ",".join(server.url for server in three.servers)
    clients = 10

    async def send(room: str) -> None:
        servers = Servers(addresses, "transactions", room=room)
        await servers.refresh()
        half = json.dumps(half_request()).encode()
        await servers.call("POST", "/v1/transactions", half, PATIENCE_SECONDS, JSON)
        await servers.aclose()

    for room, stored in (("east", [clients, 0, 0]), ("west", [0, clients, 0]), ("south", None)):
        before = [halves(server) for server in three.servers]
        for _ in range(clients):  # each client chooses again: once in 59,000 runs all choose right by chance
            asyncio.run(send(room))
        counts = [halves(server) - count for server, count in zip(three.servers, before, strict=True)]
        assert sum(counts) == clients and stored in (None, counts)


@pytest.mark.long
def test_a_clock_that_is_off_is_said(three: Started) -> None:
    """A server whose clock is off is named by `doctor`; it uses the database's clock."""
    engine = open_engine(three.storage)
    off = Member("elsewhere", "server", "http://127.0.0.1:9", detail={"clock_offset_seconds": 42.0})

    def is_named() -> bool:
        with engine.begin() as connection:
            registry.heartbeat(connection, off)
        code, answer = cli("doctor", "--url", three.servers[0].url, "--json")
        return code == 1 and "+42.0 s" in str(answer) and "NTP" in str(answer)

    eventually(is_named, "doctor to name the clock")
    with engine.begin() as connection:
        registry.leave(connection, off.name)
    engine.dispose()


@pytest.mark.long
def test_a_server_without_queues_says_who_has_them(three: Started, tmp_path: Path) -> None:
    server = three.servers[0]
    status, problem = ask(server.url, "POST", "/v1/groups/g/receive", {"instance": "i"})
    assert (status, problem["code"]) == (421, "wrong_role")
    queue = ServerProcess(tmp_path / "queue", flags=["--registry", three.storage, "--roles", "queue"]).start()
    engine = open_engine(three.storage)
    try:
        until_known([server, queue])
        made = call_by_registry(server.url, "PUT", "topics", "orders", body={"reason": REASON})
        assert made["result"]["name"] == "orders", "the SDK finds the queue server by way of the other"
        subscribe(queue.url, "points", "orders")
        consumer = Caller(queue.url, "points", "i")

        def everybody_is_there() -> bool:
            consumer.receive("orders")
            members = admin(queue.url, "GET", "nodes")["members"]
            roles = {tuple(m["roles"]) for m in members if m["kind"] == "server"}
            others = {(m["kind"], m["detail"].get("group")) for m in members if m["kind"] != "server"}
            return roles == {("transactions",), ("queue",)} and others == {("relay", None), ("consumer", "points")}

        with in_background(Relay(engine, queue.url).run()) as relaying:
            relaying.until(everybody_is_there, "servers, relay and consumer among the members")
    finally:
        engine.dispose()
        queue.stop()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_servers_that_start_at_once_do_not_stop_each_other(
    kind: str, database_urls: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each inserts its own row and then deletes those of lost servers, for which InnoDB reads the other's new row."""
    forget = registry.forget_the_long_gone
    barrier = threading.Barrier(2)

    def forget_together(connection: sa.Connection) -> None:
        barrier.wait(PATIENCE_SECONDS)
        forget(connection)

    monkeypatch.setattr(registry, "forget_the_long_gone", forget_together)

    async def start(engine: sa.Engine, name: str) -> None:
        membership = Membership(engine, Member(name, "server"))
        await membership.start()
        await membership.announce(Idle())
        await membership.stop()

    with empty_database(kind, database_urls, tmp_path) as url, ThreadPoolExecutor() as threads:
        make_storage(url)
        engines = [open_engine(url) for _ in range(2)]
        for started in [threads.submit(asyncio.run, start(engine, f"s{n}")) for n, engine in enumerate(engines)]:
            started.result()
        for engine in engines:
            engine.dispose()


def test_a_server_becomes_a_member_once_it_answers(tmp_path: Path) -> None:
    """A client that came too early was refused, and kept to another server for as long as that answered."""
    url = f"sqlite:///{tmp_path}/storage.db"
    make_storage(url)
    engine = open_engine(url)

    async def run() -> None:
        membership = Membership(engine, Member("early", "server"))
        await membership.start()
        with engine.connect() as connection:
            assert registry.members(connection) == []
        await membership.announce(Idle())
        assert [m.name for m in membership.members] == ["early"]
        await membership.stop()

    asyncio.run(run())
    engine.dispose()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.long)])
def test_traffic_follows_servers_that_come_and_go(kind: str, database_urls: Mapping[str, str], tmp_path: Path) -> None:
    """A server that is added gets a share of the requests; of one that is killed no message is lost."""
    with empty_database(kind, database_urls, tmp_path) as url, ExitStack() as stack:
        make_storage(url)
        started = Started(url, tmp_path, stack)
        first = started.add()
        asyncio.run(come_and_go(started, first))


async def come_and_go(started: Started, first: ServerProcess) -> None:
    count = 20  # once in a million runs all choose the same of two servers
    clients = [TransactionClient(first.url, "g", instance=f"i{n}", half_seconds=PATIENCE_SECONDS) for n in range(count)]
    sent = [0] * count
    stopping = asyncio.Event()

    async def load(number: int) -> None:
        while not stopping.is_set():
            accepted(await clients[number].half_soon(new_id(), [pack(Message("t", "x"))]))
            sent[number] += 1
            await asyncio.sleep(0.05)  # the pace of the load

    async def each_sends_more() -> None:
        before = list(sent)
        await eventually_async(lambda: all(n > m + 2 for n, m in zip(sent, before, strict=True)), "halves of each")

    async with asyncio.TaskGroup() as loads:  # a failed half fails the test
        for number in range(count):
            loads.create_task(load(number))
        await each_sends_more()
        second = await asyncio.to_thread(started.add)
        await eventually_async(lambda: all(len(c.http.urls()) == 2 for c in clients), "all clients to know the second")
        before = await asyncio.to_thread(halves, second)
        await each_sends_more()
        assert await asyncio.to_thread(halves, second) > before
        # The only address that the clients were given goes away: they know the other one.
        await asyncio.to_thread(first.kill)
        await each_sends_more()
        stopping.set()
    for client in clients:
        await client.close()


def test_members_at_addresses_that_cannot_be_reached(tmp_path: Path) -> None:
    """A client outside a container's network keeps to the address that it was given."""
    storage = f"sqlite:///{tmp_path}/storage.db"
    server = ServerProcess(
        tmp_path / "s", environment={"NOTIFY_URL": "http://127.0.0.1:9"}, flags=["--storage", storage]
    )

    async def run() -> None:
        servers = Servers(server.url, "transactions")
        await servers.refresh()
        assert list(servers.urls()) == [server.url]
        assert b"members" in await servers.call("GET", "/v1/members", b"", PATIENCE_SECONDS)
        await servers.aclose()

    make_storage(storage)
    try:
        server.start()
        asyncio.run(run())
    finally:
        stop_if_running(server)


@pytest.mark.parametrize("addresses", ["{silent}", "{silent},{gone}", "{silent},{other}", "{gone}"])
def test_no_caller_waits_beyond_its_deadline(addresses: str) -> None:
    """A call ends at its deadline: with servers that accept and never answer, and with none."""
    loop = JumpingLoop()

    async def run(url: str) -> None:
        servers = Servers(url, "transactions")
        with pytest.raises(Unavailable):
            await servers.call("POST", "/v1/transactions", b"", 1.0)
        assert loop.now <= 1.001
        await servers.aclose()

    def url_of(server: socket.socket) -> str:
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    # The kernel accepts connections into the backlogs.
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as other:
        given = addresses.format(silent=url_of(silent), other=url_of(other), gone="http://127.0.0.1:9")
        try:
            loop.run_until_complete(run(given))
        finally:
            loop.close()


class WithProxiedRegistry:
    """Two databases of PostgreSQL as shards; the first, which has the registry, is reached through a proxy."""

    def __init__(self, urls: Mapping[str, str], directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        databases = [stack.enter_context(empty_database("postgresql", urls, directory)) for _ in "ab"]
        for url, name in zip(databases, "ab", strict=True):
            make_storage(url, name)
        behind = sa.make_url(databases[0])
        self.proxy = stack.enter_context(Proxy(behind.host or "", behind.port or 0))
        through = behind.set(host="127.0.0.1", port=self.proxy.port)
        self.registry = through.render_as_string(hide_password=False)
        self.storage = f"a={self.registry} b={databases[1]}"

    def server(self, name: str, *flags: str) -> ServerProcess:
        return ServerProcess(self._directory / name, environment={"NOTIFY_ACCESS": "1"}, flags=flags)

    def queue_server(self, stack: ExitStack) -> tuple[ServerProcess, str]:
        """A queue server that runs, and its administrator's token."""
        queue = self.server("q", "--registry", self.registry, "--roles", "queue")
        stack.callback(stop_if_running, queue)
        queue.start()
        return queue, (self._directory / "q" / "admin.token").read_text().strip()


@pytest.mark.long
def test_a_server_starts_while_its_registry_is_away(database_urls: Mapping[str, str], tmp_path: Path) -> None:
    """With the settings and credentials that it knew last; it did not start at all, though another shard answered."""
    with ExitStack() as stack:
        cluster = WithProxiedRegistry(database_urls, tmp_path, stack)
        server = cluster.server("s", "--storage", cluster.storage)
        stack.callback(stop_if_running, server)
        server.start()
        token = (tmp_path / "s" / "admin.token").read_text().strip()
        made = {"name": "p", "rights": ["publish:*", "check:*"], "reason": REASON}
        producer = call(server.url, "POST", "/v1/admin/credentials", made, token)["token"]
        change = {"values": {"principal_requests": 5000}, "reason": REASON}
        call(server.url, "PUT", "/v1/admin/settings", change, token)
        known = tmp_path / "s" / "registry.json"
        eventually(lambda: b"5000" in known.read_bytes() and b'"p"' in known.read_bytes(), "the server to keep both")
        assert known.stat().st_mode & 0o077 == 0
        server.stop()
        cluster.proxy.close()

        stranger = cluster.server("new", "--storage", cluster.storage)
        with pytest.raises(Unavailable):
            stranger.start()
        said = "".join(stranger.output)
        assert "has not been a member before" in said and "refused" in said, "why it does not answer is told, too"

        def send(**fields: Any) -> int:
            return int(
                call(server.url, "POST", "/v1/transactions", half_request(**fields), producer)["items"][0]["status"]
            )

        server.start()
        assert send() == 201
        assert send(key="k") == 503, "the registry alone says where keys belong"
        assert ask(server.url, "POST", "/v1/transactions", half_request(), "ntf_none")[0] in (401, 503)
        cluster.proxy.reopen()
        eventually(lambda: send(key="k") == 201, "the registry to be heard again")
        settings = call(server.url, "GET", "/v1/admin/settings", token=token)
        assert "5000" in json.dumps(settings)
        eventually(
            lambda: [m["kind"] for m in call(server.url, "GET", "/v1/members", token=token)["members"]], "a member"
        )

        # Credentials that are old may have been revoked meanwhile.
        server.stop()
        cluster.proxy.close()
        old = json.loads(known.read_bytes())
        known.write_text(json.dumps(old | {"at_us": old["at_us"] - 2 * 3_600_000_000}))
        with pytest.raises(Unavailable):
            server.start()
        assert "may have been revoked" in "".join(server.output)


@pytest.mark.long
def test_a_queue_server_starts_while_its_registry_is_away(database_urls: Mapping[str, str], tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = WithProxiedRegistry(database_urls, tmp_path, stack)
        queue, token = cluster.queue_server(stack)
        queue.stop()
        cluster.proxy.close()
        queue.start()
        body = {"messages": [{"topic": "t", "body": "x"}]}
        assert call(queue.url, "GET", "/v1/admin/overview", token=token)["alarms"] is not None
        assert ask(queue.url, "POST", "/v1/messages", body, token)[0] in (200, 403)


@pytest.mark.long
def test_a_change_that_cannot_be_recorded_is_refused(database_urls: Mapping[str, str], tmp_path: Path) -> None:
    """While the registry is unreachable; the group was paused, and the answer was 500, a fault of the server."""
    with ExitStack() as stack:
        cluster = WithProxiedRegistry(database_urls, tmp_path, stack)
        queue, token = cluster.queue_server(stack)
        reason = {"reason": REASON}
        call(queue.url, "PUT", "/v1/admin/groups/g/subscriptions/t", {"mode": "shared", **reason}, token)
        cluster.proxy.close()
        status, answer = ask(queue.url, "POST", "/v1/admin/groups/g/pause", reason, token)
        assert (status, answer["code"]) == (503, "unavailable")
        assert ask(queue.url, "GET", "/v1/admin/actions", token=token)[0] == 503
        assert not call(queue.url, "GET", "/v1/admin/groups/g", token=token)["paused"]
        assert "notify_unexpected_errors_total 0.0" in ask(queue.url, "GET", "/metrics", token=token)[1]
        cluster.proxy.reopen()
        eventually(
            lambda: ask(queue.url, "POST", "/v1/admin/groups/g/pause", reason, token)[0] == 200, "the registry's answer"
        )
        [newest, *_] = call(queue.url, "GET", "/v1/admin/actions", token=token)["actions"]
        assert (newest["what"], newest["result"]) == ("group.pause", {"paused": True})
        assert (
            ask(queue.url, "POST", "/v1/admin/groups/none/reset", {"topic": "t", "to": "latest", **reason}, token)[0]
            == 404
        )
        assert call(queue.url, "GET", "/v1/admin/actions", token=token)["actions"][0] == newest, (
            "a refusal is no action"
        )
