"""Records what a real PostgreSQL sends of its log, for tests that read it without a server.

    python -m tests.support.record_wal

writes tests/fixtures/wal/postgresql.hex: a line for each message of pgoutput, in hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.binlog_bridge.postgresql import slot, source
from notify.binlog_bridge.postgresql.position import Position
from notify.binlog_bridge.postgresql.stream import WalStream
from notify.binlog_bridge.scope import Scope
from notify.client import create_tables
from notify.client.tables.definitions import half_message
from notify.storage.sql import schema
from notify.storage.sql.tables import server_half_message
from notify.testing.postgresql_server import PostgreSqlServer

FILE = Path(__file__).parents[1] / "fixtures" / "wal" / "postgresql.hex"
AT = "2026-02-03 04:05:06.000789"
NAMES = [f"019c0000-0000-7000-8000-00000000000{n:x}" for n in range(10)]
"""The ids of the recorded transactions."""
LONG = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(100))
"""A body that PostgreSQL stores apart from its row, since it cannot be compressed."""


def _row(name: str, number: int = 0, **values: object) -> dict[str, object]:
    plain = {
        "transaction_id": name, "message_no": number, "producer_group": "g", "mode": "outbox", "state": "COMMITTED",
        "shards": "", "topic": "t", "body": b"body", "relayed": 0, "created_at": AT,
    }  # fmt: skip
    return plain | values


def _insert(connection: Connection, name: str, number: int = 0, **values: object) -> None:
    connection.execute(half_message.insert().values(_row(name, number, **values)))


def _write(engine: sa.Engine) -> None:
    with engine.begin() as connection:  # two transactions in turns, with every column
        all_columns = {
            "key": "schlüssel ☃", "tag": "tag", "headers": json.dumps({"h": "ü"}), "delay": 1.5, "deliver_at": AT,
            "ttl": 86_400.25, "digest": -1,
        }  # fmt: skip
        _insert(connection, NAMES[0], **all_columns)
        _insert(connection, NAMES[1])
        _insert(connection, NAMES[0], 1, body=LONG)
    with engine.begin() as connection:  # a savepoint, rows that are no message, and statements of other kinds
        with connection.begin_nested() as undone:
            _insert(connection, NAMES[2])
            undone.rollback()
        _insert(connection, NAMES[3])
        _insert(connection, NAMES[4], relayed=1)
        connection.execute(half_message.update().values(relayed=1))
        connection.exec_driver_sql("ALTER TABLE half_message ADD COLUMN extra jsonb DEFAULT '{}'")
        connection.exec_driver_sql("DELETE FROM half_message")
        _insert(connection, NAMES[5])
        connection.exec_driver_sql("TRUNCATE half_message")
        connection.exec_driver_sql("SELECT pg_logical_emit_message(true, 'other', 'content')")
    with engine.begin() as connection:  # the rows of two transactions, the last numbers first
        rest = {"source": "", "instance": "", "attempts": 0, "token": 0, "state": "PREPARED"}
        for name, number in ((NAMES[7], 1), (NAMES[6], 1), (NAMES[7], 0), (NAMES[6], 0)):
            row = _row(name, number, body=LONG if number else b"short") | rest
            connection.execute(server_half_message.insert().values(row))
    with engine.begin() as connection:
        connection.execute(server_half_message.update().values(state="COMMITTED", decided_at=AT))
    with engine.begin() as connection:
        connection.execute(server_half_message.update().values(relayed=1))


def record(engine: sa.Engine) -> list[bytes]:
    """The messages of what `_write` writes."""
    create_tables(engine)
    schema.upgrade(engine, "main")
    with engine.connect() as connection:
        scope = Scope.of(connection, None, None)
        its_slot = source.slot_of(connection, "recorded", scope)
        assert not source.prepare(connection, its_slot, scope)
    slot.make(engine, its_slot.name)
    with engine.connect() as connection:
        begin = slot.current_position(connection)
    _write(engine)
    with engine.connect() as connection:
        end = slot.end_of_log(connection)
    stream = WalStream(engine.url, its_slot, Position(begin.lsn))
    stream.connect()
    messages = []
    for message in stream.messages():
        if isinstance(message, bytes):
            messages.append(message)
        elif message is not None and message.sent_to >= end.lsn:
            break
    stream.close()
    return messages


def main() -> None:
    settings = ("wal_level=logical", "max_slot_wal_keep_size=1GB")
    with tempfile.TemporaryDirectory() as directory:
        server = PostgreSqlServer(Path(directory), durable=False, settings=settings).create()
        try:
            engine = sa.create_engine(server.url)
            messages = record(engine)
            engine.dispose()
        finally:
            server.stop()
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("".join(f"{message.hex()}\n" for message in messages))
    print(f"{len(messages)} messages")


if __name__ == "__main__":
    main()
