"""Rows in a PostgreSQL that a bridge reads, and the settings of its server for a while."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.client.tables.definitions import half_message
from notify.protocol import ids
from notify.runtime.databases import database_now
from notify.testing.postgresql_server import PostgreSqlServer
from tests.support.clock import eventually


def row(topic: str, n: int, **values: Any) -> dict[str, Any]:
    """A row of an outbox: one transaction with the message `n`."""
    defaults = {
        "transaction_id": ids.to_text(ids.new_id()), "message_no": 0, "producer_group": "g", "mode": "outbox",
        "state": "COMMITTED", "shards": "", "topic": topic, "key": "k", "body": json.dumps({"n": n}).encode(),
        "relayed": 0, "created_at": database_now(),
    }  # fmt: skip
    return defaults | values


def insert(connection: Connection, topic: str, *numbers: int, into: str = "", **values: Any) -> None:
    """Write such rows in the connection's transaction. `into`: another table with the same columns."""
    table = half_message
    if into:
        schema, _, name = into.rpartition(".")
        table = half_message.to_metadata(sa.MetaData(), schema=schema or None, name=name)
    for n in numbers:
        connection.execute(table.insert().values(row(topic, n, **values)))


def execute(engine: sa.Engine, *statements: str) -> None:
    """Run statements, each committed by itself."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def slot(engine: sa.Engine) -> Mapping[str, Any]:
    """The only slot of this database."""
    with engine.connect() as connection:
        found = "SELECT * FROM pg_replication_slots WHERE database = current_database()"
        return connection.exec_driver_sql(found).mappings().one()


@contextlib.contextmanager
def setting(server: PostgreSqlServer, name: str, value: str) -> Iterator[None]:
    """Change a setting of a server, which it takes without a restart."""
    engine = sa.create_engine(server.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

    def shown() -> str:
        with engine.connect() as connection:
            return str(connection.exec_driver_sql(f"SHOW {name}").scalar())

    def change(to: str) -> None:
        before = shown()
        with engine.connect() as connection:
            connection.exec_driver_sql(f"ALTER SYSTEM SET {name} = '{to}'")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
        eventually(lambda: shown() != before, f"{name} to be changed")

    earlier = shown()
    change(value)
    try:
        yield
    finally:
        change(earlier)
