"""Whatever PostgreSQL logs around our rows: the bridge moves each committed message once, in commit order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.binlog_bridge.batching import PART_BYTES
from notify.binlog_bridge.errors import Unreadable
from notify.client.tables.definitions import half_message
from notify.protocol import ids
from notify.runtime.databases import database_now
from notify.testing.process import ServerProcess
from tests.support.bridges import move, numbers, source_read_once
from tests.support.groups import drain
from tests.support.wal import execute, insert, row


@pytest.fixture
def url(wal_url: str) -> str:
    return wal_url


@pytest.fixture
def engine(url: str, server: ServerProcess, unique: str) -> Iterator[sa.Engine]:
    """A source that a bridge has read, to whose topic a group is subscribed."""
    with source_read_once(url, server, unique) as engine:
        yield engine


@pytest.mark.long
def test_a_message_rolled_back_to_a_savepoint_is_not_sent(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    with Session(engine) as session, session.begin():
        insert(session.connection(), unique, 0)
        with session.begin_nested():
            insert(session.connection(), unique, 1)
        with session.begin_nested() as undone:
            insert(session.connection(), unique, 2)
            with session.begin_nested():
                insert(session.connection(), unique, 3)
            undone.rollback()
        insert(session.connection(), unique, 4)
    assert move(url, server).totals.rows == 3
    assert numbers(server, unique, 3) == [0, 1, 4]


@pytest.mark.long
def test_a_prepared_transaction_is_moved_when_it_commits(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    # The trigger that wakes relays calls NOTIFY, with which PostgreSQL refuses to prepare a transaction.
    execute(engine, "ALTER TABLE half_message DISABLE TRIGGER USER")
    for n, name in enumerate(("kept", "undone")):
        with engine.begin() as connection:
            insert(connection, unique, n)
            connection.exec_driver_sql(f"PREPARE TRANSACTION '{unique}-{name}'")
    with engine.begin() as connection:
        insert(connection, unique, 2)
    assert move(url, server).totals.rows == 1
    execute(engine, f"COMMIT PREPARED '{unique}-kept'", f"ROLLBACK PREPARED '{unique}-undone'")
    assert move(url, server).totals.rows == 1
    assert numbers(server, unique, 2) == [2, 0]


@pytest.mark.long
def test_the_order_is_that_of_the_commits(url: str, engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    with engine.connect() as first, engine.connect() as second:
        insert(first, unique, 0)
        insert(second, unique, 1)
        second.commit()
        insert(first, unique, 2)
        first.commit()
    assert move(url, server).totals.rows == 3
    assert numbers(server, unique, 3) == [1, 0, 2]


def test_a_large_transaction_is_sent_in_parts_and_appears_with_its_commit(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    body = "x" * (PART_BYTES // 5)
    with engine.begin() as connection:
        for n in range(12):
            insert(connection, unique, n, body=json.dumps({"n": n, "body": body}).encode())
    with engine.connect() as connection:
        for n in range(100, 106):
            insert(connection, unique, n, body=json.dumps({"n": n, "body": body}).encode())
        connection.rollback()
    bridge = move(url, server)
    assert bridge.totals.rows == 12 and bridge.totals.batches > 2
    assert numbers(server, unique, 12) == list(range(12))


@pytest.mark.long
def test_messages_of_two_transactions_that_are_written_in_turns_stay_whole(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """Two producers in one transaction of the database, or a dump that is restored."""
    one, other = (ids.to_text(ids.new_id()) for _ in range(2))
    with engine.begin() as connection:
        for number in range(3):
            insert(connection, unique, number, transaction_id=one, message_no=number)
            insert(connection, unique, 10 + number, transaction_id=other, message_no=number)
    bridge = move(url, server)
    assert (bridge.totals.rows, bridge.totals.stored) == (6, 2)
    assert numbers(server, unique, 6) == [0, 1, 2, 10, 11, 12]


@pytest.mark.long
def test_tables_are_truncated_copied_into_and_altered(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    with engine.begin() as connection:
        insert(connection, unique, 0)
    execute(
        engine,
        "ALTER TABLE half_message ADD COLUMN noted jsonb DEFAULT '{\"a\": 1}'",
        "ALTER TABLE half_message ALTER COLUMN topic TYPE text",
        "TRUNCATE half_message",
    )
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE half_message DROP COLUMN noted")
        insert(connection, unique, 1)
        connection.exec_driver_sql("ALTER TABLE half_message ADD COLUMN extra numeric[]")
        connection.exec_driver_sql("UPDATE half_message SET extra = '{1.5}'")
        insert(connection, unique, 2)
    driver: Any = engine.raw_connection()
    names = ", ".join(f'"{name}"' for name in row(unique, 0))
    with driver.cursor() as cursor, cursor.copy(f"COPY half_message ({names}) FROM STDIN") as copy:
        for n in (3, 4):
            copy.write_row([*row(unique, n, created_at=datetime.now(UTC)).values()])
    driver.commit()
    driver.close()
    assert move(url, server).totals.rows == 5
    assert numbers(server, unique, 5) == [0, 1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("ALTER TABLE half_message DROP COLUMN ttl", "has no column ttl"),
        ("ALTER TABLE half_message ALTER COLUMN delay TYPE numeric", "has another type"),
    ],
)
def test_a_table_that_would_be_misread_stops_it(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str, statement: str, what: str
) -> None:
    execute(engine, statement)
    with engine.begin() as connection:
        insert(connection, unique, 0)
    with pytest.raises(Unreadable, match=f"{what}.*--backfill"):
        move(url, server)


@pytest.mark.long
def test_a_column_of_the_service_may_have_a_type_without_a_binary_form(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    owner = engine.url.username
    execute(engine, f"ALTER TABLE half_message ADD COLUMN rights aclitem DEFAULT '{owner}=r/{owner}'")
    with engine.begin() as connection:
        insert(connection, unique, 0)
    assert move(url, server).totals.rows == 1
    assert numbers(server, unique, 1) == [0]


@pytest.mark.long
def test_a_row_that_the_source_itself_cannot_send_stops_it(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """The source ends the stream at that row each time: the slot must not be held by tries for ever."""
    execute(engine, "ALTER TABLE half_message ADD COLUMN rights aclitem[] DEFAULT '{}'")
    with engine.begin() as connection:
        insert(connection, unique, 0)
    with pytest.raises(Unreadable, match=r"no binary output function.*--backfill"):
        move(url, server)


@pytest.mark.long
def test_each_column_arrives_as_it_was_written(url: str, engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    with engine.begin() as connection:
        insert(
            connection, unique, 0, key="schlüssel ☃", tag="tag-1", headers=json.dumps({"h": "ü"}), ttl=86_400.5,
            body=bytes(range(256)) * 100,
        )  # fmt: skip
        insert(connection, unique, 1, headers="no JSON")
        insert(connection, unique, 2, relayed=1)
        connection.execute(
            half_message.insert().values(row(unique, 3) | {"deliver_at": sa.text("'infinity'::timestamp")})
        )
    bridge = move(url, server)
    assert (bridge.totals.stored, bridge.totals.refused) == (1, 2)
    (message,) = drain(server.url, unique, unique, 1)
    assert (message["key"], message["tag"], message["headers"]) == ("schlüssel ☃", "tag-1", {"h": "ü"})


@pytest.mark.long
def test_a_row_that_came_back_with_a_dump_is_listed(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    long_ago = ids.to_text(bytes(6) + ids.new_id()[6:])
    with engine.begin() as connection:
        old = database_now() - timedelta(days=30)
        insert(connection, unique, 0, transaction_id=long_ago, created_at=old)
        insert(connection, unique, 1)
    bridge = move(url, server)
    assert (bridge.totals.stored, bridge.totals.refused) == (1, 1)
    assert numbers(server, unique, 1) == [1]
