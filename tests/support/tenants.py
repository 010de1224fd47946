"""Tenants: schemas of one database (databases of one MySQL), each with an order table and Notify's tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.check.question import read_source
from notify.client import create_tables
from tests.support.shop import Base, make_engine

WAYS = ("session", "local", "connection", "engine")
"""How a service may say which tenant a transaction is of: by a setting of the session, which its pool's next user finds
too, or of the transaction; by the connection's, or an engine's, `schema_translate_map`."""


class Tenants:
    """The schemas of a database. A name of one begins with the database's, because a MySQL's are shared by all."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = make_engine(url)
        self.is_postgresql = self.engine.dialect.name == "postgresql"
        database = str(sa.make_url(url).database)
        self.home = "public" if self.is_postgresql else database
        self._prefix = "" if self.is_postgresql else database
        self._made: list[str] = []

    def named(self, name: str) -> str:
        return self._prefix + name

    def make(self, name: str, *, tables: bool = True) -> str:
        """Create a tenant; returns its schema."""
        schema = self.home if name == "home" else self.named(name)
        if name != "home":
            self.run(f"CREATE SCHEMA {self.quoted(schema)}")
            self._made.append(schema)
        with self.engine.begin() as connection:
            Base.metadata.create_all(connection.execution_options(schema_translate_map={None: schema}))
        if tables:
            create_tables(self.engine, schema=schema)
        return schema

    def drop(self, schema: str) -> None:
        self.run(f"DROP SCHEMA {self.quoted(schema)}" + (" CASCADE" if self.is_postgresql else ""))

    def run(self, *statements: str) -> None:
        engine = sa.create_engine(self.url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def quoted(self, schema: str) -> str:
        return self.engine.dialect.identifier_preparer.quote_identifier(schema)

    def source(self, schema: str) -> str:
        with self.engine.connect() as connection:
            return read_source(connection, schema)[0]

    def rows(self, schema: str) -> list[tuple[str, str]]:
        """The ids and states of the rows in a schema, without its tombstones."""
        table = f"{self.quoted(schema)}.half_message"
        with self.engine.connect() as connection:
            query = f"SELECT transaction_id, state FROM {table} ORDER BY transaction_id, message_no"
            return [(str(row[0]), str(row[1])) for row in connection.exec_driver_sql(query)]

    def places_of(self, transaction_id: str, *schemas: str) -> list[str]:
        """Those of the schemas that have a transaction's committed row."""
        return [schema for schema in schemas if (transaction_id, "COMMITTED") in self.rows(schema)]

    def going(self, schema: str, way: str) -> str:
        """The statement that makes a session find its tables in a schema."""
        local = "LOCAL " if way == "local" else ""
        quoted = self.quoted(schema)
        return f"SET {local}search_path TO {quoted}" if self.is_postgresql else f"USE {quoted}"

    @contextmanager
    def session(self, schema: str, way: str) -> Iterator[Session]:
        """A session of a tenant, which commits at the end."""
        engine: Any = self.engine
        if way == "engine":
            engine = engine.execution_options(schema_translate_map={None: schema})
        with Session(engine) as session, session.begin():
            if way == "connection":
                session.connection(execution_options={"schema_translate_map": {None: schema}})
            elif way in ("session", "local"):
                session.connection().exec_driver_sql(self.going(schema, way))
            yield session

    def close(self) -> None:
        self.engine.dispose()
        if not self.is_postgresql:
            for schema in self._made:
                self.run(f"DROP SCHEMA IF EXISTS {self.quoted(schema)}")
