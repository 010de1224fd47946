"""Tenants: schemas of one database (databases of one MySQL), each with an order table and Notify's tables."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.check.question import read_source
from notify.client import Message, ReceivedMessage, TransactionProducer, create_tables
from notify.client.producer.producer import ThreadProducer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.http import admin
from tests.support.shop import Base, Order, make_engine
from tests.support.transactions import new_id

if TYPE_CHECKING:
    from notify.testing import InMemoryServer

KINDS = ("postgresql", "mysql", pytest.param("mariadb", marks=pytest.mark.long))

WAYS = ("session", "local", "connection", "engine")
"""How a service may say which tenant a transaction is of: by a setting of the session, which its pool's next user finds
too, or of the transaction; by the connection's, or an engine's, `schema_translate_map`."""


class Tenants:
    """The schemas of a database. A name of one begins with the database's, because a MySQL's are shared by all."""

    def __init__(self, url: str, *, admin_url: str | None = None) -> None:
        """`url`: of the services; `admin_url`: of who makes the schemas, by default the same."""
        self.url = url
        self._admin_url = admin_url or url
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
        engine = sa.create_engine(self._admin_url, poolclass=sa.NullPool)
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


@pytest.fixture(params=KINDS)
def tenants(request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[Tenants]:
    with empty_database(request.param, database_urls, tmp_path) as url, ExitStack() as stack:
        own = url if request.param == "postgresql" else stack.enter_context(user_of_schemas(url))
        tenants = Tenants(own, admin_url=url)
        yield tenants
        tenants.close()


@contextmanager
def user_of_schemas(url: str) -> Iterator[str]:
    """The URL of a user of MySQL who sees only the schemas whose names begin with the database's.

    The tests share a server. A check asks all schemas that its user sees, and is not answered while one is locked: it
    would wait for other tests.
    """
    name = str(sa.make_url(url).database)
    account = f"'{name}'@'127.0.0.1'"
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE USER {account} IDENTIFIED BY '{name}'")
        connection.exec_driver_sql(f"GRANT ALL ON `{name}%%`.* TO {account}")
        connection.exec_driver_sql(f"GRANT PROCESS ON *.* TO {account}")
    try:
        yield sa.make_url(url).set(username=name, password=name).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP USER {account}")


@pytest.fixture
def on_postgresql(database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[Tenants]:
    with empty_database("postgresql", database_urls, tmp_path) as url:
        tenants = Tenants(url)
        yield tenants
        tenants.close()


@pytest.fixture
def producing(memory: InMemoryServer, unique: str) -> Iterator[Callable[..., TransactionProducer]]:
    """Makes producers of one group, which are closed at the end."""
    made: list[TransactionProducer] = []
    engines: set[sa.Engine] = set()

    def make(engine: sa.Engine, **options: Any) -> TransactionProducer:
        engines.add(engine)
        options = {"half_timeout": PATIENCE_SECONDS} | options
        made.append(TransactionProducer(memory.url, group=unique, engine=engine, **options))
        return made[-1]

    yield make
    for producer in made:
        producer.close()
    for engine in engines:
        engine.dispose()


def noted(producer: ThreadProducer) -> dict[str, list[str]]:
    """The ids of the halves that a producer stores, by body."""
    ids: dict[str, list[str]] = defaultdict(list)
    store_half = producer.outgoing.store_half

    def note(transaction_id: str, messages: Any, source: str) -> Any:
        item = store_half(transaction_id, messages, source)
        ids[messages[0].body.decode()].append(transaction_id)
        return item

    producer.outgoing.store_half = note  # type: ignore[method-assign]
    return ids


def state_of(server: InMemoryServer, transaction_id: str) -> str:
    """A transaction's state, once checks have decided it."""
    next_at = 0.0

    def decided() -> str:
        nonlocal next_at
        if time.monotonic() > next_at:  # the server's time must not run ahead of the answer to a check
            server.advance(60.0)
            next_at = time.monotonic() + PATIENCE_SECONDS / 20
        state = str(admin(server.url, "GET", f"transactions/{transaction_id}")["state"])
        return "" if state == "PREPARED" else state

    return str(eventually(decided, "a check to decide"))


def order(tenants: Tenants, producer: TransactionProducer, schema: str, way: str, body: str) -> None:
    with tenants.session(schema, way) as session:
        session.add(Order(item=body))
        producer.send(session, Message(producer.group, body))


def received() -> ReceivedMessage:
    return ReceivedMessage(f"{new_id()}.0", "t", 0, 0, b"x", None, None, {}, 1, "")
