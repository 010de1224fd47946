"""The layouts in which servers run: one with its own log, or servers over a database, with a mover and a queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from notify.testing.process import ServerProcess
from tests.support.commands import Command
from tests.support.databases import empty_database
from tests.support.servers import make_storage, stop_if_running


@dataclass(frozen=True)
class Layout:
    """The addresses that a service needs. The processes behind them run until their stack ends."""

    database_url: str
    """An empty database of the service."""
    send_url: str
    """Where its producer sends."""
    consume_url: str
    """Where its consumer receives."""
    admin_url: str
    """Where its groups and dead letters are administered."""


@dataclass(frozen=True)
class Site:
    """Where a layout is set up."""

    databases: Mapping[str, str]
    """The URLs of database servers by kind."""
    kafka: Callable[[], str]
    """Gives the URL of a Kafka cluster."""
    directory: Path
    stack: ExitStack
    """Ends all that is started."""

    def database(self, kind: str) -> str:
        """The URL of an empty database."""
        return self.stack.enter_context(empty_database(kind, self.databases, self.directory))

    def server(self, name: str, *flags: str) -> ServerProcess:
        """A server that runs."""
        server = ServerProcess(self.directory / name, flags=flags)
        self.stack.callback(stop_if_running, server)
        return server.start()

    def move(self, mover: str, storage: str, target: str) -> None:
        """Start a bridge or relay from a server's database."""
        moving = Command(mover, "--dsn", storage, "--url", target)
        self.stack.callback(moving.close)
        moving.start()


def embedded(site: Site) -> Layout:
    """One server, whose log has transactions and queues."""
    server = site.server("server")
    return Layout(site.database("postgresql"), server.url, server.url, server.url)


def queued(kind: str, mover: str, site: Site) -> Layout:
    """A server over a database, a bridge or relay, and a queue server."""
    storage = site.database(kind)
    make_storage(storage)
    sender = site.server("sender", "--storage", storage)
    queue = site.server("queue", "--registry", storage, "--roles", "queue")
    site.move(mover, storage, queue.url)
    return Layout(site.database(kind), sender.url, queue.url, queue.url)


def over_kafka(kind: str, mover: str, site: Site) -> Layout:
    """A server over a database, which also shows Kafka's groups, a bridge or relay, and Kafka."""
    storage, kafka = site.database(kind), site.kafka()
    make_storage(storage)
    sender = site.server("sender", "--storage", storage, "--kafka", kafka)
    site.move(mover, storage, kafka)
    return Layout(site.database(kind), sender.url, kafka, sender.url)


LAYOUTS: Mapping[str, Callable[[Site], Layout]] = {
    "embedded": embedded,
    "bridge": partial(queued, "mariadb", "bridge"),
    "relay": partial(queued, "postgresql", "relay"),
    "bridge-to-kafka": partial(over_kafka, "mariadb", "bridge"),
    "relay-to-kafka": partial(over_kafka, "postgresql", "relay"),
}
