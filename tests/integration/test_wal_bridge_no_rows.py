"""`rows=False`: messages stand in PostgreSQL's log only; they share their transaction's fate, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify.binlog_bridge.batching import PART_BYTES
from notify.binlog_bridge.bridge import Bridge
from notify.client import AsyncTransactionProducer, Message, TransactionProducer, create_tables
from notify.client.tables.definitions import WITHOUT_ROWS_MS, half_message, notify_refused, notify_source
from notify.errors import BindingRefused, InvalidRequest
from notify.movers.refused import retry
from notify.protocol import ids
from notify.protocol.logged import LoggedTransaction, encode
from notify.protocol.wire import PackedMessage
from notify.testing.process import ServerProcess
from tests.support.bridges import move, move_until, numbers, source_read_once
from tests.support.databases import empty_database
from tests.support.groups import drain
from tests.support.wal import insert, slot


@pytest.fixture
def url(wal_url: str) -> str:
    return wal_url


@pytest.fixture
def engine(url: str, server: ServerProcess, unique: str) -> Iterator[sa.Engine]:
    """A source that a bridge has read, to whose topic a group is subscribed."""
    with source_read_once(url, server, unique) as engine:
        yield engine


@pytest.fixture
def producer(engine: sa.Engine, server: ServerProcess, unique: str) -> Iterator[TransactionProducer]:
    with TransactionProducer(server.url, group=unique, engine=engine, mode="outbox", rows=False) as made:
        yield made


def rows(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(sa.select(sa.func.count()).select_from(half_message)) or 0)


@pytest.mark.long
def test_a_message_shares_its_transactions_fate_and_leaves_no_row(
    url: str, engine: sa.Engine, producer: TransactionProducer, server: ServerProcess, unique: str
) -> None:
    for n in range(4):
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, {"n": n}, key="schlüssel", tag="t", headers={"h": "ü"}))
            if n == 3:
                session.rollback()
    with Session(engine) as session, session.begin():
        producer.send(session, Message(unique, {"n": 4}))
        with session.begin_nested() as undone:
            producer.send(session, Message(unique, {"n": 5}))
            undone.rollback()
        producer.send(session, Message(unique, {"n": 6}))
    bridge = move(url, server)
    assert (bridge.totals.rows, bridge.totals.stored) == (5, 4)
    messages = drain(server.url, unique, unique, 5)
    assert [json.loads(m["body"])["n"] for m in messages] == [0, 1, 2, 4, 6]
    assert (messages[0]["key"], messages[0]["tag"], messages[0]["headers"]["h"]) == ("schlüssel", "t", "ü")
    assert rows(engine) == 0


@pytest.mark.long
def test_with_coroutines(url: str, engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    async def run() -> None:
        own = create_async_engine(url)
        producer = AsyncTransactionProducer(server.url, group=unique, engine=own, mode="outbox", rows=False)
        for n in range(2):
            async with AsyncSession(own) as session, session.begin():
                await producer.send(session, Message(unique, {"n": n}))
        await producer.close()
        await own.dispose()

    asyncio.run(run())
    assert move(url, server).totals.rows == 2
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
def test_with_django(url: str, engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    shops = pytest.importorskip("tests.support.django_project.shop")
    with shops.added(unique, shops.database_of(url)) as alias:
        from django.db import transaction

        from notify.client.django import DjangoProducer

        producer = DjangoProducer(server.url, group=unique, using=alias, mode="outbox", rows=False)
        for n in range(3):
            with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=alias):
                producer.send(Message(unique, {"n": n}))
                1 / (n - 1)
        producer.close()
    assert move(url, server).totals.rows == 2
    assert numbers(server, unique, 2) == [0, 2]
    assert rows(engine) == 0


@pytest.mark.long
def test_a_commit_is_refused_while_no_bridge_keeps_the_log(
    url: str, engine: sa.Engine, producer: TransactionProducer, server: ServerProcess, unique: str
) -> None:
    """Also where there was one when the producer began."""

    def send(n: int) -> None:
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, {"n": n}))

    send(0)
    send(1)
    assert move(url, server).totals.rows == 2
    with engine.begin() as connection:
        connection.exec_driver_sql("SELECT pg_drop_replication_slot(%s)", (slot(engine)["slot_name"],))
    with pytest.raises(BindingRefused, match=r"no bridge has a replication slot.*notify bridge"):
        send(2)
    with engine.begin() as connection:  # another program's slot does not keep it for our bridge
        connection.exec_driver_sql("SELECT pg_create_logical_replication_slot('notify_other', 'pgoutput')")
    with pytest.raises(BindingRefused, match="no bridge has a replication slot"):
        send(2)
    with engine.begin() as connection:
        connection.exec_driver_sql("SELECT pg_drop_replication_slot('notify_other')")
    move(url, server, fill=True)
    send(3)
    assert move(url, server).totals.rows == 1
    assert numbers(server, unique, 3) == [0, 1, 3]


def test_it_is_refused_where_the_log_is_not_logical(
    database_urls: dict[str, str], server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as plain:
        engine = sa.create_engine(plain)
        create_tables(engine)
        with TransactionProducer(server.url, group=unique, engine=engine, mode="outbox", rows=False) as producer:
            with pytest.raises(BindingRefused, match="ALTER SYSTEM SET wal_level"):
                with Session(engine) as session, session.begin():
                    producer.send(session, Message(unique, {"n": 0}))
        engine.dispose()


@pytest.mark.parametrize("mode", ["half", "outbox"])
def test_it_is_for_outboxes_on_postgresql(server: ServerProcess, unique: str, mode: str) -> None:
    engine = sa.create_engine("sqlite://")
    with pytest.raises(InvalidRequest, match="rows=False is for mode outbox on PostgreSQL"):
        TransactionProducer(server.url, group=unique, engine=engine, mode=mode, rows=False)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_large_transaction_is_sent_in_parts_with_rows_between(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """Several producers share one transaction of the database, and one of them writes rows."""
    body = "x" * (PART_BYTES // 5)
    emit = sa.text("SELECT pg_logical_emit_message(true, 'notify', CAST(:content AS bytea))")
    with engine.begin() as connection:
        for n in range(12):
            content = json.dumps({"n": n, "body": body}).encode()
            if n % 3 == 1:
                insert(connection, unique, n, body=content)
                continue
            message = PackedMessage(topic=unique, body=content, key="k")
            transaction = LoggedTransaction("public", ids.to_text(ids.new_id()), unique, [message])
            connection.execute(emit, {"content": encode(transaction)})
    bridge = move(url, server)
    assert bridge.totals.rows == 12 and bridge.totals.batches > 2
    assert numbers(server, unique, 12) == list(range(12))


@pytest.mark.long
def test_a_message_that_no_queue_takes_gets_a_row_and_can_be_tried_again(
    url: str, engine: sa.Engine, producer: TransactionProducer, server: ServerProcess, unique: str
) -> None:
    with Session(engine) as session, session.begin():
        producer.send(session, Message(unique, {"n": 0}, key="k"))
        session.info["notify_transaction"][1].sends[0][1].topic = "no such topic"
    bridge = move(url, server)
    assert bridge.totals.refused == 1
    with engine.connect() as connection:
        (name,) = connection.scalars(sa.select(notify_refused.c.transaction_id))
        assert connection.scalars(sa.select(half_message.c.transaction_id)).all() == [name]
    with engine.begin() as connection:
        connection.execute(half_message.update().values(topic=unique))
        retry(connection, [name], "the topic is right now")
    move_until(url, server, lambda: not _is_listed(engine))
    assert numbers(server, unique, 1) == [0]


def _is_listed(engine: sa.Engine) -> bool:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(notify_refused)) != 0


@pytest.mark.long
def test_messages_of_other_programs_are_none_of_ours(
    url: str, engine: sa.Engine, producer: TransactionProducer, server: ServerProcess, unique: str
) -> None:
    with engine.begin() as connection:
        for belongs in ("true", "false"):
            connection.exec_driver_sql(f"SELECT pg_logical_emit_message({belongs}, 'notify', 'hello')")
            connection.exec_driver_sql(f"SELECT pg_logical_emit_message({belongs}, 'cache', 'notify-transaction')")
    with Session(engine) as session, session.begin():
        producer.send(session, Message(unique, {"n": 0}))
    assert move(url, server).totals.rows == 1
    assert numbers(server, unique, 1) == [0]


@pytest.mark.long
def test_a_schemas_messages_go_with_the_bridge_of_their_schema(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql('CREATE SCHEMA "Tenant-A"')
    create_tables(engine, schema="Tenant-A")
    options = {"group": unique, "engine": engine, "mode": "outbox", "rows": False, "schema": "Tenant-A"}
    with TransactionProducer(server.url, **options) as producer:  # type: ignore[arg-type]
        with pytest.raises(BindingRefused, match="for the schema 'Tenant-A'"):
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, {"n": 0}))

        def once() -> int:
            bridge = Bridge([url], server.url, schema="Tenant-A")
            asyncio.run(bridge.run(once=True))
            return bridge.totals.rows

        once()
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, {"n": 1}))
        assert move(url, server).totals.rows == 0
        assert once() == 1
    assert numbers(server, unique, 1) == [1]


@pytest.mark.long
def test_audits_are_told_that_there_is_nothing_to_compare(
    engine: sa.Engine, producer: TransactionProducer, unique: str
) -> None:
    with Session(engine) as session, session.begin():
        producer.send(session, Message(unique, {"n": 0}))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(notify_source.c.rows_from)) == WITHOUT_ROWS_MS
