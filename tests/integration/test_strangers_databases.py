"""Databases as strangers have them: the scenes come from public bug reports, and each was silent or stuck.

What a check, an inbox or a producer cannot do there is done in another way, or refused in one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify.check import CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome
from notify.check.question import read_source
from notify.client import (
    AsyncTransactionProducer,
    Inbox,
    Message,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.definitions import half_message, notify_inbox, notify_refused, notify_source
from notify.client.tables.half_rows import TOGETHER
from notify.client.tables.old_rows import instant_before, note_purged
from notify.client.tables.purge import purge_by_force
from notify.errors import BindingRefused, InvalidRequest, NotifyError, TransactionRefused
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.message import ReceivedMessage
from notify.runtime.databases import begins_explicitly, database_now
from notify.storage.sql.engines import visitor_engine
from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.databases import MOST, empty_database
from tests.support.shop import make_engine
from tests.support.transactions import new_id, when_free
from tests.support.wal import row

MYSQLS = ("mysql", "mariadb")


@pytest.fixture
def url(database: str, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a database with Notify's tables."""
    with empty_database(database, database_urls, tmp_path) as url:
        engine = make_engine(url)
        create_tables(engine)
        engine.dispose()
        yield url


def execute(url: str, *statements: str) -> None:
    engine = make_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def half_of(url: str, *, is_committed: bool = False) -> HalfMessage:
    """A half of the database at a URL, whose transaction has committed or never will."""
    engine, transaction_id = make_engine(url), new_id()
    with engine.begin() as connection:
        source = read_source(connection)[0]
        if is_committed:
            row = half_message.insert().values(
                transaction_id=transaction_id, message_no=0, producer_group="g", mode="half", state="COMMITTED",
                shards="main", topic="t", relayed=1, created_at=database_now(),
            )  # fmt: skip
            connection.execute(row)
    engine.dispose()
    return HalfMessage(transaction_id, "g", "main", source, 1, ())


def given() -> ReceivedMessage:
    return ReceivedMessage(f"{new_id()}.0", "t", 0, 0, b"x", None, None, {}, 1, "")


# --- tables with more in them -------------------------------------------------------------------------------------

NO_TOMBSTONE = {
    "sqlite": [
        "CREATE TRIGGER only_commits BEFORE INSERT ON half_message WHEN NEW.state <> 'COMMITTED' "
        "BEGIN SELECT RAISE(ABORT, 'only commits'); END"
    ],
    "postgresql": [
        "ALTER TABLE half_message ADD COLUMN tenant text",
        "UPDATE half_message SET tenant = 't1'",
        "ALTER TABLE half_message ALTER COLUMN tenant SET NOT NULL",
    ],
    "mysql": [
        "CREATE TRIGGER only_commits BEFORE INSERT ON half_message FOR EACH ROW "
        "IF NEW.state <> 'COMMITTED' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'only commits'; END IF"
    ],
}
NO_TOMBSTONE["mariadb"] = NO_TOMBSTONE["mysql"]
"""Additions of a service to its table, with which a check cannot insert its row."""


@pytest.mark.parametrize("database", MOST)
def test_a_committed_row_answers_where_no_tombstone_can_be_placed(database: str, url: str) -> None:
    """The halves of such a service were undecided for ever, even those whose row was there."""
    committed = half_of(url, is_committed=True)
    execute(url, *NO_TOMBSTONE[database])
    engine = make_engine(url)
    check = LocalTransactionCheck(engine).check
    assert when_free(lambda: check(committed)) is Outcome.COMMIT
    with pytest.raises(CheckUnavailable, match="did not answer"):
        check(half_of(url))
    engine.dispose()


ZONED = {
    "postgresql": "ALTER TABLE half_message ALTER {column} TYPE timestamptz USING {column} AT TIME ZONE 'utc'",
    "mysql": "ALTER TABLE half_message MODIFY {column} TIMESTAMP(6) {end}",
}
ZONED["mariadb"] = ZONED["mysql"]


@pytest.mark.parametrize("column", ["created_at", "deliver_at"])
@pytest.mark.parametrize("database", ZONED)
def test_an_outbox_whose_times_have_a_zone_is_refused(
    database: str, url: str, memory: InMemoryServer, unique: str, column: str
) -> None:
    """A linter of migrations recommends timestamptz. With summer time rows overtook each other, delays ended hours too
    early, and on MySQL commits failed for the hour that the clocks leave out."""
    end = "NOT NULL" if column == "created_at" else "NULL"
    execute(url, ZONED[database].format(column=column, end=end))
    engine = make_engine(url)
    modes: tuple[Any, ...] = ("outbox", "auto")
    for mode in modes:
        with TransactionProducer(memory.url, group=unique, engine=engine, mode=mode, answer_checks=False) as producer:
            with pytest.raises(InvalidRequest, match=rf"{column} of the table .* has a time zone"):
                with Session(engine) as session, session.begin():
                    producer.send(session, Message(unique, "x"))
    engine.dispose()


# --- transactions that somebody left open -------------------------------------------------------------------------


def on_asyncpg(url: str) -> Any:
    """An engine of one connection, which each transaction gets again."""
    pytest.importorskip("asyncpg")
    asynchronous = sa.make_url(url).set(drivername="postgresql+asyncpg")
    return create_async_engine(asynchronous, pool_size=1, max_overflow=0)


async def cancelled_after(steps: int, work: Coroutine[Any, Any, Any], again: bool) -> None:
    """Begin a piece of work, and cancel it after so many steps of the event loop, or let it end. `again`: cancel it at
    each further step too, as the cancel scopes of anyio do."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)  # a step
    task.cancel()
    while again and not task.done():
        await asyncio.sleep(0)  # a step
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError, NotifyError, sa.exc.SQLAlchemyError):
        await task


@pytest.fixture(params=[False, True], ids=["once", "again at each step"])
def again(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_claim_that_is_cancelled_at_any_step_leaves_no_transaction_open(url: str, again: bool) -> None:
    """The next message was acknowledged, although nothing of its effect was committed: asyncpg took its transaction for
    a savepoint within the cancelled one."""
    execute(url, "CREATE TABLE effects (id TEXT)")
    engine, plain = on_asyncpg(url), make_engine(url)
    counted = "SELECT (SELECT count(*) FROM effects), (SELECT count(*) FROM notify_inbox)"

    async def handle(message: ReceivedMessage, session: Any) -> None:
        await session.execute(sa.text("INSERT INTO effects VALUES (:id)"), {"id": message.id})

    async def work() -> None:
        inbox = Inbox(engine)
        await inbox.run_async("g", given(), handle)
        for steps in range(1, 24):
            await cancelled_after(steps, inbox.run_async("g", given(), handle), again)
            received = given()
            assert await inbox.run_async("g", received, handle)
            with plain.connect() as connection:
                found = connection.execute(sa.text("SELECT 1 FROM effects WHERE id = :id"), {"id": received.id}).all()
                effects, claims = connection.exec_driver_sql(counted).one()
            assert found and effects == claims, f"cancelled after {steps} steps"
        await engine.dispose()

    asyncio.run(work())
    plain.dispose()


@pytest.mark.parametrize("database", ["postgresql"])
def test_no_message_of_a_transaction_within_one_that_was_left_open(
    url: str, memory: InMemoryServer, unique: str, again: bool
) -> None:
    """A listener of the service's own is cancelled while it begins the transaction, as in
    https://github.com/sqlalchemy/sqlalchemy/issues/13381: the next commit ended a savepoint only, and its message was
    delivered."""
    execute(url, "CREATE TABLE orders_of_tenants (item TEXT)")
    engine, plain = on_asyncpg(url), make_engine(url)

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def set_tenant(connection: sa.Connection, cursor: Any, *given: Any) -> None:
        cursor.execute("SET LOCAL app.tenant = 't1'")

    insert = sa.text("INSERT INTO orders_of_tenants VALUES (:item)")

    async def order(producer: AsyncTransactionProducer, item: str) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(insert, {"item": item})
            await producer.send(session, Message(unique, item))

    def left_open() -> bool:
        with plain.connect() as connection:
            states = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%%'"
            )
            return bool(connection.exec_driver_sql(states).scalar())

    async def work() -> int:
        refused = 0
        async with AsyncTransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
            await order(producer, "first")
            for steps in range(1, 16):
                await cancelled_after(steps, order(producer, f"cancelled {steps}"), again)
                try:
                    await order(producer, f"next {steps}")
                except (TransactionRefused, sa.exc.DBAPIError):
                    refused += 1
                    await order(producer, f"repeated {steps}")
                assert not left_open()
        await engine.dispose()
        return refused

    asyncio.run(work())
    with plain.connect() as connection:
        items = connection.exec_driver_sql("SELECT item FROM orders_of_tenants").scalars().all()
    eventually(lambda: len(memory.messages(unique)) >= len(items), "the messages of what is committed")
    assert sorted(message.text for message in memory.messages(unique)) == sorted(items)
    plain.dispose()


# --- sessions with settings of their own --------------------------------------------------------------------------


@pytest.mark.parametrize("database", MYSQLS)
def test_a_check_is_answered_where_the_binlog_has_statements(url: str) -> None:
    """With binlog_format = STATEMENT a server refuses each write at READ COMMITTED (1665)."""
    statement = "SET SESSION binlog_format = 'STATEMENT'"
    engine = sa.create_engine(url, connect_args={"init_command": statement})
    check = LocalTransactionCheck(engine).check
    committed, absent = half_of(url, is_committed=True), half_of(url)
    assert when_free(lambda: check(committed)) is Outcome.COMMIT
    assert when_free(lambda: check(absent)) is Outcome.ROLLBACK
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT @@SESSION.binlog_format").scalar() == "STATEMENT"
    engine.dispose()


READS_ONLY = {
    "postgresql": {"options": "-c default_transaction_read_only=on"},
    "mysql": {"init_command": "SET SESSION TRANSACTION READ ONLY"},
    "mariadb": {"init_command": "SET SESSION TRANSACTION READ ONLY"},
}


@pytest.mark.parametrize("database", READS_ONLY)
def test_old_rows_are_purged_where_transactions_only_read(database: str, url: str) -> None:
    """A service whose transactions say themselves that they write had no row purged, or sent that was left behind."""
    engine = sa.create_engine(url, connect_args=READS_ONLY[database])

    def note(connection: sa.Connection) -> None:
        note_purged(connection, notify_source.c.rows_from, instant_before(connection, 0.0))

    async def work() -> None:
        calls = DatabaseCalls(engine)
        await calls.call(note, schema="")
        await calls.close()

    asyncio.run(work())
    with engine.connect() as connection:
        assert connection.scalar(sa.select(notify_source.c.rows_from > 0))
    engine.dispose()


AS_BYTES: dict[str, Any] = {"sqlite": "text_factory", "mysql": "use_unicode", "mariadb": "use_unicode"}


def refuse(engine: sa.Engine, url: str, memory: InMemoryServer, topic: str, said: str) -> None:
    """Each part refuses to work with an engine, in one sentence."""
    with TransactionProducer(memory.url, group=topic, engine=engine, answer_checks=False) as producer:
        with pytest.raises(InvalidRequest, match=said), Session(engine) as session, session.begin():
            producer.send(session, Message(topic, "x"))
    with pytest.raises(InvalidRequest, match=said):
        Inbox(engine).check()
    with pytest.raises(CheckUnavailable, match=said):
        when_free(lambda: LocalTransactionCheck(engine).check(half_of(url)))


@pytest.mark.parametrize("database", AS_BYTES)
def test_a_driver_that_gives_texts_as_bytes_is_refused(
    database: str, url: str, memory: InMemoryServer, unique: str
) -> None:
    """A check said that the half came from another source, and an inbox that there are no tables."""
    if database == "sqlite":
        engine = make_engine(url)

        @event.listens_for(engine, "connect")
        def bytes_only(driver: Any, record: Any) -> None:
            driver.text_factory = bytes
    else:
        engine = sa.create_engine(sa.make_url(url).update_query_dict({"use_unicode": "0"}))
    refuse(engine, url, memory, unique, "texts as bytes")
    engine.dispose()


@pytest.mark.parametrize("database", ["mariadb"])
def test_a_session_that_takes_empty_texts_for_null_is_refused(url: str, memory: InMemoryServer, unique: str) -> None:
    """A purge found no row, and said nothing; no check was ever answered with ROLLBACK."""
    engine = sa.create_engine(url, connect_args={"init_command": "SET SESSION sql_mode = 'EMPTY_STRING_IS_NULL'"})
    refuse(engine, url, memory, unique, "EMPTY_STRING_IS_NULL")
    with pytest.raises(InvalidRequest, match="EMPTY_STRING_IS_NULL"):
        purge_by_force(engine, older_than=0)
    engine.dispose()


@pytest.mark.parametrize("mode", ["half", "outbox", "auto"])
@pytest.mark.parametrize("database", ["mariadb"])
def test_a_mariadb_that_speaks_as_oracle(url: str, memory: InMemoryServer, unique: str, mode: Any) -> None:
    """`body` is a reserved word there."""
    engine = sa.create_engine(url, connect_args={"init_command": "SET SESSION sql_mode = 'ORACLE'"})
    with TransactionProducer(memory.url, group=unique, engine=engine, mode=mode, answer_checks=False) as producer:
        for count in (1, 3):
            with Session(engine) as session, session.begin():
                for _ in range(count):
                    producer.send(session, Message(unique, "x", key="k"))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(half_message)) == 4
    engine.dispose()


def rows_of(url: str) -> list[tuple[int, str, bytes]]:
    """The numbers, keys and bodies of all rows."""
    engine, c = make_engine(url), half_message.c
    with engine.connect() as connection:
        found = connection.execute(sa.select(c.message_no, c.key, c.body).order_by(c.transaction_id, c.message_no))
        rows = [(number, key, bytes(body)) for number, key, body in found]
    engine.dispose()
    return rows


@pytest.mark.parametrize("sizes", [[1] * (TOGETHER + 1), [1] * (2 * TOGETHER + 1), [1, *[LIMITS.message_bytes] * 3]])
@pytest.mark.parametrize("database", MYSQLS)
def test_a_transaction_of_any_number_and_size_of_messages(
    url: str, memory: InMemoryServer, unique: str, sizes: list[int]
) -> None:
    """Its commit failed on MySQL and MariaDB where the last statement had one row, as with 18 messages on MariaDB."""
    engine = make_engine(url)
    for more in (0, 1):  # MariaDB's first statement has one row, those of others TOGETHER
        with TransactionProducer(memory.url, group=unique, engine=engine, mode="outbox") as producer:
            with Session(engine) as session, session.begin():
                for size in sizes + [1] * more:
                    producer.send(session, Message(unique, b"x" * size))
    written = [*enumerate(sizes), *enumerate([*sizes, 1])]
    assert [(number, len(body)) for number, _, body in rows_of(url)] == written
    engine.dispose()


@pytest.mark.parametrize("database", MYSQLS)
def test_seconds_are_stored_as_they_are(url: str, memory: InMemoryServer, unique: str) -> None:
    """A FLOAT gives six digits. A half whose answer was lost and the row that was left behind were two transactions
    with one id for the server: it refused the row, and the message was lost."""
    engine = make_engine(url)
    with TransactionProducer(memory.url, group=unique, engine=engine, mode="auto", half_timeout=0.3) as producer:
        with memory.losing_answers("/v1/transactions"), Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "x", key="k", delay=0.123456, ttl=1234567.25))
        assert [message.text for message in memory.wait_for(unique, 1)] == ["x"]
    with engine.connect() as connection:
        row = connection.execute(sa.select(half_message.c.delay, half_message.c.ttl)).one()
    assert tuple(row) == (0.123456, 1234567.25)
    engine.dispose()


@pytest.mark.parametrize("database", MYSQLS)
def test_texts_are_stored_as_they_are_where_a_backslash_escapes_nothing(
    url: str, memory: InMemoryServer, unique: str
) -> None:
    """MariaDB said after each row that a backslash escapes, so that the driver doubled those of the next row, and a
    quotation mark ended its text."""
    engine = sa.create_engine(url, connect_args={"init_command": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"})
    texts = ["a\\b", "it's", "\\' --"]
    with TransactionProducer(memory.url, group=unique, engine=engine, mode="outbox") as producer:
        with Session(engine) as session, session.begin():
            for text in texts * 2:
                producer.send(session, Message(unique, text.encode(), key=text))
    assert [(key, body.decode()) for _, key, body in rows_of(url)] == [(text, text) for text in texts * 2]
    engine.dispose()


@pytest.mark.parametrize("driver", ["aiomysql", "asyncmy"])
@pytest.mark.parametrize("odd", [{"init_command": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"}, {"charset": "gbk"}])
@pytest.mark.parametrize("database", MYSQLS)
def test_a_body_that_a_driver_of_asyncio_would_change_is_refused(
    url: str, memory: InMemoryServer, unique: str, driver: str, odd: dict[str, str]
) -> None:
    """asyncmy doubled its backslashes, and its quotation marks ended the literal."""
    pytest.importorskip(driver)
    texts = ["a\\b", "it's", "中'"]

    async def work() -> None:
        engine = create_async_engine(sa.make_url(url).set(drivername=f"mysql+{driver}"), connect_args=odd)
        try:
            async with AsyncTransactionProducer(memory.url, group=unique, engine=engine, mode="outbox") as producer:
                async with AsyncSession(engine) as session, session.begin():
                    for text in texts:
                        await producer.send(session, Message(unique, text.encode(), key=text))
        finally:
            await engine.dispose()

    with pytest.raises(BindingRefused, match="asyncmy") if driver == "asyncmy" else contextlib.nullcontext():
        asyncio.run(work())
    assert [(key, body.decode()) for _, key, body in rows_of(url)] == [
        (text, text) for text in texts if driver != "asyncmy"
    ]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
@pytest.mark.parametrize("database", ["postgresql"])
def test_a_key_with_nul_is_refused(url: str, memory: InMemoryServer, unique: str, driver: str) -> None:
    """The commit raised the driver's own error, psycopg2 a ValueError."""
    pytest.importorskip(driver)
    engine = sa.create_engine(sa.make_url(url).set(drivername=f"postgresql+{driver}"))
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        with pytest.raises(InvalidRequest, match=r"nothing is committed.*NUL"):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, "x", key="a\0b"))
    engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_relay_reads_all_letters_whatever_encoding_its_address_has(
    url: str, memory: InMemoryServer, unique: str
) -> None:
    """A key that the encoding of the service's URL lacks ended the relay."""
    engine = make_engine(url)
    with TransactionProducer(memory.url, group=unique, engine=engine, mode="outbox", answer_checks=False) as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "x", key="中"))
    engine.dispose()
    address = sa.make_url(url).update_query_dict({"client_encoding": "latin1"})
    visitor = visitor_engine(address.render_as_string(hide_password=False))
    assert asyncio.run(Relay(visitor, memory.url).run(once=True)).sent == 1
    visitor.dispose()
    assert [message.key for message in memory.messages(unique)] == ["中"]


def test_a_row_in_letters_that_nobody_knows_holds_up_no_other(
    database_urls: Mapping[str, str], memory: InMemoryServer, unique: str
) -> None:
    """In a database of SQL_ASCII any client's bytes are stored as they are. The relay ended with "current transaction
    is aborted", and again whenever it was started."""
    url = sa.make_url(database_urls["postgresql"])
    name = f"t{new_id()[-12:]}"
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    place = url.set(database=name).render_as_string(hide_password=False)
    try:
        for encoding, key in (("utf8", "é"), ("latin1", "é"), ("utf8", "é")):
            engine = sa.create_engine(place, connect_args={"client_encoding": encoding})
            create_tables(engine)
            with engine.begin() as connection:
                connection.execute(half_message.insert().values(row(unique, 1, key=key)))
            engine.dispose()
        visitor = visitor_engine(place)
        total = asyncio.run(Relay(visitor, memory.url).run(once=True))
        assert (total.sent, total.refused) == (2, 1)
        with visitor.connect() as connection:
            refused = connection.execute(sa.select(notify_refused.c.code, notify_refused.c.topic)).all()
        visitor.dispose()
        assert refused == [("unreadable", unique)]
    finally:
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        server.dispose()
    assert [message.key for message in memory.messages(unique)] == ["é"] * 2


@pytest.mark.parametrize("database", ["mysql"])
def test_a_missing_database_is_named_in_any_language(url: str, memory: InMemoryServer, unique: str) -> None:
    engine = sa.create_engine(url, connect_args={"init_command": "SET lc_messages = 'de_DE'"})
    options: dict[str, Any] = {"schema": "nowhere", "answer_checks": False}
    with TransactionProducer(memory.url, group=unique, engine=engine, **options) as producer:
        with pytest.raises(BindingRefused, match=r"nowhere.* has no table"):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, "x"))
    engine.dispose()


def test_a_pool_that_commits_what_is_left_is_refused(memory: InMemoryServer, unique: str, tmp_path: Path) -> None:
    """The changes of a session that nobody closed were committed, without their message."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db", pool_reset_on_return="commit")
    with pytest.raises(InvalidRequest, match="pool_reset_on_return"):
        TransactionProducer(memory.url, group=unique, engine=engine)


# --- transactions that others work on ------------------------------------------------------------------------------


def refreshing(engine: Any) -> Any:
    """The engine, whose commits are heard by a service that passes over an error."""

    @event.listens_for(getattr(engine, "sync_engine", engine), "commit")
    def refresh(connection: sa.Connection) -> None:
        with contextlib.suppress(sa.exc.DBAPIError):
            connection.exec_driver_sql("REFRESH MATERIALIZED VIEW nowhere")

    return engine


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_statement_that_fails_after_the_rows_leaves_the_outcome_to_a_check(
    url: str, memory: InMemoryServer, unique: str
) -> None:
    """PostgreSQL rolls back at such a COMMIT, without an error: the message was sent, and its changes were gone."""
    engine = make_engine(url)
    with TransactionProducer(memory.url, group=unique, engine=engine, check_after=0.5) as producer:
        refreshing(engine)
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "ghost"))
        eventually(lambda: not memory.halves(unique), "a check to decide")
    assert memory.messages(unique) == []
    engine.dispose()


@pytest.mark.parametrize("database", ["postgresql", "mysql"])
def test_a_statement_that_fails_while_the_inbox_commits_is_a_failure(database: str, url: str) -> None:
    """PostgreSQL rolled the effect back with its claim, and the message was acknowledged."""
    engine = refreshing(make_engine(url))
    inbox, received = Inbox(engine), given()
    with pytest.raises(InvalidRequest, match="while the inbox committed"):
        inbox.run("g", received, lambda message, session: None)
    with engine.connect() as connection:
        claims = connection.scalar(sa.select(sa.func.count()).select_from(notify_inbox))
    assert claims == (0 if database == "postgresql" else 1)
    engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_statement_that_fails_while_an_asynchronous_inbox_commits_is_a_failure(url: str) -> None:
    async def run() -> None:
        engine = refreshing(create_async_engine(url))

        async def handle(message: ReceivedMessage, session: AsyncSession) -> None:
            return None

        try:
            with pytest.raises(InvalidRequest, match="while the inbox committed"):
                await Inbox(engine).run_async("g", given(), handle)
        finally:
            await engine.dispose()

    asyncio.run(run())


@pytest.mark.parametrize("database", MOST)
def test_a_table_that_loses_a_column_is_met_again(url: str, memory: InMemoryServer, unique: str) -> None:
    """Each repeated transaction was refused with the advice to repeat it, until the process was restarted."""
    engine = make_engine(url)
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:

        def send(text: str) -> None:
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, text))

        send("1")
        execute(url, "ALTER TABLE half_message DROP COLUMN digest")
        with pytest.raises(TransactionRefused, match="repeat the transaction"):
            send("lost")
        send("2")
    assert [message.text for message in memory.wait_for(unique, 2)] == ["1", "2"]
    engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_right_that_is_missing_is_no_missing_table(url: str, memory: InMemoryServer, unique: str) -> None:
    engine = make_engine(url)
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        with pytest.raises(sa.exc.ProgrammingError, match="permission denied"), Session(engine) as session:
            session.execute(sa.text("SET LOCAL ROLE pg_monitor"))
            producer.send(session, Message(unique, "x"))
            session.commit()
    engine.dispose()


# --- SQLite's ways to begin ---------------------------------------------------------------------------------------


def with_a_hook(url: str) -> sa.Engine:
    """An engine with the hooks that SQLAlchemy's documentation gave before there was `use_explicit_begin`."""
    engine = sa.create_engine(url)

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def without_autocommit(url: str) -> sa.Engine:
    """An engine as SQLAlchemy's documentation recommends it since Python 3.12."""
    return sa.create_engine(url, connect_args={"autocommit": False})


NEEDS_312 = pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has `autocommit` since Python 3.12")


@pytest.mark.parametrize("database", ["sqlite"])
@pytest.mark.parametrize("make", [with_a_hook, pytest.param(without_autocommit, marks=NEEDS_312)])
def test_sqlite_that_has_begun_already(url: str, memory: InMemoryServer, unique: str, make: Any) -> None:
    """`use_explicit_begin`, which the refusal asked for, failed: cannot start a transaction within a transaction."""
    engine = make(url)
    use_explicit_begin(engine)
    with engine.connect() as connection, connection.begin():
        assert begins_explicitly(connection)
        with sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0) as other:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
        other.close()
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "kept"))
            with pytest.raises(ZeroDivisionError), session.begin_nested():
                producer.send(session, Message(unique, "taken back"))
                raise ZeroDivisionError
        with Session(engine) as session:
            producer.send(session, Message(unique, "rolled back"))
            session.rollback()
    assert [message.text for message in memory.wait_for(unique, 1)] == ["kept"]
    inbox, received = Inbox(engine), given()
    inbox.check()
    assert [inbox.run("g", received, lambda message, session: None) for _ in range(2)] == [True, False]
    assert LocalTransactionCheck(engine).check(half_of(url)) is Outcome.ROLLBACK
    engine.dispose()


@pytest.mark.parametrize("mode", ["outbox", "auto"])
@pytest.mark.parametrize("database", ["sqlite"])
def test_rows_of_one_millisecond_are_moved_in_the_order_of_their_commits(
    url: str, memory: InMemoryServer, unique: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's clock tells milliseconds. Where two processes committed one after another within one, the lower id came
    first: a fifth of a key's messages were out of order."""
    engine, c = make_engine(url), half_message.c
    with memory.down() if mode == "auto" else contextlib.nullcontext():
        with TransactionProducer(memory.url, group=unique, engine=engine, mode=mode, half_timeout=0.05) as producer:
            for n in range(20):
                monkeypatch.setattr(ids, "_generator", ids._Generator())  # as in another process
                with Session(engine) as session, session.begin():
                    producer.send(session, Message(unique, str(n), key="k"))
    with engine.connect() as connection:
        rows = connection.execute(sa.select(c.body, c.created_at).order_by(c.created_at, c.transaction_id)).all()
    assert [int(body) for body, _ in rows] == list(range(20))
    assert any(at.microsecond % 1000 for _, at in rows)
    engine.dispose()


@NEEDS_312
@pytest.mark.parametrize("database", ["sqlite"])
def test_asynchronous_sqlite_that_has_begun_already(url: str) -> None:
    pytest.importorskip("aiosqlite")

    async def work() -> bool:
        engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"), connect_args={"autocommit": False})
        use_explicit_begin(engine)
        async with engine.begin() as connection:
            is_explicit = await connection.run_sync(begins_explicitly)
            await connection.run_sync(create_tables)
        await engine.dispose()
        return is_explicit

    assert asyncio.run(work())
