"""One slot of a PostgreSQL serves many schemas; and a bridge of one schema leaves the others to their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.binlog_bridge import announcing
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Purged, Unfit
from notify.client.tables.definitions import notify_refused
from notify.errors import InvalidRequest
from notify.runtime.databases import within_schema
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import numbers, once, outbox, poison
from tests.support.groups import subscribe
from tests.support.wal import slot


class Schemas:
    """Schemas of one database, whose names need quotes."""

    def __init__(self, url: str) -> None:
        self._url = sa.make_url(url)
        self.engine = sa.create_engine(url)

    def add(self, name: str) -> str:
        """The address of the database, whose sessions use a new schema."""
        with self.engine.begin() as connection:
            connection.exec_driver_sql(f'CREATE SCHEMA "{name}"')
        return self.url(name)

    def url(self, name: str) -> str:
        options = {"options": f'-c search_path="{name}"'}
        return self._url.update_query_dict(options).render_as_string(hide_password=False)


@pytest.fixture
def schemas(wal_url: str) -> Iterator[Schemas]:
    made = Schemas(wal_url)
    yield made
    made.engine.dispose()


@pytest.fixture
def owner(schemas: Schemas) -> Iterator[str]:
    """The database's address for a role that owns its tables, and is no superuser."""
    database = schemas.engine.url.database
    with schemas.engine.begin() as connection:
        connection.exec_driver_sql("CREATE ROLE tenants_owner LOGIN REPLICATION")
        connection.exec_driver_sql(f'GRANT CREATE ON DATABASE "{database}" TO tenants_owner')
    yield schemas.engine.url.set(username="tenants_owner").render_as_string(hide_password=False)
    with schemas.engine.begin() as connection:
        connection.exec_driver_sql("DROP OWNED BY tenants_owner CASCADE")
        connection.exec_driver_sql("DROP ROLE tenants_owner")


def tenants(url: str, server: ServerProcess, unique: str) -> Bridge:
    return Bridge([url], server.url, name=f"tenants-{unique}", schemas="Tenant-*")


@pytest.mark.long
def test_one_slot_serves_schemas_that_come_and_go(
    schemas: Schemas, wal_url: str, server: ServerProcess, unique: str
) -> None:
    topics = [f"{unique}.{n}" for n in range(3)]
    for topic in topics:
        subscribe(server.url, topic, topic)
    for name, topic in zip(("Tenant-a", "Tenant-b"), topics, strict=False):
        outbox(schemas.add(name), topic, range(8))
    outbox(schemas.add("other"), topics[0], range(100, 104))
    bridge = tenants(wal_url, server, unique)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.stored == 12, "what is there to be moved")
        outbox(schemas.add("Tenant-c"), topics[2], range(8))
        bridging.until(lambda: bridge.totals.rows == 6, "the new schema's to be moved")
        with schemas.engine.begin() as connection:
            connection.exec_driver_sql('DROP SCHEMA "Tenant-a" CASCADE')
        outbox(schemas.url("Tenant-b"), topics[1], range(8, 12))
        bridging.until(lambda: bridge.totals.rows == 9, "the others to be moved on")
    assert slot(schemas.engine)["slot_name"].startswith("notify_tenants")
    assert once(tenants(wal_url, server, unique)).totals.rows == 0
    for topic, most in zip(topics, (8, 12, 8), strict=True):
        wanted = [n for n in range(most) if n % 4 != 3]
        assert numbers(server, topic, len(wanted)) == wanted


def test_what_other_schemas_wrote_before_is_not_passed_over(
    schemas: Schemas, wal_url: str, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    urls = [schemas.add("one-a"), schemas.add("two-a")]
    for url in urls:
        outbox(url, f"{unique}.empty", range(0))

    def bridge(patterns: str) -> Bridge:
        return Bridge([wal_url], server.url, name=f"tenants-{unique}", schemas=patterns)

    once(bridge("one-*"))
    for n, url in enumerate(urls):
        outbox(url, unique, range(20 * n, 20 * n + 2))
    once(bridge("one-*"))
    with pytest.raises(InvalidRequest, match=r"has read one-\* so far, and now is to read \*-a: .* --backfill-from"):
        once(bridge("*-a"))
    asyncio.run(bridge("*-a").run(once=True, fill=True, fill_since_us=1))
    once(bridge("one-a"))  # no more than before
    assert sorted(numbers(server, unique, 4)) == [0, 1, 20, 21]


def test_the_options_of_the_environment_hold_for_the_bridge_too(
    schemas: Schemas, wal_url: str, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PGOPTIONS led the producers to one schema, and the bridge read another one."""
    subscribe(server.url, unique, unique)
    outbox(wal_url, f"{unique}.public", range(0))
    schemas.add("shop")
    monkeypatch.setenv("PGOPTIONS", "-c search_path=shop")
    outbox(wal_url, unique, range(3))
    once(Bridge([wal_url], server.url))
    outbox(wal_url, unique, range(4, 6))
    once(Bridge([wal_url], server.url))
    assert numbers(server, unique, 5) == [0, 1, 2, 4, 5]


def test_the_options_of_a_service_hold_for_the_bridge_too(
    schemas: Schemas, wal_url: str, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the bridge's own hid them, so that it read another schema than the producers wrote to."""
    subscribe(server.url, unique, unique)
    outbox(wal_url, f"{unique}.public", range(0))
    schemas.add("shop")
    at = sa.make_url(wal_url)
    entry = ("[shop]", f"host={at.host}", f"port={at.port}", f"user={at.username}", f"dbname={at.database}")
    (tmp_path / "services").write_text("\n".join([*entry, "options=-c search_path=shop"]))
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    url = "postgresql+psycopg://?service=shop"
    outbox(url, unique, range(3))
    once(Bridge([url], server.url))
    outbox(url, unique, range(4, 6))
    once(Bridge([url], server.url))
    assert numbers(server, unique, 5) == [0, 1, 2, 4, 5]


@pytest.mark.long
def test_a_bridge_of_one_schema_leaves_the_others(
    schemas: Schemas, wal_url: str, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    for first, name in ((0, "Tenant-a"), (10, "Tenant-b")):
        outbox(schemas.add(name), unique, range(first, first + 3))
    assert once(Bridge([wal_url], server.url, schema="Tenant-b")).totals.stored == 2
    outbox(schemas.url("Tenant-a"), unique, range(3, 6))
    outbox(schemas.url("Tenant-b"), unique, range(13, 16))
    # The bridge that the address alone leads to a schema is the same one.
    assert once(Bridge([schemas.url("Tenant-b")], server.url)).totals.rows == 2
    assert numbers(server, unique, 4) == [10, 12, 13, 14]


@pytest.mark.long
def test_refused_transactions_are_listed_in_their_own_schema(
    schemas: Schemas, wal_url: str, server: ServerProcess, unique: str
) -> None:
    names = ("Tenant-a", "Tenant-b")
    urls = [schemas.add(name) for name in names]
    for url in urls:
        outbox(url, unique, range(1))
    once(tenants(wal_url, server, unique))
    bad = {}
    for name, url in zip(names, urls, strict=True):
        engine = sa.create_engine(url)
        bad[name] = poison(engine)
        engine.dispose()
    assert once(tenants(wal_url, server, unique)).totals.refused == 2
    for name in names:
        with within_schema(schemas.engine, name).connect() as connection:
            assert connection.scalars(sa.select(notify_refused.c.transaction_id)).all() == [bad[name]]


@pytest.mark.long
def test_a_later_schema_that_no_publication_has_stops_a_bridge_that_is_no_superuser(
    schemas: Schemas, owner: str, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy that the error names mends it, and nothing is lost or doubled."""
    monkeypatch.setattr(announcing, "ANNOUNCE_SECONDS", 0.1)
    subscribe(server.url, unique, unique)
    mine = Schemas(owner)
    outbox(mine.add("Tenant-a"), unique, range(4))
    once(tenants(owner, server, unique))
    bridge = tenants(owner, server, unique)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.connections, "the bridge to read")
        outbox(mine.add("Tenant-b"), unique, range(4, 8))
        with pytest.raises(Unfit, match=r"has nothing of .Tenant-b.*DROP PUBLICATION.*--backfill") as stopped:
            bridging.result()
    with pytest.raises(Unfit, match="has nothing of"):
        once(tenants(owner, server, unique))
    statement = str(stopped.value).partition(": DROP")[2].partition(", and start")[0]
    with mine.engine.begin() as connection:
        connection.exec_driver_sql(f"DROP{statement}")
    once(tenants(owner, server, unique), fill=True)
    outbox(mine.url("Tenant-b"), unique, range(8, 12))
    assert once(tenants(owner, server, unique)).totals.rows == 3
    assert sorted(numbers(server, unique, 9)) == [n for n in range(12) if n % 4 != 3]
    mine.engine.dispose()


@pytest.mark.long
def test_a_table_that_was_put_back_into_the_publication_while_it_was_away_stops_it(
    schemas: Schemas, owner: str, server: ServerProcess, unique: str
) -> None:
    """The slot lacks the rows of the time in between, unlike those of a schema that came meanwhile."""
    subscribe(server.url, unique, unique)
    mine = Schemas(owner)

    def publish(change: str, schema: str) -> None:
        with mine.engine.begin() as connection:
            name = connection.exec_driver_sql("SELECT pubname FROM pg_publication").scalar()
            connection.exec_driver_sql(f'ALTER PUBLICATION "{name}" {change} TABLE "{schema}".half_message')

    outbox(mine.add("Tenant-a"), unique, range(4))
    once(tenants(owner, server, unique))
    outbox(mine.add("Tenant-b"), unique, range(0))
    publish("ADD", "Tenant-b")
    outbox(mine.url("Tenant-b"), unique, range(4, 8))
    assert once(tenants(owner, server, unique)).totals.rows == 3
    publish("DROP", "Tenant-a")
    outbox(mine.url("Tenant-a"), unique, range(8, 12))
    publish("ADD", "Tenant-a")
    for _ in range(2):
        with pytest.raises(Purged, match=r"what the source publishes was changed.*Tenant-a.*--backfill"):
            once(tenants(owner, server, unique))
    once(tenants(owner, server, unique), fill=True)
    assert sorted(numbers(server, unique, 9)) == [n for n in range(12) if n % 4 != 3]
    mine.engine.dispose()
