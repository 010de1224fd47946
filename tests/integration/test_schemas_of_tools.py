"""Schemas beyond a producer's: Django's tenants, Alembic, purges, the commands, SQLite's attached files, old tables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.orm import Session

from notify.client import Inbox, Message, TransactionProducer, create_tables
from notify.client import alembic as helper
from notify.client.producer.packing import pack
from notify.client.tables.purge import RowPurge, counts, purge
from notify.client.transport.servers import Servers
from notify.errors import BindingRefused, InvalidRequest, TransactionRefused
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.django_project import shop as shops
from tests.support.dying import lose_outcomes
from tests.support.shop import Base, Order, make_engine
from tests.support.tenants import Tenants, noted, on_postgresql, order, producing, received, state_of, tenants
from tests.support.transactions import new_id

__all__ = ["on_postgresql", "producing", "tenants"]


# --- Django -------------------------------------------------------------------------------------------------------


@contextmanager
def tenant(connection: Any, schema: str) -> Iterator[None]:
    """As django-tenants does it: the search_path is set when the next cursor is made, and only then."""
    make_cursor = type(connection)._cursor

    def cursor(name: str | None = None) -> Any:
        made = make_cursor(connection, name)
        if connection.tenant != schema:
            connection.tenant = schema
            made.execute(f'SET search_path = "{schema}", public')
        return made

    before = connection.__dict__.get("_cursor")
    connection.tenant = getattr(connection, "tenant", None)
    connection._cursor = cursor
    try:
        yield
    finally:
        if before is None:
            del connection._cursor
        else:
            connection._cursor = before


@pytest.mark.long
def test_django_stores_each_tenants_message_in_its_schema(
    on_postgresql: Tenants, memory: InMemoryServer, unique: str
) -> None:
    """Tables of Notify in public and in each tenant's schema; a message that no statement of the tenant precedes."""
    tenants = on_postgresql
    schemas = [tenants.make(name, tables=False) for name in ("home", "t1", "t2")]
    with shops.added(unique, shops.database_of(tenants.url)):
        from notify.client.django import create_tables as create_tables_of_django
        from notify.client.django.tables import missing_tables

        create_tables_of_django(unique)
        shop = shops.Shop(unique, memory, unique)
        for schema in schemas:
            with tenant(shop.connection, schema):
                assert bool(missing_tables(unique)) is (schema != "public")
                create_tables_of_django(unique)
        assert len({tenants.source(schema) for schema in schemas}) == 3
        lose_outcomes(shop.producer)
        ids = noted(shop.producer)
        for number in range(2):
            for schema in schemas:
                with tenant(shop.connection, schema), shop.atomic():
                    shop.send(f"{schema} {number}")
        for schema in schemas:
            for number in range(2):
                committed = [id_ for id_ in ids[f"{schema} {number}"] if tenants.places_of(id_, schema)]
                assert len(committed) == 1
                assert state_of(memory, committed[0]) == "COMMITTED"
        shop.producer.close()


@pytest.mark.long
def test_an_inbox_of_django(on_postgresql: Tenants, unique: str) -> None:
    tenants = on_postgresql
    for name in ("home", "t1"):
        tenants.make(name)
    with shops.added(unique, shops.database_of(tenants.url)):
        from notify.client.django import DjangoInbox

        inboxes = [DjangoInbox(unique), DjangoInbox(unique, schema="t1")]
        for inbox, schema in zip(inboxes, ("public", "t1"), strict=True):
            inbox.check()
            message = received()
            connection = shops.connections[unique]

            def handle(message: Any, connection: Any = connection) -> None:
                with connection.cursor() as cursor:
                    cursor.execute("SET search_path = t1, public")

            assert [inbox.run("g", message, handle) for _ in range(2)] == [True, False]
            with tenants.engine.connect() as own:
                table = sa.text(f"SELECT count(*) FROM {schema}.notify_inbox WHERE message_id = :id")
                assert own.execute(table, {"id": message.id}).scalar() == 1


# --- Alembic, purges, commands ------------------------------------------------------------------------------------


def test_a_migration_of_one_schema(tenants: Tenants) -> None:
    tenants.make("home")
    one = tenants.make("t1", tables=False)
    with tenants.engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        helper.upgrade(schema=one)
        helper.upgrade(schema=one)
    assert tenants.source(one) != tenants.source(tenants.home)
    with tenants.engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        helper.downgrade(schema=one)
    with tenants.engine.connect() as connection:
        assert sa.inspect(connection).get_table_names(schema=one) == ["orders"]
        assert "half_message" in sa.inspect(connection).get_table_names(schema=tenants.home)


@pytest.mark.long
def test_a_purge_empties_only_the_schemas_that_are_named(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer
) -> None:
    schemas = [tenants.make(name) for name in ("home", "t1", "t2")]
    producer = producing(tenants.engine)
    for schema in schemas:
        for _ in range(2):
            order(tenants, producer, schema, "session", "x")
    eventually(lambda: not memory.halves(producer.group), "the outcomes")
    left = {schema: counts(tenants.engine, schema)["done"] for schema in schemas}
    assert left == dict.fromkeys(schemas, 2)
    assert asyncio.run(purge(tenants.engine, memory.url, older_than=-60, schema=schemas[1])).rows == 2
    assert [len(tenants.rows(schema)) for schema in schemas] == [2, 0, 2]

    async def purge_all() -> int:
        http = Servers(memory.url, "transactions")
        try:
            return (await RowPurge(http, producer.group, tenants.engine, -60).once()).rows
        finally:
            await http.aclose()

    assert asyncio.run(purge_all()) == 4
    assert [len(tenants.rows(schema)) for schema in schemas] == [0, 0, 0]


@pytest.mark.long
def test_a_schema_that_cannot_be_purged_holds_up_no_other(
    tenants: Tenants,
    producing: Callable[..., TransactionProducer],
    memory: InMemoryServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    schemas = [tenants.make(name) for name in ("t1", "t2", "t3")]
    producer = producing(tenants.engine)
    for schema in schemas:
        order(tenants, producer, schema, "session", "x")
    eventually(lambda: not memory.halves(producer.group), "the outcomes")
    key = "DROP CONSTRAINT half_message_pkey" if tenants.is_postgresql else "DROP PRIMARY KEY"
    tenants.run(
        f"ALTER TABLE {tenants.quoted(schemas[0])}.half_message {key}",
        f"ALTER TABLE {tenants.quoted(schemas[1])}.half_message RENAME COLUMN relayed TO moved",
    )
    engine = sa.create_engine(tenants.url)

    async def purge_all() -> int:
        http = Servers(memory.url, "transactions")
        try:
            return (await RowPurge(http, producer.group, engine, -60).once()).rows
        finally:
            await http.aclose()

    assert asyncio.run(purge_all()) == 1
    engine.dispose()
    assert [f"the schema {schema} were not purged" in caplog.text for schema in schemas] == [True, True, False]
    order(tenants, producer, schemas[2], "session", "x")
    eventually(lambda: not memory.halves(producer.group), "the outcomes")
    pattern = "t*" if tenants.is_postgresql else f"{tenants.home}t*"
    words = ("purge", "--dsn", tenants.url, "--url", memory.url, "--schemas", pattern, "--older-than", "0")
    code, said = cli(*words)
    assert code == 1 and said["text"].count("nothing is purged in the schema") == 2, said
    assert tenants.rows(schemas[2]) == []


@pytest.mark.long
def test_commands_take_schemas_by_name_and_by_pattern(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer
) -> None:
    schemas = [tenants.make(name) for name in ("home", "t1", "t2")]
    producer = producing(tenants.engine)
    for schema in schemas:
        order(tenants, producer, schema, "session", "x")
    dsn = ("--dsn", tenants.url)
    patterns = ("--schemas", tenants.named("t") + "*")
    assert cli("purge", *dsn, "--schema", "x", *patterns)[0] == 2
    code, said = cli("purge", *dsn, "--schemas", "nowhere_*", "--force")
    assert code != 0 and "nowhere_*" in str(said)
    code, said = cli("purge", *dsn, *patterns, "--force", "--older-than", "0", "--json")
    assert code == 0 and said["rows"] == 2, said
    assert [len(tenants.rows(schema)) for schema in schemas] == [1, 0, 0]
    code, said = cli("doctor", *dsn, "--schema", schemas[1], "--new-source", "--url", memory.url, "--json")
    assert tenants.source(schemas[1]) in str(said)


# --- SQLite, old tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["schema", "map"])
def test_an_attached_file_of_sqlite_has_tables_of_its_own(
    tmp_path: Path, memory: InMemoryServer, unique: str, way: str
) -> None:
    engine = make_engine(f"sqlite:///{tmp_path}/main.db")

    @sa.event.listens_for(engine, "connect")
    def attach(driver: Any, record: Any) -> None:
        driver.execute(f"ATTACH DATABASE '{tmp_path}/other.db' AS other")

    Base.metadata.create_all(engine)
    create_tables(engine)
    create_tables(engine, schema="other")
    sending: Any = engine if way == "schema" else engine.execution_options(schema_translate_map={None: "other"})
    options: dict[str, Any] = {"schema": "other"} if way == "schema" else {}
    if way == "map":
        Base.metadata.create_all(sending)
    with TransactionProducer(memory.url, group=unique, engine=engine, half_timeout=PATIENCE_SECONDS, **options) as one:
        lose_outcomes(one)
        ids = noted(one)
        with Session(sending) as session, session.begin():
            session.add(Order(item="x"))
            one.send(session, Message(unique, "x"))
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM other.half_message").scalar() == 1
            assert connection.exec_driver_sql("SELECT count(*) FROM main.half_message").scalar() == 0
        assert state_of(memory, ids["x"][0]) == "COMMITTED"
    inbox = Inbox(engine, schema="other")
    message = received()
    assert [inbox.run("g", message, lambda *_: None) for _ in range(2)] == [True, False]
    with pytest.raises(InvalidRequest, match="'nowhere'"):
        create_tables(engine, schema="nowhere")
    with TransactionProducer(memory.url, group=unique, engine=engine, schema="nowhere") as lost:
        with pytest.raises(BindingRefused, match="'nowhere' has no table"), Session(engine) as session, session.begin():
            lost.send(session, Message(unique, "x"))
    engine.dispose()


@pytest.mark.long
def test_tables_of_two_versions(tenants: Tenants, producing: Callable[..., TransactionProducer]) -> None:
    """A tenant whose tables were made by an older version, beside one with the column digest. What a guess made wrong
    is refused once, before the commit, and may be repeated."""
    new, old = tenants.make("t1"), tenants.make("t2")
    tenants.run(f"ALTER TABLE {tenants.quoted(old)}.half_message DROP COLUMN digest")
    producer = producing(tenants.engine, answer_checks=False)
    order(tenants, producer, new, "session", "x")
    with pytest.raises(TransactionRefused, match="repeat") as refused:
        order(tenants, producer, old, "session", "x")
    assert refused.value.retryable
    order(tenants, producer, old, "session", "x")
    for schema in (old, new):
        for way in ("session", "engine", "session"):
            order(tenants, producer, schema, way, "x")
    assert [len(tenants.rows(schema)) for schema in (new, old)] == [4, 4]


@pytest.mark.long
def test_a_row_in_another_schema_than_its_source(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer
) -> None:
    """As an older SDK left it: the half has the source of the first schema that its producer met."""
    home, one = tenants.make("home"), tenants.make("t1")
    producer = producing(tenants.engine, mode="outbox", answer_checks=False)
    order(tenants, producer, one, "session", "x")
    (transaction_id, _), *_ = tenants.rows(one)
    tenants.run(f"UPDATE {tenants.quoted(one)}.half_message SET shards = 'main'")
    asking = producing(tenants.engine)
    asking.outgoing.store_half(transaction_id, [pack(Message(asking.group, "x"))], tenants.source(home))
    asking.outgoing.store_half(dead := new_id(), [pack(Message(asking.group, "x"))], tenants.source(home))
    assert state_of(memory, transaction_id) == "COMMITTED"
    assert state_of(memory, dead) == "ROLLED_BACK"
