"""An engine whose connections lead to several databases: each half names the source that has its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

from notify.check import CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome
from notify.client import Message, TransactionProducer, create_tables
from notify.client.tables.creation import new_source
from notify.client.tables.left_rows import counted
from notify.client.tables.schemas import Places
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.shop import Base, Order, items
from tests.support.tenants import producing

__all__ = ["producing"]


@pytest.fixture(params=["postgresql", pytest.param("mysql", marks=pytest.mark.long)])
def shards(request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[list[str]]:
    """Two databases with the same tables: on PostgreSQL with the same numbers, since one is a copy of the other; else
    with the same name, on servers of their own."""
    is_postgresql = request.param == "postgresql"
    with empty_database(request.param, database_urls, tmp_path) as one:
        name = str(sa.make_url(one).database)
        server = sa.make_url(database_urls["postgresql" if is_postgresql else "mariadb"])
        other = server.set(database=f"{name}_copy" if is_postgresql else name)
        admin = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        _make(one)
        with admin.connect() as connection:
            template = f" TEMPLATE {name}" if is_postgresql else ""
            connection.exec_driver_sql(f"CREATE DATABASE {other.database}{template}")
        try:
            _make(other)
            yield [one, other.render_as_string(hide_password=False)]
        finally:
            with admin.connect() as connection:
                force = " WITH (FORCE)" if is_postgresql else ""
                connection.exec_driver_sql(f"DROP DATABASE {other.database}{force}")


def _make(url: str | sa.URL) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    create_tables(engine)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        new_source(connection)


def to_the_current(shards: list[str], current: list[int], **options: Any) -> sa.Engine:
    """An engine whose new connections lead to the current shard, as services with a database for each tenant do it."""
    engine = sa.create_engine(shards[0], **options)

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, *_: Any) -> Any:
        arguments, options = dialect.create_connect_args(sa.make_url(shards[current[0]]))
        return dialect.connect(*arguments, **options)

    return engine


def halves_of(producer: TransactionProducer) -> dict[str, HalfMessage]:
    """The halves that a producer stores, by body."""
    halves: dict[str, HalfMessage] = {}
    store_half = producer.outgoing.store_half

    def note(transaction_id: str, messages: Any, source: str) -> Any:
        item = store_half(transaction_id, messages, source)
        halves[messages[0].body.decode()] = HalfMessage(transaction_id, producer.group, item.shard or "", source, 1, ())
        return item

    producer.outgoing.store_half = note  # type: ignore[method-assign]
    return halves


@pytest.mark.parametrize("schema", [None, "named"])
@pytest.mark.parametrize("pool", [sa.NullPool, sa.QueuePool])
def test_a_check_finds_the_row_or_says_that_it_cannot(
    shards: list[str], producing: Callable[..., TransactionProducer], schema: str | None, pool: Any
) -> None:
    """The half named the source that the engine met first, whose database then answered ROLLBACK."""
    current = [0]
    engine = to_the_current(shards, current, poolclass=pool)
    its_schema = "public" if "postgresql" in shards[0] else str(sa.make_url(shards[0]).database)
    named = None if schema is None else its_schema
    producer = producing(engine, schema=named, answer_checks=False)
    halves = halves_of(producer)
    turns = [0, 1, 0, 1, 1]
    kept = []
    for number, shard in enumerate(turns):
        current[0] = shard
        connection = engine.connect()
        kept.append(connection)  # so that a pool opens another one for the next
        with Session(engine) as session, session.begin():
            session.add(Order(item=f"{shard} {number}"))
            producer.send(session, Message(producer.group, f"{shard} {number}"))
    for connection in kept:
        connection.close()
    for shard, url in enumerate(shards):
        own = sa.create_engine(url, poolclass=sa.NullPool)
        check = LocalTransactionCheck(own, schema=its_schema)
        bodies = [body for body in halves if body.startswith(f"{shard} ")]
        assert items(own) == bodies
        assert [check.check(halves[body]) for body in bodies] == [Outcome.COMMIT] * len(bodies)
        for body in halves.keys() - set(bodies):
            with pytest.raises(CheckUnavailable, match="the half came from source"):
                check.check(halves[body])


def test_transactions_left_behind_in_another_database_are_sent(
    shards: list[str], producing: Callable[..., TransactionProducer], caplog: pytest.LogCaptureFixture
) -> None:
    """The producer looked in the database that its own connection led to, found nothing there, and took the message for
    sent by another process: `flush` did not name it, and nothing kept the order of its key any more."""
    current = [0]
    engine = to_the_current(shards, current, poolclass=sa.NullPool)
    producer = producing(engine, mode="auto", answer_checks=False)
    left_behind = producer._plan.left_behind
    assert left_behind is not None
    left_behind.away()
    with Session(engine) as session, session.begin():
        current[0] = 1
        session.connection()
        current[0] = 0
        left_behind.is_away = True
        producer.send(session, Message(producer.group, "left", key="k"))
    eventually(lambda: "lead to another database" in caplog.text or not left_behind.ids())
    assert producer.flush(0.1) == left_behind.ids() != []
    current[0] = 1
    eventually(lambda: not left_behind.ids())
    with sa.create_engine(shards[1], poolclass=sa.NullPool).connect() as connection:
        assert counted(connection, producer.group) == []


def test_each_database_is_met_once(
    shards: list[str], producing: Callable[..., TransactionProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change of the database counted as a change of the source, so that each transaction met its schema again."""
    current = [0]
    engine = to_the_current(shards, current, poolclass=sa.NullPool)
    producer = producing(engine, answer_checks=False)
    met: list[str] = []
    meet = Places._meet

    def note(places: Places, *arguments: Any) -> Any:
        met.append("")
        return meet(places, *arguments)

    monkeypatch.setattr(Places, "_meet", note)
    for shard in (0, 1, 0, 1):
        current[0] = shard
        with Session(engine) as session, session.begin():
            producer.send(session, Message(producer.group, "x"))
    assert len(met) == 2 and producer._plan.sources.changes == 0
