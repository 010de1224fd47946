"""The layouts in which servers run: one with its own log, or servers over a database, with a mover and a queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from notify.testing.process import ServerProcess
from tests.support.commands import Command
from tests.support.databases import empty_database
from tests.support.servers import Started, make_storage, stop_if_running


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


def embedded(urls: Mapping[str, str], directory: Path, stack: ExitStack) -> Layout:
    """One server, whose log has transactions and queues."""
    server = ServerProcess(directory / "server")
    stack.callback(stop_if_running, server)
    server.start()
    database = stack.enter_context(empty_database("postgresql", urls, directory))
    return Layout(database, server.url, server.url, server.url)


def bridged(urls: Mapping[str, str], directory: Path, stack: ExitStack) -> Layout:
    """A server over MariaDB, a bridge, and a queue server."""
    return _over_a_database("mariadb", "bridge", urls, directory, stack)


def relayed(urls: Mapping[str, str], directory: Path, stack: ExitStack) -> Layout:
    """A server over PostgreSQL, a relay, and a queue server."""
    return _over_a_database("postgresql", "relay", urls, directory, stack)


LAYOUTS: Mapping[str, Callable[[Mapping[str, str], Path, ExitStack], Layout]] = {
    "embedded": embedded,
    "bridge": bridged,
    "relay": relayed,
}
"""By name; each takes the database servers' URLs, an empty directory, and the stack that ends it."""


def _over_a_database(kind: str, mover: str, urls: Mapping[str, str], directory: Path, stack: ExitStack) -> Layout:
    database, storage = (stack.enter_context(empty_database(kind, urls, directory)) for _ in range(2))
    make_storage(storage)
    sender = Started(storage, directory, stack).add()
    queue = ServerProcess(directory / "queue", flags=["--registry", storage, "--roles", "queue"])
    stack.callback(stop_if_running, queue)
    queue.start()
    moving = Command(mover, "--dsn", storage, "--url", queue.url)
    stack.callback(moving.close)
    moving.start()
    return Layout(database, sender.url, queue.url, queue.url)
