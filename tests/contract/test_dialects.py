"""Dialects: where the databases differ, each of them does what the product relies on.

What no difference between databases can change is tested on some of them only (tests/support/databases.py); what one
can change belongs here, and runs on all. Lists of statements, variables and error codes say what each server answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import re
import socket
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.check import CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome
from notify.check.question import ask, read_source
from notify.client import Inbox, Message, TransactionProducer, create_tables
from notify.client.inbox.rows import claim
from notify.client.tables.creation import drop_tables, new_source
from notify.client.tables.definitions import (
    LEFT_BEHIND_INDEX,
    LEFT_KEY_INDEX,
    PARTIAL,
    columns_of,
    half_message,
    has_replay,
    metadata,
    notify_inbox,
    notify_source,
)
from notify.client.tables.purge import purge_by_force
from notify.errors import BindingRefused, InvalidRequest, TooLarge
from notify.movers import refused
from notify.movers.refused import Refusal
from notify.movers.relay.leases import leases_of, lock_name
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.message import ReceivedMessage
from notify.protocol.wire import Payload, encode_msgpack
from notify.runtime.clock import wall_clock
from notify.runtime.databases import (
    database_now,
    has_table,
    has_undone,
    is_doubled,
    is_gone,
    is_savepoint_gone,
    is_table_missing,
)
from notify.spark.digest.tables import TableDigest
from notify.spark.inputs.databases import Database
from notify.spark.inputs.table_parts import TableParts
from notify.storage.records import NewMessage, NewTransaction, PartlyStored, Put, State
from notify.storage.sql.database import dialect_of
from notify.storage.sql.dialect import Again, Duplicate, Gone
from notify.storage.sql.engines import opened, visitor_engine
from notify.storage.sql.schema import upgrade
from notify.storage.sql.store import SqlStore
from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_server import MySqlServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import DATABASES, empty_database, have_md5, own_mariadb, own_mysql
from tests.support.servers import make_storage
from tests.support.shop import Base, Order, Shop, items, make_engine
from tests.support.sql_storage import use
from tests.support.transactions import new_id, when_free

if TYPE_CHECKING:
    from notify.testing import InMemoryServer

PROCESSES = 4
MYSQLS = ("mysql", "mariadb")
LONGEST_NAME = "n" * 127
"""The longest name of a topic or group."""


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=MYSQLS)
def mysql(request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database on MySQL and on MariaDB."""
    with empty_database(request.param, database_urls, tmp_path) as url:
        yield url


# --- tables -------------------------------------------------------------------------------------------------------


def in_processes(url: str, work: Callable[[sa.Engine], object]) -> list[object]:
    """The results of PROCESSES processes that do the same at once; an error is given as its text."""
    context = multiprocessing.get_context("fork")
    gate, answers = context.Barrier(PROCESSES), context.SimpleQueue()

    def run() -> None:
        engine = make_engine(url)
        gate.wait(PATIENCE_SECONDS)
        try:
            answers.put(work(engine))
        except BaseException as error:
            answers.put(f"{type(error).__name__}: {error}")

    processes = [context.Process(target=run) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    results = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return results


@pytest.fixture
def empty_engine(engine_url: str) -> Iterator[sa.Engine]:
    """The engine of an empty database; it has no connection before its first use."""
    engine = make_engine(engine_url)
    yield engine
    engine.dispose()


def test_processes_make_the_tables_at_once(engine_url: str, empty_engine: sa.Engine) -> None:
    sources = in_processes(engine_url, create_tables)
    assert len(set(sources)) == 1 and isinstance(uuid.UUID(str(sources[0])), uuid.UUID)
    with empty_engine.connect() as connection:
        assert all(has_table(connection, name) for name in metadata.tables)
        assert not has_table(connection, "nowhere")
        indexes = {index["name"] for index in sa.inspect(connection).get_indexes("half_message")}
        partial = {LEFT_BEHIND_INDEX, LEFT_KEY_INDEX} if connection.dialect.name in PARTIAL else set()
        assert indexes == {"half_message_waiting"} | partial


def test_processes_upgrade_old_tables_at_once(engine_url: str, empty_engine: sa.Engine) -> None:
    create_tables(empty_engine)
    with empty_engine.begin() as connection:
        drop_tables(connection)
    with empty_engine.begin() as connection:
        old_tables().create_all(connection)
    empty_engine.dispose()
    sources = in_processes(engine_url, create_tables)
    assert len(set(sources)) == 1 and isinstance(uuid.UUID(str(sources[0])), uuid.UUID)
    with empty_engine.connect() as connection:
        assert "digest" in columns_of(connection, half_message) and has_replay(connection)
        key = sa.inspect(connection).get_pk_constraint("notify_inbox")["constrained_columns"]
        assert key == ["consumer_group", "message_id", "replay"]


def old_tables() -> sa.MetaData:
    """The tables without the columns that versions have added."""
    old = sa.MetaData()
    for table in metadata.sorted_tables:
        if table.name != "notify_refused":
            new = {"digest", "replay", "rows_from", "inbox_from"}
            columns = [column for column in table.columns if column.name not in new]
            kept = [sa.Column(c.name, c.type, primary_key=c.primary_key, nullable=c.nullable) for c in columns]
            sa.Table(table.name, old, *kept)
    return old


def test_relays_make_their_list_at_once(engine_url: str) -> None:
    assert in_processes(engine_url, refused.ensure) == [True] * PROCESSES


def test_servers_make_their_tables_at_once(engine_url: str) -> None:
    def make(engine: sa.Engine) -> str:
        with opened(engine.url.render_as_string(hide_password=False)) as storage:
            upgrade(storage, "main")
        return "made"

    assert in_processes(engine_url, make) == ["made"] * PROCESSES


def test_a_server_waits_for_sqlite_while_another_makes_its_tables(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "server.db", isolation_level=None, check_same_thread=False)
    with closing(other), opened(f"sqlite:///{tmp_path}/server.db") as storage:
        other.execute("BEGIN IMMEDIATE")
        sa.event.listen(storage, "checkin", lambda *_: other.rollback(), once=True)  # the first attempt has failed
        upgrade(storage, "main")
        assert sa.inspect(storage).has_table("server_shard")


def test_a_schema_that_is_gone_has_no_tables(engine: sa.Engine) -> None:
    """A sweep ended in an error of the database where a tenant was dropped meanwhile: MySQL has an own code for it."""
    with engine.connect() as connection, pytest.raises(sa.exc.DBAPIError) as raised:
        connection.exec_driver_sql("SELECT 1 FROM nowhere.half_message")
    assert is_table_missing(raised.value.orig)


def test_a_table_is_looked_for_while_another_session_makes_it(engine: sa.Engine, database: str) -> None:
    """MySQL describes no table that another session changes, once a transaction holds locks of its own."""
    if database == "sqlite":
        pytest.skip("a writer of SQLite waits until the reader has ended")
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            with engine.begin() as connection:
                connection.exec_driver_sql("CREATE TABLE busy (id INT PRIMARY KEY)")
            with engine.begin() as connection:
                connection.exec_driver_sql("DROP TABLE busy")

    with ThreadPoolExecutor(1) as threads:
        changing = threads.submit(change)
        try:
            seen = set()
            for _ in range(40):
                with engine.connect() as connection:
                    connection.execute(sa.select(half_message.c.state))
                    seen.add(has_table(connection, "busy"))
                    assert has_table(connection, "half_message")
        finally:
            stop.set()
        changing.result()
    assert seen <= {True, False}


# --- checks, inbox, purge -----------------------------------------------------------------------------------------


@pytest.fixture
def engine(engine_url: str) -> Iterator[sa.Engine]:
    engine = make_engine(engine_url)
    create_tables(engine)
    yield engine
    engine.dispose()


ROW = {
    "message_no": 0, "producer_group": LONGEST_NAME, "mode": "outbox", "state": "COMMITTED", "shards": "main",
    "topic": LONGEST_NAME, "relayed": 0, "key": "k" * 1024, "tag": LONGEST_NAME, "body": b"\0\xff",
}  # fmt: skip
INSERT = half_message.insert().values(created_at=database_now())


def insert(connection: sa.Connection, **values: Any) -> str:
    """The id of a new row, which has the longest names."""
    row = ROW | {"transaction_id": new_id()} | values
    connection.execute(INSERT, row)
    return str(row["transaction_id"])


def half_of(engine: sa.Engine, transaction_id: str = "") -> HalfMessage:
    with engine.connect() as connection:
        source = read_source(connection)[0]
    return HalfMessage(transaction_id or new_id(), LONGEST_NAME, "main", source, 1, ())


def test_a_check_answers_by_the_row_and_not_while_it_is_locked(engine: sa.Engine) -> None:
    """A committed row, none, one that is locked, a table that is locked, and rows that were purged by force."""
    check = LocalTransactionCheck(engine).check
    with engine.begin() as connection:
        there = insert(connection)
    assert check(half_of(engine, there)) is Outcome.COMMIT
    assert when_free(lambda: check(half_of(engine))) is Outcome.ROLLBACK
    locked = half_of(engine)
    with engine.connect() as connection:
        insert(connection, transaction_id=locked.id)
        with pytest.raises(CheckUnavailable):
            check(locked)
        connection.commit()
    assert check(locked) is Outcome.COMMIT
    absent = half_of(engine)
    with engine.connect() as connection, lock_table(connection, "half_message"), pytest.raises(CheckUnavailable):
        check(absent)
    purge_by_force(engine, older_than=0)
    assert when_free(lambda: check(half_of(engine))) is Outcome.ROLLBACK


@contextlib.contextmanager
def lock_table(connection: sa.Connection, name: str) -> Iterator[None]:
    """Keep all others from a table."""
    statement = {"sqlite": "BEGIN IMMEDIATE", "postgresql": f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE"}.get(
        connection.dialect.name, f"LOCK TABLES {name} WRITE"
    )
    if connection.dialect.name == "sqlite":
        connection.begin()
    else:
        connection.exec_driver_sql(statement)
    yield
    connection.rollback()
    if connection.dialect.name in MYSQLS:
        connection.exec_driver_sql("UNLOCK TABLES")


_READS_ONLY = "SET SESSION TRANSACTION READ ONLY"
_CHAINS = "SET SESSION completion_type = CHAIN"
SESSIONS = {
    "whose transactions only read": {
        "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "mysql": _READS_ONLY,
        "mariadb": _READS_ONLY,
    },
    "that begins the next transaction at once": {"mysql": _CHAINS, "mariadb": _CHAINS},
}
"""Settings that services may make in their sessions, by the kind of database."""


@pytest.mark.parametrize("setting", SESSIONS.values(), ids=SESSIONS)
def test_a_check_is_answered_in_a_session(database: str, engine: sa.Engine, setting: Mapping[str, str]) -> None:
    """No half of such a service was ever decided by a check."""
    if database not in setting:
        pytest.skip("it has no such setting")
    engine.dispose()

    @sa.event.listens_for(engine, "connect")
    def set_up(driver: Any, _: object) -> None:
        driver.cursor().execute(setting[database])
        driver.commit()

    assert when_free(lambda: LocalTransactionCheck(engine).check(half_of(engine))) is Outcome.ROLLBACK


def test_all_schemas_are_seen_where_answers_are_cut_short(database: str, engine: sa.Engine) -> None:
    """With sql_select_limit a check knew the first schema of the server only, and the halves of the others stayed
    undecided; and a table without its key was used."""
    if database not in MYSQLS:
        pytest.skip("it has no such setting")
    engine.dispose()

    @sa.event.listens_for(engine, "connect")
    def set_up(driver: Any, _: object) -> None:
        driver.cursor().execute("SET SESSION sql_select_limit = 1")

    other = f"{engine.url.database}_other"
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {other}")
    try:
        create_tables(engine, schema=other)
        check = LocalTransactionCheck(engine).check
        for schema in (None, other):
            with engine.connect() as connection:
                source = read_source(connection, schema)[0]
            half = HalfMessage(new_id(), "g", "main", source, 1, ())
            assert when_free(partial(check, half)) is Outcome.ROLLBACK
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {other}.notify_inbox DROP PRIMARY KEY")
            connection.exec_driver_sql(f"INSERT INTO {other}.notify_source (id, purged_before) VALUES ('another', 0)")
        with pytest.raises(InvalidRequest, match="no key over"):
            Inbox(engine, schema=other).check()
        with pytest.raises(InvalidRequest, match="notify_source has 2 rows"):
            create_tables(engine, schema=other)
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {other}")


def test_a_schema_with_two_source_ids_is_named(engine: sa.Engine, memory: InMemoryServer, unique: str) -> None:
    """A dump that was restored into it brought its own."""
    said = "notify_source has 2 rows .*delete all rows but"
    with engine.begin() as connection:
        connection.execute(notify_source.insert().values(id=str(uuid.uuid4()), purged_before=0))
        with pytest.raises(CheckUnavailable, match=said):
            read_source(connection)
    with pytest.raises(InvalidRequest, match=said):
        create_tables(engine)
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        with pytest.raises(BindingRefused, match=said), Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "x"))


def test_an_effect_takes_place_once(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)
    message = ReceivedMessage(f"{new_id()}.9999", "t", 0, 0, b"x", None, None, {}, 1, "", 999_999_999)
    inbox = Inbox(engine)
    inbox.check()

    def handle(given: ReceivedMessage, session: Session) -> None:
        session.execute(sa.text("INSERT INTO orders (id, item) VALUES (7, 'x')"))

    assert inbox.run(LONGEST_NAME, message, handle)
    assert not inbox.run(LONGEST_NAME, message, handle)
    with engine.begin() as connection:
        assert claim(connection, LONGEST_NAME.upper(), message)  # another group: names are compared byte by byte
    assert items(engine) == ["x"]
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(notify_inbox)) == 2


def test_records_of_other_programs_have_an_effect_each(engine: sa.Engine) -> None:
    """Their ids are places in Kafka: longer than a column, or different in the case of a topic only."""
    inbox = Inbox(engine)
    topic = "server.inventory.public." + "x" * 40
    for place in (f"{topic}/0@1", f"{topic}/0@2", "Orders/0@5", "orders/0@5", "ordérs/0@5"):
        message = ReceivedMessage(place, "t", 0, 0, b"x", None, None, {}, 1, "")
        assert [inbox.run("g", message, lambda given, session: None) for _ in range(2)] == [True, False]
        assert inbox.run_batch("g", [message], lambda given, session: None) == 0


def test_a_purge_deletes_what_is_old(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        insert(connection, relayed=1)
        waiting = insert(connection)
    assert purge_by_force(engine, older_than=0).rows == 1
    with engine.connect() as connection:
        assert connection.scalars(sa.select(half_message.c.transaction_id)).all() == [waiting]
        assert read_source(connection)[1] > 0


def test_a_refusal_has_the_longest_names(engine: sa.Engine) -> None:
    refusal = Refusal(new_id(), "g" * 500, "té" * 500, 1, 422, "c" * 500, "d" * 5000)
    with engine.begin() as connection:
        refused.note(connection, "m" * 500, [refusal])
        refused.note(connection, "m" * 500, [refusal])
    with engine.connect() as connection:
        (row,) = refused.listed(connection)
    assert (row["transaction_id"], row["tries"], len(row["mover"])) == (refusal.id, 2, 255)


# --- leases -------------------------------------------------------------------------------------------------------


@pytest.fixture
def longest(database: str, database_urls: Mapping[str, str]) -> Iterator[Callable[[str], sa.Engine]]:
    """A function that makes a database with the longest name, and one of the same letters in the other case."""
    if database == "sqlite":
        pytest.skip("a file's name is the user's")
    with contextlib.ExitStack() as stack:

        def make(name: str) -> sa.Engine:
            url = sa.make_url(database_urls[database])
            admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
            quoted = admin.dialect.identifier_preparer.quote_identifier(name)
            with admin.connect() as connection:
                connection.exec_driver_sql(f"CREATE DATABASE {quoted}")

            def drop() -> None:
                with admin.connect() as connection:
                    connection.exec_driver_sql(f"DROP DATABASE {quoted}")

            stack.callback(drop)
            engine = make_engine(url.set(database=name).render_as_string(hide_password=False))
            stack.callback(engine.dispose)
            create_tables(engine)
            return engine

        yield make


def schema_in(engine: sa.Engine) -> str:
    """The schema with the tables of a database that has no others."""
    return "public" if engine.dialect.name == "postgresql" else str(engine.url.database)


def test_a_relay_works_whatever_its_database_is_called(
    longest: Callable[[str], sa.Engine], database: str, memory: InMemoryServer, unique: str
) -> None:
    """Locks have at most 64 characters on MySQL, and are the same in capital letters."""
    most = 63 if database == "postgresql" else 64
    engines = [longest(name) for name in ((unique * 9)[:most], (unique * 9)[:most].upper(), f"é {unique}")]
    for engine in engines:
        with engine.begin() as connection:
            insert(connection, topic=unique, producer_group=unique, key=None, tag=None)
        held = [leases_of(each) for each in (engine, engine)]
        try:
            schema = schema_in(engine)
            assert [lease.renew(schema) for lease in held] == [True, False]
            held[0].close()
            eventually(
                partial(held[1].renew, schema), "the database to notice that the first relay's session has ended"
            )
        finally:
            for lease in held:
                lease.close()
    first, second, _ = (leases_of(engine) for engine in engines)
    for lease, engine in zip((first, second), engines, strict=False):  # their databases' names differ in case only
        eventually(
            partial(lease.renew, schema_in(engine)), "the database to notice that the last relay's session has ended"
        )
    for lease in (first, second):
        lease.close()
    for engine in engines:
        assert asyncio.run(Relay(engine, memory.url).run(once=True)).sent == 1
    assert [message.body for message in memory.messages(unique)] == [b"\0\xff"] * 3


def test_a_lock_is_named_after_its_database() -> None:
    """Relays of older versions use the name of the first kind."""
    assert lock_name("shop") == "notify-relay-shop"
    others = [lock_name(name) for name in ("d" * 52, "d" * 64, "Shop", "SHOP", "é", "e")]
    assert len(set(others)) == 6 and max(map(len, others)) <= 64


# --- the audit's estimates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("explained", ["", "TRADITIONAL", "JSON", "TREE"])
def test_the_audit_estimates_rows(engine: sa.Engine, database: str, explained: str) -> None:
    """Whatever the format is in which MySQL explains statements that name none: since version 9 it is a tree."""
    if explained and database != "mysql":
        pytest.skip("only MySQL has a default format")
    with engine.begin() as connection:
        low = insert(connection)
        high = [insert(connection) for _ in range(200)][-1]
    if database == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("ANALYZE half_message")

    @contextlib.contextmanager
    def reading() -> Iterator[sa.Connection]:
        with engine.connect() as connection:
            if explained:
                connection.exec_driver_sql(f"SET SESSION explain_format = '{explained}'")
            yield connection

    kind = "mysql" if database in MYSQLS else database
    parts = TableParts(kind, reading)
    with reading() as connection:
        estimate = parts._estimated(connection, "half_message", f"transaction_id BETWEEN '{low}' AND '{high}'")
        nothing = parts._estimated(connection, "half_message", f"transaction_id < '{low}' AND message_no = 77")
    assert 50 <= estimate <= 800 and 0 <= nothing <= 20
    assert parts.by_id(half_message.c.transaction_id, None) == ["", ""]


# --- errors -------------------------------------------------------------------------------------------------------


class Sessions:
    """Two sessions of PyMySQL on one database with a table `t` of two rows, one of them with rights over the other."""

    def __init__(self, url: str) -> None:
        self.url = sa.make_url(url)
        self.one, self.other = self.connect(), self.connect()
        for statement in (
            "CREATE TABLE t (id INT PRIMARY KEY, n INT) ENGINE = InnoDB",
            "INSERT INTO t VALUES (1, 0), (2, 0)",
        ):
            self.run(self.other, statement)
        self.other.commit()

    def connect(self, **options: Any) -> pymysql.Connection[Any]:
        url = self.url
        at = {"host": url.host, "port": url.port, "user": url.username, "password": url.password or ""}
        return pymysql.connect(**(at | {"database": url.database} | options))

    @staticmethod
    def run(session: pymysql.Connection[Any], *statements: str) -> tuple[Any, ...]:
        """The rows of the last statement."""
        with session.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return tuple(cursor.fetchall())

    def close(self) -> None:
        for session in (self.one, self.other):
            with contextlib.suppress(pymysql.Error):
                session.close()


def duplicate(s: Sessions) -> None:
    s.run(s.one, "INSERT INTO t VALUES (1, 1)")


def locked_row(s: Sessions) -> None:
    s.run(s.other, "UPDATE t SET n = 1 WHERE id = 1")
    s.run(s.one, "SET SESSION innodb_lock_wait_timeout = 1", "UPDATE t SET n = 2 WHERE id = 1")


def locked_row_at_once(s: Sessions) -> None:
    s.run(s.other, "UPDATE t SET n = 1 WHERE id = 1")
    s.run(s.one, "SELECT n FROM t WHERE id = 1 FOR UPDATE NOWAIT")


def locked_table(s: Sessions) -> None:
    s.run(s.other, "LOCK TABLES t WRITE")
    s.run(s.one, "SET SESSION lock_wait_timeout = 1", "UPDATE t SET n = 2 WHERE id = 1")


def deadlock(s: Sessions) -> None:
    s.run(s.one, "UPDATE t SET n = 1 WHERE id = 1")
    s.run(s.other, "UPDATE t SET n = 2 WHERE id = 2", "SET SESSION innodb_lock_wait_timeout = 60")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(s.run, s.other, "UPDATE t SET n = 3 WHERE id = 1")
        try:
            s.run(s.one, "UPDATE t SET n = 4 WHERE id = 2")
        except pymysql.Error:
            waiting.result()
            raise
        s.one.rollback()
        waiting.result()  # the other session was chosen


def changed_since(s: Sessions) -> None:
    s.run(s.one, "SET SESSION innodb_snapshot_isolation = ON")
    s.run(s.one, "START TRANSACTION WITH CONSISTENT SNAPSHOT", "SELECT n FROM t")
    s.run(s.other, "UPDATE t SET n = 9 WHERE id = 1")
    s.other.commit()
    s.run(s.one, "UPDATE t SET n = n + 1 WHERE id = 1")


def new_table(s: Sessions) -> None:
    s.run(s.one, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
    s.run(s.other, "ALTER TABLE t ADD COLUMN more INT, ALGORITHM = COPY")
    s.run(s.one, "SELECT n FROM t")


def killed_session(s: Sessions) -> None:
    s.run(s.other, f"KILL CONNECTION {s.one.thread_id()}")
    s.run(s.one, "SELECT 1")


def killed_statement(s: Sessions) -> None:
    """The statement waits for a lock when it is killed."""
    s.run(s.other, "UPDATE t SET n = 1 WHERE id = 1")
    with ThreadPoolExecutor(1) as threads, contextlib.closing(s.connect()) as third:
        waiting = threads.submit(s.run, s.one, "UPDATE t SET n = 2 WHERE id = 1")
        states = f"SELECT 1 FROM information_schema.processlist WHERE id = {s.one.thread_id()} AND info LIKE 'UPDATE%'"
        eventually(lambda: bool(s.run(third, states)), "the statement to wait")
        s.run(third, f"KILL QUERY {s.one.thread_id()}")
        waiting.result()


def silent_session(s: Sessions) -> None:
    s.run(s.one, "SET SESSION wait_timeout = 1")
    states = f"SELECT 1 FROM information_schema.processlist WHERE id = {s.one.thread_id()}"
    eventually(lambda: not s.run(s.other, states), "the database to end the session")
    s.run(s.one, "SELECT 1")


def silent_transaction(s: Sessions) -> None:
    s.run(s.one, "SET SESSION idle_transaction_timeout = 1", "UPDATE t SET n = 1 WHERE id = 1")
    states = f"SELECT 1 FROM information_schema.processlist WHERE id = {s.one.thread_id()}"
    eventually(lambda: not s.run(s.other, states), "the database to end the session")
    s.run(s.one, "SELECT 1")


def slow_read(s: Sessions) -> None:
    s.run(s.one, "SET SESSION max_execution_time = 1", "SELECT SLEEP(0.001) FROM t a, t b, t c, t d, t e, t f, t g")


def slow_statement(s: Sessions) -> None:
    s.run(s.one, "SET SESSION max_statement_time = 0.001")
    s.run(s.one, "UPDATE t a, t b, t c, t d, t e, t f SET a.n = SLEEP(0.01) WHERE a.id > 0")


def read_only_transaction(s: Sessions) -> None:
    s.run(s.one, "START TRANSACTION READ ONLY", "UPDATE t SET n = 1")


def lost_savepoint(s: Sessions) -> None:
    s.run(s.one, "SAVEPOINT a", "ALTER TABLE t ADD COLUMN more INT", "RELEASE SAVEPOINT a")


def too_many_sessions(s: Sessions) -> None:
    name = f"u{uuid.uuid4().hex[:12]}"
    s.run(s.other, f"CREATE USER {name}@'%' IDENTIFIED BY 'x' WITH MAX_USER_CONNECTIONS 1")
    try:
        with contextlib.closing(s.connect(user=name, password="x", database=None)):
            s.connect(user=name, password="x", database=None)
    finally:
        s.run(s.other, f"DROP USER {name}@'%'")


def no_server(s: Sessions) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as bound:
        port = bound.getsockname()[1]
    s.connect(port=port)


def no_host(s: Sessions) -> None:
    s.connect(host="nowhere.invalid")


ERRORS: Mapping[Callable[[Sessions], None], tuple[set[int], set[int], str]] = {
    duplicate: ({1062}, {1062}, "doubled"),
    locked_row: ({1205}, {1205}, "again"),
    locked_row_at_once: ({3572}, {1205}, "again"),
    locked_table: ({1205}, {1205}, "again"),
    deadlock: ({1213}, {1213}, "again, undone"),
    changed_since: (set(), {1020}, "again, undone"),
    new_table: ({1412}, {1412}, "again"),
    killed_session: ({2006, 2013, 3169}, {1927, 2006, 2013}, "gone"),
    killed_statement: ({1317}, {1317}, "again"),
    silent_session: ({2013, 4031}, {1927, 2006, 2013}, "gone"),
    silent_transaction: (set(), {1927, 2006, 2013}, "gone"),
    slow_read: ({3024}, set(), "again"),
    slow_statement: (set(), {1969}, "again"),
    read_only_transaction: ({1792}, {1792}, "gone"),
    lost_savepoint: ({1305}, {1305}, "no savepoint"),
    too_many_sessions: ({1226}, {1226}, "gone"),
    no_server: ({2003}, {2003}, "gone"),
    no_host: ({2003}, {2003}, "gone"),
}
"""Errors by what goes wrong: the codes of MySQL and of MariaDB (none for what a server does not have), and what they
mean."""


@pytest.mark.parametrize("wrong", ERRORS, ids=lambda function: function.__name__)
def test_an_error_has_its_meaning(wrong: Callable[[Sessions], None], mysql: str) -> None:
    sessions = Sessions(mysql)
    is_mariadb = "MariaDB" in str(sessions.run(sessions.other, "SELECT VERSION()"))
    of_mysql, of_mariadb, meaning = ERRORS[wrong]
    expected = of_mariadb if is_mariadb else of_mysql
    engine = sa.create_engine(mysql)
    try:
        if not expected:
            pytest.skip("this server does not have it")
        with pytest.raises(pymysql.Error) as raised:
            wrong(sessions)
        error = raised.value
        assert error.args[0] in expected, error
        seen = dialect_of(engine).error(error)
        assert is_gone(error) == isinstance(seen, Gone) == (meaning == "gone"), error
        assert isinstance(seen, Again) == meaning.startswith("again"), error
        assert is_doubled(error) == isinstance(seen, Duplicate) == (meaning == "doubled")
        assert is_savepoint_gone(error) == (meaning == "no savepoint")
        assert has_undone("mysql", sessions.one, error) == ("undone" in meaning)
    finally:
        sessions.close()
        engine.dispose()


@pytest.fixture
def became_read_only(hostile: BinlogServer) -> Iterator[tuple[str, Callable[[], None]]]:
    """A user's URL, and what makes its server refuse to write, as a primary that became a standby does."""
    is_mysql = isinstance(hostile, MySqlServer)
    name = f"u{uuid.uuid4().hex[:12]}"
    url = sa.make_url(hostile.url).set(username=name, password="x").render_as_string(hide_password=False)
    hostile.execute(f"CREATE USER {name}@'%%' IDENTIFIED BY 'x'", f"GRANT ALL ON shop.* TO {name}@'%%'")
    yield url, lambda: hostile.execute(f"SET GLOBAL {'super_read_only' if is_mysql else 'read_only'} = ON")
    hostile.execute("SET GLOBAL read_only = OFF")


def test_a_database_that_became_read_only_is_gone(
    hostile: BinlogServer, became_read_only: tuple[str, Callable[[], None]]
) -> None:
    """A primary that became a standby: its sessions stay open, and refuse writes. PyMySQL's error has the SQLSTATE
    HY000, like most errors of MySQL."""
    url, become = became_read_only
    hostile.execute("DROP TABLE IF EXISTS t")
    sessions = Sessions(url)
    become()
    with pytest.raises(pymysql.Error) as raised:
        sessions.run(sessions.one, "UPDATE t SET n = 1")
    sessions.close()
    assert raised.value.args[0] == 1290 and is_gone(raised.value)


def test_a_check_does_not_come_back_to_a_database_that_became_read_only(
    became_read_only: tuple[str, Callable[[], None]],
) -> None:
    """Its session stayed in the pool, and no check was answered until the service was restarted
    (riverqueue/river#1225)."""
    url, become = became_read_only
    engine = sa.create_engine(url, pool_size=1, max_overflow=0)

    def session() -> Any:
        with engine.connect() as connection:
            return connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar()

    first = session()
    become()
    with engine.connect() as connection, pytest.raises(CheckUnavailable, match="read-only"):
        ask(connection, str(ids.to_text(ids.new_id())), "g")
    assert session() != first
    engine.dispose()


# --- statements and variables -------------------------------------------------------------------------------------

BOTH, MYSQL, MARIADB = {"mysql", "mariadb"}, {"mysql"}, {"mariadb"}
VARIABLES = {
    "autocommit": BOTH,
    "gtid_binlog_pos": MARIADB,
    "gtid_binlog_state": MARIADB,
    "gtid_executed": MYSQL,
    "gtid_purged": MYSQL,
    "gtid_slave_pos": MARIADB,
    "hostname": BOTH,
    "idle_transaction_timeout": MARIADB,
    "innodb_flush_log_at_trx_commit": BOTH,
    "innodb_lock_wait_timeout": BOTH,
    "innodb_rollback_on_timeout": BOTH,
    "lock_wait_timeout": BOTH,
    "log_slave_updates": BOTH,
    "lower_case_table_names": BOTH,
    "max_allowed_packet": BOTH,
    "port": BOTH,
    "read_only": BOTH,
    "replica_net_timeout": MYSQL,
    "server_id": BOTH,
    "slave_net_timeout": BOTH,
    "sql_mode": BOTH,
    "sql_safe_updates": BOTH,
    "wait_timeout": BOTH,
}
"""The variables that the product reads or sets, and the servers that have them."""
STATEMENTS = {
    "SHOW BINARY LOGS": (0, 0),
    "SHOW MASTER STATUS": (1064, 0),
    "SHOW BINARY LOG STATUS": (0, 1064),
    "SHOW BINLOG EVENTS IN 'none'": (1220, 1220),
    "SHOW ALL SLAVES STATUS": (1064, 0),
    "SHOW REPLICA STATUS": (0, 0),
    "SHOW SLAVE STATUS": (1064, 0),
    "SHOW REPLICAS": (0, 1064),
    "SHOW SLAVE HOSTS": (1064, 0),
    "SHOW GRANTS": (0, 0),
    "SHOW TABLES LIKE 'x'": (0, 0),
    "SHOW VARIABLES LIKE 'x'": (0, 0),
    "SHOW TABLES FROM `mysql` LIKE 'x'": (0, 0),
    "SHOW TABLES FROM `nowhere` LIKE 'x'": (1049, 1049),
    "SELECT 1 FROM DUAL WHERE EXISTS (SELECT 1) UNION ALL SELECT 2 FROM DUAL WHERE EXISTS (SELECT 1)": (0, 0),
    "SELECT GET_LOCK('x', 0), RELEASE_LOCK('x')": (0, 0),
    "DO 0": (0, 0),
    "SHOW COLUMNS FROM `information_schema`.`TABLES`": (0, 0),
    "SHOW TABLES FROM mysql": (0, 0),
    "SHOW STATUS LIKE 'binlog_snapshot_%'": (0, 0),
    "SHOW GLOBAL STATUS LIKE 'x'": (0, 0),
    "SHOW SESSION STATUS LIKE 'x'": (0, 0),
    "SHOW GLOBAL STATUS WHERE Variable_name IN ('x')": (0, 0),
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('slave_net_timeout', 'replica_net_timeout')": (0, 0),
    "EXPLAIN FORMAT=TRADITIONAL SELECT 1": (0, 0),
    "EXPLAIN INSERT INTO t VALUES (3, 0)": (0, 0),
    "EXPLAIN UPDATE t SET n = 1": (0, 0),
    "EXPLAIN DELETE FROM t": (0, 0),
    "SELECT GET_LOCK(REPEAT('x', 64), 0)": (0, 0),
    "SELECT GET_LOCK(REPEAT('x', 65), 0)": (4163, 0),
    "SET STATEMENT lock_wait_timeout = 1 FOR SELECT 1": (1064, 0),
    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED": (0, 0),
    "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY": (0, 0),
    "SELECT 1 /*M! FROM nowhere */": (0, 1146),
    "SELECT 1 /*!50700 FROM nowhere */": (1146, 0),
}
"""Statements that only these servers know, or that they answer differently: the codes of MySQL and MariaDB, 0 for an
answer. Those that one of them refuses are sent to the other only."""
ROOT = Path(__file__).parents[2]
PRODUCT = [
    path
    for folder in ("notify", "storage", "spark")
    for path in (ROOT / folder).rglob("*.py")
    if not {"testing", "bench", "demo"} & set(path.relative_to(ROOT).parts)
]


def test_every_variable_is_listed() -> None:
    found = set()
    for path in PRODUCT:
        text = path.read_text()
        found |= {name.lower() for name in re.findall(r"@@(?:(?:global|session)\.)?(\w+)", text, re.IGNORECASE)}
        for assigned in re.findall(r"SET SESSION ([a-z_].*?)\"", text, re.DOTALL):
            found |= set(re.findall(r"\b([a-z_]{6,}) =", assigned))
    assert found and found <= VARIABLES.keys()


def test_every_statement_that_shows_something_is_listed() -> None:
    found = set()
    for path in PRODUCT:
        found |= set(re.findall(r"\"((?:SHOW|EXPLAIN)(?: [A-Z]{2,})+)", path.read_text()))
    of_postgresql = {text for text in found if text.startswith("EXPLAIN (")}
    unlisted = {text for text in found - of_postgresql if not any(each.startswith(text) for each in STATEMENTS)}
    assert found and not unlisted


def test_servers_have_the_variables_that_the_list_says(mysql: str) -> None:
    sessions = Sessions(mysql)
    kind = "mariadb" if "MariaDB" in str(sessions.run(sessions.one, "SELECT VERSION()")) else "mysql"
    shown = {str(row[0]) for row in sessions.run(sessions.one, "SHOW VARIABLES")}
    sessions.close()
    assert {name for name in VARIABLES if name in shown} == {name for name in VARIABLES if kind in VARIABLES[name]}


def test_servers_answer_as_the_list_says(mysql: str) -> None:
    sessions = Sessions(mysql)
    is_mariadb = "MariaDB" in str(sessions.run(sessions.one, "SELECT VERSION()"))
    answers = {}
    for statement in STATEMENTS:
        try:
            sessions.run(sessions.one, statement)
            answers[statement] = 0
        except pymysql.Error as error:
            answers[statement] = error.args[0]
        sessions.one.rollback()
    sessions.close()
    assert answers == {statement: codes[is_mariadb] for statement, codes in STATEMENTS.items()}


# --- texts that a session cuts off --------------------------------------------------------------------------------

STRICT = "STRICT_TRANS_TABLES"
CUT_OFF: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "a character that utf8 lacks": ("utf8", "", {"key": "Zoë 😀"}),
    "a header with one": ("utf8", "", {"headers": {"h": "😀"}}),
    "a character that latin1 lacks": ("latin1", "", {"key": "😀"}),
    "a body longer than BLOB": ("utf8mb4", "MODIFY body BLOB", {"body": "b" * 70_000}),
    "a key longer than its column": ("utf8mb4", "MODIFY `key` VARCHAR(16)", {"key": "k" * 17}),
}


@pytest.mark.parametrize(("charset", "ddl", "message"), CUT_OFF.values(), ids=CUT_OFF)
@pytest.mark.parametrize(
    ("schema", "modes"),
    [
        (None, ("", "")),
        (None, (STRICT, "")),
        pytest.param(None, (STRICT, STRICT), marks=pytest.mark.long),
        ("named", ("", "")),
        pytest.param("named", (STRICT, ""), marks=pytest.mark.long),
        pytest.param("named", (STRICT, STRICT), marks=pytest.mark.long),
    ],
)
def test_no_message_is_cut_off(
    mysql: str, memory: InMemoryServer, unique: str, charset: str, ddl: str, message: dict[str, Any],
    schema: str | None, modes: tuple[str, str],
) -> None:  # fmt: skip
    """A server that is not strict stored what it could, with a warning: other keys, and parts of bodies were moved; and
    a session that was strict at its first message may not be any more."""
    mode, later = modes
    url = sa.make_url(mysql).update_query_dict({"charset": charset})
    engine = sa.create_engine(url, connect_args={"init_command": f"SET SESSION sql_mode = '{mode}'"})
    create_tables(engine)
    if ddl:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE half_message {ddl}")
    producer = TransactionProducer(
        memory.url, group=unique, engine=engine, mode="outbox", schema=schema and url.database, answer_checks=False
    )
    with Session(engine) as session, session.begin():
        producer.send(session, Message(unique, "fits"))
    for count in (1, 3, 20):  # one statement, one for several rows, and one more
        with pytest.raises(InvalidRequest, match="nothing is committed"), Session(engine) as session, session.begin():
            session.execute(sa.text(f"SET SESSION sql_mode = '{later}'"))
            for number in range(count):
                producer.send(session, Message(unique, "fits") if number < count - 1 else message_of(unique, message))
    with Session(engine) as session, session.begin():
        producer.send(session, Message(unique, "fits"))
    with engine.connect() as connection:
        assert connection.scalars(sa.select(half_message.c.body)).all() == [b"fits"] * 2
        assert connection.exec_driver_sql("SELECT @@SESSION.sql_mode").scalar() == later
    producer.close()
    engine.dispose()


def message_of(topic: str, values: dict[str, Any]) -> Message:
    return Message(topic, **({"body": "x"} | values))


def test_a_relay_reads_whole_texts_whatever_charset_its_address_has(
    mysql: str, memory: InMemoryServer, unique: str
) -> None:
    """It moved keys with question marks."""
    engine = sa.create_engine(mysql)
    create_tables(engine)
    with engine.begin() as connection:
        insert(connection, topic=unique, producer_group=unique, key="Zoë 😀", tag=None)
    engine.dispose()
    visitor = visitor_engine(sa.make_url(mysql).update_query_dict({"charset": "utf8"}).render_as_string(False))
    assert asyncio.run(Relay(visitor, memory.url).run(once=True)).sent == 1
    visitor.dispose()
    assert [message.key for message in memory.messages(unique)] == ["Zoë 😀"]


# --- a server's own defaults --------------------------------------------------------------------------------------

_HOSTILE = (
    "--sql-mode=ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,ONLY_FULL_GROUP_BY,IGNORE_SPACE,HIGH_NOT_PRECEDENCE,"
    "PAD_CHAR_TO_FULL_LENGTH,NO_UNSIGNED_SUBTRACTION,REAL_AS_FLOAT,STRICT_ALL_TABLES",
    "--default-storage-engine=MyISAM",
    "--explicit-defaults-for-timestamp=OFF",
    "--character-set-server=latin1",
    "--collation-server=latin1_swedish_ci",
    "--default-time-zone=+13:00",
    "--transaction-isolation=SERIALIZABLE",
    "--innodb-autoinc-lock-mode=0",
    "--innodb-rollback-on-timeout=ON",
    "--autocommit=0",
    "--max-allowed-packet=1M",
    "--max-connections=60",
)
HOSTILE = {
    "mysql": (
        *_HOSTILE,
        "--sql-require-primary-key=ON",
        "--sql-generate-invisible-primary-key=ON",
        "--explain-format=JSON",
        "--max-execution-time=30000",
    ),
    "mariadb": (*_HOSTILE, "--lower-case-table-names=1", "--max-statement-time=30"),
}
"""Defaults that a server may have, and that differ from those that it comes with."""


@pytest.fixture(scope="module", params=MYSQLS)
def hostile(request: pytest.FixtureRequest) -> Iterator[BinlogServer]:
    """A server with these defaults."""
    own: Any = {"mysql": own_mysql, "mariadb": own_mariadb}[request.param]
    with own(options=HOSTILE[request.param]) as server:
        yield server


KEY = "Schlüssel 'é' \\ \"7\" || %"


def test_defaults_of_a_database_make_no_difference(hostile: BinlogServer, memory: InMemoryServer, unique: str) -> None:
    hostile.execute(
        "DROP DATABASE IF EXISTS essentials", "CREATE DATABASE essentials", "SET GLOBAL sql_safe_updates = 1"
    )
    url = sa.make_url(hostile.url).set(database="essentials").render_as_string(hide_password=False)
    engine = make_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        source = new_source(connection)
    assert create_tables(engine) == source
    Base.metadata.create_all(engine)

    shop = Shop(engine, memory, unique)
    with shop.sessions.begin() as session:
        session.add(Order(item="a"))
        shop.send(session, "paid", key=KEY)
    with shop.sessions() as session:
        session.add(Order(item="b"))
        shop.send(session, "taken back")
        session.rollback()
    assert [(message.text, message.key) for message in shop.messages()] == [("paid", KEY)]
    assert shop.items() == ["a"]

    assert when_free(lambda: LocalTransactionCheck(engine).check(half_of(engine))) is Outcome.ROLLBACK
    given = ReceivedMessage(f"{new_id()}.0", "t", 0, 0, b"x", None, None, {}, 1, "")
    inbox = Inbox(engine)
    inbox.check()
    assert [inbox.run("g", given, lambda message, session: None) for _ in range(2)] == [True, False]
    assert inbox.run_batch("g", [given, replace(given, id=f"{new_id()}.0")], lambda messages, session: None) == 1

    with engine.begin() as connection:
        outbox = insert(connection, topic=unique, producer_group=unique, key=KEY, tag=None)
        refused.note(connection, "relay", [Refusal(new_id(), "g", "t", 1, 422, "c", KEY)])
    make_storage(url)
    stored = ids.new_id()

    async def scenario(store: SqlStore) -> None:
        payload = encode_msgpack(Payload(topic=unique, body=b"\0'\\", key=KEY))
        half = NewTransaction(stored, unique, [NewMessage(unique, payload)])
        assert [result.put for result in await store.put([half], wall_clock())] == [Put.STORED]
        assert [result.put for result in await store.put([half], wall_clock())] == [Put.ALREADY]
        (decided,) = await store.decide([(stored, unique, State.COMMITTED)], wall_clock())
        assert decided.changed

    use(url, scenario)
    assert asyncio.run(Relay(engine, memory.url).run(once=True)).sent == 2
    moved = {message.key: message.body for message in memory.messages(unique)}
    assert set(moved) == {KEY} and len(memory.messages(unique)) == 3

    have_md5(url)
    with contextlib.closing(Database(url, "shop")) as database:
        digest = TableDigest(database, None)
        with ThreadPoolExecutor(2) as pool:
            for answer in digest.start(pool):
                answer.result()()
        assert sum(slot.committed for slot in digest.slots.local.values()) == 2
        assert sum(slot.count for slot in digest.slots.effects.values()) == 2
        assert database.source_id() == source and unique in database.producer_groups()
        assert {row["key"] for row in database.rows_of([outbox])} == {KEY}
    assert purge_by_force(engine, older_than=0).rows == 3
    engine.dispose()


def test_what_is_larger_than_a_packet_holds_up_nothing_else(
    hostile: BinlogServer, memory: InMemoryServer, unique: str
) -> None:
    """The server ended the connection. What other callers had sent meanwhile was refused with it, as if the database
    did not answer; and commits failed with "MySQL server has gone away", however often they were repeated."""
    hostile.execute("DROP DATABASE IF EXISTS packets", "CREATE DATABASE packets")
    url = sa.make_url(hostile.url).set(database="packets").render_as_string(hide_password=False)
    engine = make_engine(url)
    create_tables(engine)
    with TransactionProducer(memory.url, group=unique, engine=engine, mode="outbox", answer_checks=False) as producer:

        def send(*bodies: bytes) -> None:
            with Session(engine) as session, session.begin():
                for body in bodies:
                    producer.send(session, Message(unique, body))

        for body in (b"\0" * 600_000, b"x" * LIMITS.message_bytes):
            with pytest.raises(TooLarge, match=r"nothing is committed.*max_allowed_packet"):
                send(b"small", body)
        send(*[b"x" * 400_000] * 5, b"small")
    engine.dispose()
    make_storage(url)

    def half(*bodies: bytes) -> NewTransaction:
        payloads = [encode_msgpack(Payload(topic=unique, body=body)) for body in bodies]
        return NewTransaction(ids.new_id(), unique, [NewMessage(unique, payload) for payload in payloads])

    async def scenario(store: SqlStore) -> None:
        small, several = half(b"x"), half(*[b"x" * 400_000] * 5)
        large = half(b"x" * LIMITS.message_bytes)
        with pytest.raises(PartlyStored) as together:
            await store.put([small, large, several], wall_clock())
        first, refused, last = together.value.results
        assert isinstance(refused, TooLarge) and "max_allowed_packet" in str(refused)
        assert [getattr(each, "put", None) for each in (first, last)] == [Put.STORED] * 2

    use(url, scenario)


def test_servers_and_relays_speak_their_own_sql(hostile: BinlogServer, memory: InMemoryServer, unique: str) -> None:
    """To a MariaDB that speaks as Oracle `body` is a reserved word: the server's tables could not be made."""
    ((before,),) = hostile.execute("SELECT @@GLOBAL.sql_mode")
    mode = "ANSI" if isinstance(hostile, MySqlServer) else "ORACLE"
    hostile.execute("DROP DATABASE IF EXISTS spoken", "CREATE DATABASE spoken", f"SET GLOBAL sql_mode = '{mode}'")
    url = sa.make_url(hostile.url).set(database="spoken").render_as_string(hide_password=False)
    try:
        make_storage(url)

        async def scenario(store: SqlStore) -> None:
            payload = encode_msgpack(Payload(topic=unique, body=b"x", key=KEY))
            half = NewTransaction(ids.new_id(), unique, [NewMessage(unique, payload)], committed=True)
            assert [result.put for result in await store.put([half], wall_clock())] == [Put.STORED]

        use(url, scenario)
        visitor = visitor_engine(url)
        assert asyncio.run(Relay(visitor, memory.url).run(once=True)).sent == 1
        visitor.dispose()
    finally:
        hostile.execute(f"SET GLOBAL sql_mode = '{before}'")
    assert [message.key for message in memory.messages(unique)] == [KEY]


def test_a_name_is_told_as_the_server_spells_it(hostile: BinlogServer) -> None:
    """With lower_case_table_names = 1 a database that had just been made was "not here: create it first"."""
    hostile.execute("DROP DATABASE IF EXISTS spelled", "CREATE DATABASE spelled")
    engine = make_engine(hostile.url)
    with pytest.raises(InvalidRequest, match="there is no database 'Spelled' here: the server has 'spelled'"):
        create_tables(engine, schema="Spelled")
    engine.dispose()
