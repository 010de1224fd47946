"""Drivers of PostgreSQL that a service may have: each carries messages, and its errors have their meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Inbox, Message, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message
from notify.protocol.message import ReceivedMessage
from notify.runtime.databases import is_column_missing, is_denied, is_doubled, is_gone, is_held_up, is_table_missing
from notify.testing import InMemoryServer
from tests.support.databases import empty_database
from tests.support.transactions import new_id

DRIVERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "psycopg": ("psycopg", {}),
    "psycopg2": ("psycopg2", {}),
    "psycopg2 in batches": ("psycopg2", {"executemany_mode": "values_plus_batch", "executemany_batch_page_size": 7}),
    "pg8000": ("pg8000", {}),
}


@pytest.fixture(scope="module", params=DRIVERS)
def shared(request: pytest.FixtureRequest, database_urls: Mapping[str, str]) -> Iterator[sa.Engine]:
    driver, options = DRIVERS[request.param]
    pytest.importorskip(driver)
    with empty_database("postgresql", database_urls, Path()) as url:
        engine = sa.create_engine(sa.make_url(url).set(drivername=f"postgresql+{driver}"), **options)
        create_tables(engine)
        yield engine
        engine.dispose()


@pytest.fixture
def engine(shared: sa.Engine) -> sa.Engine:
    """An engine of each driver, with empty tables."""
    with shared.begin() as connection:
        connection.execute(sa.delete(half_message))
    return shared


@pytest.mark.parametrize("mode", ["half", "outbox", "auto"])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_it_carries_transactions_of_any_size(
    engine: sa.Engine, memory: InMemoryServer, unique: str, mode: Any, count: int
) -> None:
    """psycopg2 knows no type of NULL, so that an outbox with several messages was refused; and it counts the rows of
    the last statement of a batch alone, so that a trigger was blamed that nobody has."""
    options: dict[str, Any] = {"key": "ü'%s", "tag": "t", "headers": {"h": "%(x)s"}}
    with TransactionProducer(memory.url, group=unique, engine=engine, mode=mode) as producer:
        for _ in range(2):
            with Session(engine) as session, session.begin():
                for number in range(count):
                    producer.send(session, Message(unique, f"{number}'", **options if number % 2 else {}))
    with engine.connect() as connection:
        query = sa.select(half_message.c.message_no).order_by(half_message.c.transaction_id, half_message.c.message_no)
        assert connection.scalars(query).all() == [*range(count), *range(count)]


def test_an_inbox_takes_batches(engine: sa.Engine) -> None:
    given = [ReceivedMessage(f"{new_id()}.0", "t", 0, 0, b"x", None, None, {}, 1, "") for _ in range(10)]
    inbox = Inbox(engine)
    assert [inbox.run_batch("g", batch, lambda *_: None) for batch in (given[:8], given, given)] == [8, 2, 0]


def test_it_carries_messages_beside_a_cursor_on_the_server(
    engine: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    """A connection that reads with `stream_results` let psycopg declare a cursor for the row's INSERT."""
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        with Session(engine) as session, session.begin():
            session.connection(execution_options={"stream_results": True})
            producer.send(session, Message(unique, "x"))
    assert [message.text for message in memory.wait_for(unique, 1)] == ["x"]


MEANINGS = (is_table_missing, is_column_missing, is_doubled, is_held_up, is_denied, is_gone)
ERRORS = {
    "SELECT * FROM nowhere": is_table_missing,
    "INSERT INTO half_message (nothing) VALUES (1)": is_column_missing,
    "INSERT INTO notify_source (id, purged_before) SELECT id, 0 FROM notify_source": is_doubled,
    "LOCK TABLE notify_source IN ACCESS EXCLUSIVE MODE NOWAIT": is_held_up,
    "DO $$ BEGIN RAISE insufficient_privilege; END $$": is_denied,
    "DO $$ BEGIN RAISE admin_shutdown; END $$": is_gone,
    "SELECT 1/0": None,
}
"""Statements that fail, and the only meaning of their error."""


@pytest.mark.parametrize(("statement", "meaning"), ERRORS.items(), ids=[str(name)[:20] for name in ERRORS])
def test_its_errors_have_their_meaning(engine: sa.Engine, statement: str, meaning: Any) -> None:
    """pg8000's only argument is a dict, which no set of codes can be asked for."""
    with engine.connect() as other, engine.connect() as connection:
        other.exec_driver_sql("LOCK TABLE notify_source IN SHARE UPDATE EXCLUSIVE MODE")
        with pytest.raises(sa.exc.DBAPIError) as raised:
            connection.exec_driver_sql(statement.replace("%", "%%"))
    assert [each for each in MEANINGS if each(raised.value.orig)] == ([meaning] if meaning else [])
