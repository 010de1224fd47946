"""A service with an outbox on MySQL or MariaDB, and a bridge that moves it to a queue server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.orm import Session

from notify.binlog_bridge.bridge import Bridge
from notify.client import Message, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message
from notify.protocol import ids
from notify.testing.binlog_server import BinlogServer
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background, repeated
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import drain, subscribe
from tests.support.shop import Base, Order, make_engine
from tests.support.stranger import Stranger
from tests.support.wal import row

SEES_BINLOG: Mapping[type[BinlogServer], str] = {
    MariaDbServer: "BINLOG MONITOR, REPLICA MONITOR",
    MySqlServer: "REPLICATION CLIENT",
}
"""The rights to see what a server leaves out of its binlog, and whether it is a replica."""


def outbox(url: str, topic: str, numbers: range, **options: Any) -> None:
    """Orders with their messages, each a transaction of its own."""
    engine = make_engine(url)
    create_tables(engine)
    Base.metadata.create_all(engine)
    with TransactionProducer("http://127.0.0.1:9", group=topic, engine=engine, mode="outbox") as producer:
        for n in numbers:
            with Session(engine) as session, session.begin():
                session.add(Order(item=str(n)))
                producer.send(session, Message(topic, {"n": n}, key="k", **options))
                if n % 4 == 3:
                    session.rollback()
    engine.dispose()


def once(bridge: Bridge, **options: Any) -> Bridge:
    """Run a bridge until everything is moved."""
    asyncio.run(asyncio.wait_for(bridge.run(once=True, **options), 2 * PATIENCE_SECONDS))
    return bridge


def move(url: str, to: ServerProcess | Stranger | str, **options: Any) -> Bridge:
    """Run a bridge from a database until everything is moved. `to`: a server, or an address."""
    return once(Bridge([url], to if isinstance(to, str) else to.url), **options)


def move_while_written(url: str, server: ServerProcess, write: Callable[[], object]) -> Bridge:
    """`move` while the source is written all the time, until the bridge ends."""
    bridge = Bridge([url], server.url)
    with repeated(write, threads=1, pause_seconds=0.01, passing=()):
        asyncio.run(asyncio.wait_for(bridge.run(once=True), PATIENCE_SECONDS))
    return bridge


def writing(engine: sa.Engine, topic: str, what: str) -> Callable[[], None]:
    """A function that commits one transaction: a message, or a row of another table."""

    def write() -> None:
        with Session(engine) as session, session.begin():
            if what == "messages":
                session.execute(half_message.insert().values(row(topic, 1000)))
            else:
                session.add(Order(item="of no message"))

    return write


@contextlib.contextmanager
def source_read_once(url: str, server: ServerProcess, topic: str) -> Iterator[sa.Engine]:
    """A source that a bridge has read, to whose topic a group of the same name is subscribed."""
    subscribe(server.url, topic, topic)
    engine = sa.create_engine(url)
    create_tables(engine)
    move(url, server)
    yield engine
    engine.dispose()


def end_once_while_written(url: str, server: ServerProcess, topic: str, what: str) -> None:
    """A run of a bridge with `once` ends where the log ended at its start, although the source is written meanwhile."""
    subscribe(server.url, topic, topic)
    outbox(url, topic, range(4))
    move(url, server)
    outbox(url, topic, range(4, 8))
    engine = sa.create_engine(url)
    bridge = move_while_written(url, server, writing(engine, topic, what))
    engine.dispose()
    assert bridge.totals.rows >= 3
    assert numbers(server, topic, 6)[:6] == [n for n in range(8) if n % 4 != 3]


def move_until(url: str, server: ServerProcess, is_done: Callable[[], object], **options: Any) -> Bridge:
    """Run a bridge until something is so; the bridge's error where it ends before."""
    bridge = Bridge([url], server.url)
    with in_background(bridge.run(**options)) as bridging:
        bridging.until(is_done, "the bridge to have done it")
    return bridge


def poison(engine: sa.Engine, **values: Any) -> str:
    """The id of a copy of the outbox's first row, with these values; no queue takes it, for the sake of its topic."""
    name = ids.to_text(ids.new_id())
    with engine.begin() as connection:
        row = dict(connection.execute(sa.select(half_message).limit(1)).mappings().one())
        values = {"topic": "no such topic"} | values
        connection.execute(half_message.insert().values(row | {"transaction_id": name} | values))
    return name


@contextlib.contextmanager
def binlog_reader(server: BinlogServer, url: str, name: str, rights: Mapping[str, str]) -> Iterator[str]:
    """The database's address for a user who may read its binlog, and has these `rights` by table (`*`: all tables)."""
    server.execute(
        f"CREATE USER {_account(name)} IDENTIFIED BY 'shop'",
        f"GRANT REPLICATION SLAVE, {SEES_BINLOG[type(server)]} ON *.* TO {_account(name)}",
    )
    try:
        grant(server, url, name, rights)
        yield sa.make_url(url).set(username=name).render_as_string(hide_password=False)
    finally:
        server.execute(f"DROP USER {_account(name)}")


def grant(server: BinlogServer, url: str, name: str, rights: Mapping[str, str]) -> None:
    """Give a user of `binlog_reader` more rights."""
    database = sa.make_url(url).database
    server.execute(*(f"GRANT {what} ON {database}.{table} TO {_account(name)}" for table, what in rights.items()))


def _account(name: str) -> str:
    return f"'{name}'@'127.0.0.1'"


def numbers(server: ServerProcess, group: str, count: int) -> list[int]:
    return [json.loads(m["body"])["n"] for m in drain(server.url, group, group, count)]


def write_as_statement(url: str | URL, statement: str) -> None:
    """Write in STATEMENT format, which a session with the right to it may choose."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("SET SESSION binlog_format = 'STATEMENT'")
        connection.exec_driver_sql(statement)
    engine.dispose()


@contextlib.contextmanager
def held_commits(server: BinlogServer) -> Iterator[None]:
    """Each commit waits for a semi-synchronous replica, and there is none: the binlog has it, and no other session
    sees it yet."""
    if isinstance(server, MySqlServer):
        server.execute("INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'")
        prefix = "rpl_semi_sync_source"
    else:
        prefix = "rpl_semi_sync_master"
    server.execute(
        f"SET GLOBAL {prefix}_timeout = 3600000, GLOBAL {prefix}_wait_point = AFTER_SYNC, GLOBAL {prefix}_enabled = ON"
    )
    try:
        yield
    finally:
        server.execute(f"SET GLOBAL {prefix}_enabled = OFF")
        if isinstance(server, MySqlServer):
            server.execute("UNINSTALL PLUGIN rpl_semi_sync_source")
        else:
            server.execute(f"SET GLOBAL {prefix}_wait_point = AFTER_COMMIT")


def is_held(server: BinlogServer) -> bool:
    """Whether a commit waits for a semi-synchronous replica."""
    return any("semi-sync" in str(row).lower() for row in server.execute("SHOW PROCESSLIST"))
