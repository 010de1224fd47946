"""Mode auto over every storage and queue: what is left behind arrives once, and in the order of its keys."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.client import TransactionProducer
from notify.errors import Unavailable
from notify.movers.relay.relay import Relay
from notify.protocol.workers import worker_names
from notify.runtime.databases import RELAYED
from notify.storage.sql.engines import opened
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.kafka import committed
from tests.support.left_behind import auto, delivered, leave_and_die, rows, send
from tests.support.servers import make_storage, stop_if_running
from tests.support.sql_storage import two_shards

KEYS = (*map(str, range(6)), None)
"""Also messages without a key."""
Bodies = Callable[[ServerProcess, str, int], list[str]]
"""The bodies of a topic in the order of its queues, once there are so many; the server that took them."""


@dataclass(frozen=True)
class Site:
    """Where a server and its queue are set up."""

    databases: Mapping[str, str]
    kafka: Callable[[], str]
    queue: InMemoryServer
    directory: Path
    stack: ExitStack
    """Ends all that is started."""

    def storage(self) -> str:
        url = self.stack.enter_context(empty_database("postgresql", self.databases, self.directory))
        make_storage(url)
        return url


@dataclass(frozen=True)
class Place:
    """The flags of the server that takes transactions, and where its messages arrive. `kafka`: the queue's address, if
    it is Kafka."""

    flags: tuple[str, ...]
    bodies: Bodies
    kafka: str = ""


def sql_storage(site: Site) -> Place:
    url = site.storage()
    return Place(("--storage", url), relayed(site.queue.url, url))


def shards(site: Site) -> Place:
    a, b = site.stack.enter_context(two_shards(site.databases, site.directory))
    return Place(("--storage", f"a={a} b={b}"), relayed(site.queue.url, a, b))


def over_kafka(site: Site) -> Place:
    url, kafka = site.storage(), site.kafka()

    def bodies(server: ServerProcess, topic: str, count: int) -> list[str]:
        relay(url, kafka)
        return [record.value().decode() for record in committed(kafka, topic, wanted=count)]

    return Place(("--storage", url, "--kafka", kafka), bodies, kafka)


def workers(site: Site) -> Place:
    def bodies(server: ServerProcess, topic: str, count: int) -> list[str]:
        return [body for name in worker_names(2) for body in delivered(server.url, topic, name)]

    return Place(("--workers", "2"), bodies)


def relayed(queue_url: str, *storages: str) -> Bodies:
    """A queue's bodies, once relays have moved those in databases of servers."""

    def bodies(server: ServerProcess, topic: str, count: int) -> list[str]:
        for url in storages:
            relay(url, queue_url)
        return delivered(queue_url, topic)

    return bodies


def relay(url: str, target: str) -> None:
    """Move what waits in a server's database; a target that is slow may need another try."""
    with opened(url) as engine:

        def is_moved() -> bool:
            try:
                asyncio.run(Relay(engine, target).run(once=True))
            except Unavailable:
                return False
            return True

        eventually(is_moved, "the target to take what waits")


@pytest.fixture
def site(
    request: pytest.FixtureRequest, database_urls: Mapping[str, str], memory: InMemoryServer, tmp_path: Path
) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(database_urls, lambda: str(request.getfixturevalue("kafka_url")), memory, tmp_path, stack)


def frozen(server: ServerProcess) -> Callable[[], None]:
    """Freeze all processes of a server, and return what thaws them. Requests wait in their sockets meanwhile."""
    assert server.process is not None
    pids = [server.process.pid, *server.workers()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def thaw() -> None:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)

    return thaw


EVERYWHERE = pytest.mark.parametrize(
    "kind",
    [
        sql_storage,
        workers,
        pytest.param(shards, marks=pytest.mark.long),
        pytest.param(over_kafka, marks=pytest.mark.long),
    ],
)


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite"])
@EVERYWHERE
def test_messages_left_behind_arrive_once_and_in_order(
    kind: Callable[[Site], Place], site: Site, engine: sa.Engine, unique: str
) -> None:
    place = kind(site)
    server = ServerProcess(site.directory / "server", flags=place.flags)
    server.url = f"http://127.0.0.1:{server._port}"
    site.stack.callback(stop_if_running, server)
    commits = 0

    def commit(producer: TransactionProducer) -> None:
        """Three transactions of each key."""
        nonlocal commits
        for _ in range(3):
            for key in KEYS:
                send(producer, unique, f"{key}.{commits}", key=key)
            commits += 1

    with auto(server, engine, unique) as producer:
        commit(producer)  # the server is unreachable
        server.start()
        assert producer.flush(PATIENCE_SECONDS) == []
        commit(producer)
        thaw = frozen(server)
        try:
            commit(producer)  # the first half is stored late
        finally:
            thaw()
        assert producer.flush(PATIENCE_SECONDS) == []
        commit(producer)
        server.kill()
        commit(producer)  # outcomes may be lost
        server.start()
        commit(producer)
        assert producer.flush(PATIENCE_SECONDS) == []
    assert {state for state, _ in rows(engine)} == {RELAYED}
    arrived = place.bodies(server, unique, commits * len(KEYS))
    for key in filter(None, KEYS):
        assert [body for body in arrived if body.startswith(f"{key}.")] == [f"{key}.{n}" for n in range(commits)]
    assert sorted(body for body in arrived if body.startswith("None.")) == sorted(f"None.{n}" for n in range(commits))


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite"])
@EVERYWHERE
def test_a_relay_alone_sends_what_killed_producers_left(
    kind: Callable[[Site], Place], site: Site, engine: sa.Engine, unique: str
) -> None:
    place = kind(site)
    server = ServerProcess(site.directory / "server", flags=place.flags)
    server.url = f"http://127.0.0.1:{server._port}"
    site.stack.callback(stop_if_running, server)

    def commit(number: int) -> None:
        leave_and_die(server.url, unique, engine.url, [(f"{key}.{number}", key) for key in KEYS])

    def relayed_rows() -> None:
        asyncio.run(Relay(engine, place.kafka or server.url, transactions_url=server.url).run(once=True))
        assert {state for state, _ in rows(engine)} == {RELAYED}

    commit(0)  # the server is unreachable
    commit(1)
    server.start()
    relayed_rows()
    thaw = frozen(server)
    try:
        commit(2)  # the first half is stored late
        commit(3)
    finally:
        thaw()
    relayed_rows()
    arrived = place.bodies(server, unique, 4 * len(KEYS))
    for key in filter(None, KEYS):
        assert [body for body in arrived if body.startswith(f"{key}.")] == [f"{key}.{n}" for n in range(4)]
    assert sorted(body for body in arrived if body.startswith("None.")) == [f"None.{n}" for n in range(4)]
