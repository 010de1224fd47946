"""Settings of a MySQL or MariaDB for its other clients do not hold for Notify's own sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.bridge import Bridge
from notify.check import question
from notify.client import create_tables
from notify.client.tables import left_rows
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.definitions import half_message, notify_refused
from notify.errors import StorageFailed
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.runtime.databases import ALL_ROWS, LEFT_BEHIND
from notify.storage.sql import schema
from notify.storage.sql.engines import open_engine, visitor_engine
from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import move, numbers, poison
from tests.support.groups import subscribe
from tests.support.wal import insert

CUTS_SHORT = {"sql_select_limit": 2}
ODD = CUTS_SHORT | {"max_join_size": 1, "completion_type": 1, "wait_timeout": 25}
ODD_MYSQL = ODD | {"transaction_read_only": 1, "max_execution_time": 60_000}
ODD_MARIADB = ODD | {"tx_read_only": 1, "max_statement_time": 60, "idle_transaction_timeout": 25}
UNCOMMITTED = {
    True: {"transaction_isolation": "'READ-UNCOMMITTED'"},
    False: {"tx_isolation": "'READ-UNCOMMITTED'"},
}
"""By whether the server is a MySQL."""


@pytest.fixture
def url(binlog_url: str) -> str:
    return binlog_url


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    """A service's engine, whose tables are made."""
    engine = sa.create_engine(url)
    create_tables(engine)
    yield engine
    engine.dispose()


@contextmanager
def odd_settings(server: BinlogServer, settings: Mapping[str, object]) -> Iterator[None]:
    """Change global settings, which later sessions have from their beginning."""
    server.execute("SET " + ", ".join(f"GLOBAL {name} = {value}" for name, value in settings.items()))
    try:
        yield
    finally:
        server.execute("SET " + ", ".join(f"GLOBAL {name} = DEFAULT" for name in settings))


def odd_for(server: BinlogServer) -> dict[str, int]:
    return ODD_MYSQL if isinstance(server, MySqlServer) else ODD_MARIADB


def write(engine: sa.Engine, topic: str, transactions: int, messages: int, **values: object) -> list[str]:
    """The ids of transactions with so many messages each, whose numbers go on."""
    names = [ids.to_text(ids.new_id()) for _ in range(transactions)]
    with engine.begin() as connection:
        for at, name in enumerate(names):
            for no in range(messages):
                insert(connection, topic, at * messages + no, transaction_id=name, message_no=no, **values)
    return names


@pytest.mark.parametrize("way", ["relay", "backfill"])
def test_a_mover_sends_whole_transactions(
    url: str, engine: sa.Engine, binlog_server: BinlogServer, server: ServerProcess, unique: str, way: str
) -> None:
    """A limit of rows cut the messages of a transaction off; others ended a mover's session, or refused its notes."""
    subscribe(server.url, unique, unique)
    write(engine, unique, transactions=3, messages=4)
    poison(engine)
    with odd_settings(binlog_server, odd_for(binlog_server)):
        if way == "relay":
            visitor = visitor_engine(url)
            asyncio.run(Relay(visitor, server.url).run(once=True))
            visitor.dispose()
        else:
            move(url, server, fill=True)
    assert numbers(server, unique, 12) == list(range(12))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(notify_refused)) == 1


def test_a_mover_never_sends_what_is_not_committed(
    url: str, engine: sa.Engine, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """Where the server shows it: what was rolled back later was sent."""
    subscribe(server.url, unique, unique)
    write(engine, unique, transactions=1, messages=1)
    with odd_settings(binlog_server, UNCOMMITTED[isinstance(binlog_server, MySqlServer)]), engine.connect() as writer:
        insert(writer, unique, 1)
        insert(writer, unique, 2, mode="auto", relayed=LEFT_BEHIND)
        visitor = visitor_engine(url)
        asyncio.run(Relay(visitor, server.url).run(once=True))
        visitor.dispose()
        service = sa.create_engine(url)
        with service.connect() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(half_message)) == 3
        found = asyncio.run(DatabaseCalls(service).call(left_rows.look, "g", schema=""))
        service.dispose()
        assert found.places == []
        writer.rollback()
    assert numbers(server, unique, 1) == [0]


def test_a_check_is_answered_where_the_server_logs_statements(
    url: str, engine: sa.Engine, binlog_server: BinlogServer
) -> None:
    """There InnoDB takes no writes at READ COMMITTED (1665): halves in doubt stayed so for ever."""
    with odd_settings(binlog_server, {"binlog_format": "'STATEMENT'"}):
        service = sa.create_engine(url)
        (committed,) = write(service, "topic", transactions=1, messages=1, mode="half", relayed=1)
        with service.connect() as connection:
            assert question.ask(connection, committed, "g").state == "COMMITTED"
            in_doubt = ids.to_text(ids.new_id())
            assert question.ask(connection, in_doubt, "g").state == "ROLLED_BACK"
        with pytest.raises(sa.exc.IntegrityError), service.begin() as late:
            insert(late, "topic", 2, transaction_id=in_doubt)
        service.dispose()
        storage = open_engine(url)
        with pytest.raises(StorageFailed, match=r"binlog_format is STATEMENT.*SET GLOBAL binlog_format = 'ROW'"):
            schema.upgrade(storage, "main")
        storage.dispose()


def test_sessions_have_settings_of_their_own(url: str, binlog_server: BinlogServer) -> None:
    """A server's storage, and a mover, which waits for its target within a transaction."""
    settings = odd_for(binlog_server)
    names = [name for name in settings if name != "max_join_size"] + ["sql_big_selects"]
    query = "SELECT " + ", ".join(f"@@SESSION.{name}" for name in names)
    own = dict.fromkeys(names, 0) | {"sql_select_limit": ALL_ROWS, "completion_type": "NO_CHAIN"}
    own |= {"sql_big_selects": 1}
    of_a_server = 60 if isinstance(binlog_server, MySqlServer) else settings["wait_timeout"]
    bridge = Bridge([url], "http://127.0.0.1:9")
    with odd_settings(binlog_server, settings):
        for engine, further in (
            (open_engine(url), {"wait_timeout": of_a_server, "idle_transaction_timeout": 15}),
            (visitor_engine(url), {"wait_timeout": 28_800}),
            (bridge._engine, {"wait_timeout": 28_800}),
        ):
            with engine.connect() as connection:
                found = dict(zip(names, connection.exec_driver_sql(query).one(), strict=True))
            engine.dispose()
            assert found == {name: (own | further)[name] for name in names}


def test_what_was_left_behind_is_read_whole_in_a_services_own_session(
    url: str, engine: sa.Engine, binlog_server: BinlogServer, unique: str
) -> None:
    names = write(engine, unique, transactions=3, messages=4, mode="auto", relayed=LEFT_BEHIND)
    with odd_settings(binlog_server, CUTS_SHORT):
        engine.dispose()
        with engine.connect() as connection:
            assert len(connection.scalars(sa.select(half_message.c.message_no)).all()) == 2
            page = left_rows.read(connection, names)
    assert [len(transaction.messages) for transaction, _ in page.transactions] == [4, 4, 4]


def test_tables_are_of_innodb_where_the_server_has_another_default(url: str, binlog_server: BinlogServer) -> None:
    """Also with an address that says mariadb://, whose options of tables SQLAlchemy names otherwise."""
    parsed = sa.make_url(url)
    if not isinstance(binlog_server, MySqlServer):
        parsed = parsed.set(drivername="mariadb+pymysql")
    binlog_server.execute("SET GLOBAL default_storage_engine = MyISAM")
    try:
        engine = sa.create_engine(parsed)
        create_tables(engine)
        schema.upgrade(engine, "main")
        with engine.connect() as connection:
            engines = connection.exec_driver_sql(
                "SELECT DISTINCT engine FROM information_schema.tables WHERE table_schema = DATABASE()"
            ).all()
        engine.dispose()
    finally:
        binlog_server.execute("SET GLOBAL default_storage_engine = DEFAULT")
    assert engines == [("InnoDB",)]


@pytest.mark.long
def test_sessions_are_new_after_the_connection_was_lost(
    url: str, engine: sa.Engine, binlog_server: BinlogServer, server: ServerProcess
) -> None:
    """The address may lead to a new primary, while the old one, which is a replica now, keeps the sessions that it has
    (zendesk/maxwell#1892): a bridge that keeps them, too, would take the source for a replica for ever."""
    listed = "SELECT id, command FROM information_schema.processlist WHERE user = 'shop' AND db = DATABASE()"

    def sessions() -> dict[int, str]:
        with engine.connect() as connection:
            own = connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar()
            return {id_: command for id_, command in connection.exec_driver_sql(listed) if id_ != own}

    def dumping() -> list[int]:
        listed = binlog_server.execute("SELECT id, command FROM information_schema.processlist")
        reading = [int(str(id_)) for id_, command in listed if str(command).startswith("Binlog Dump")]
        return [id_ for id_ in reading if id_ not in others]

    others: list[int] = []  # a server keeps the reader of a bridge that has ended until it writes to it
    others = dumping()
    bridge = Bridge([url], server.url)
    with in_background(bridge.run()) as bridging:
        bridging.until(dumping, "the bridge to read")
        before = sessions()
        binlog_server.execute(f"KILL {dumping()[0]}")
        bridging.until(lambda: bridge.totals.connections == 2, "the bridge to read again")
        bridging.until(sessions, "the bridge to have a session")
        assert not before.keys() & sessions().keys()
