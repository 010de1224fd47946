"""One bridge of many schemas: one binlog and one position, the tables and lists of each schema; and rows that a dump
brings back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.binlog.source import findings
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.purge import purge_moved
from notify.client.tables.definitions import half_message
from notify.errors import InvalidRequest
from notify.movers import refused
from notify.movers.refused import retry
from notify.testing.binlog_server import BinlogServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import binlog_reader, grant, numbers, once, outbox
from tests.support.groups import subscribe
from tests.support.returned import DAYS, bring_back


class Schemas:
    """Databases of one server, whose names begin with `prefix`."""

    def __init__(self, server: BinlogServer, url: str, prefix: str) -> None:
        self._server = server
        self.server_url = sa.make_url(url).set(database="").render_as_string(hide_password=False)
        self._url = sa.make_url(url)
        self.prefix = prefix
        self._made: list[str] = []

    def add(self, name: str) -> str:
        """The URL of a new database."""
        schema = self.prefix + name
        self._server.execute(f"CREATE DATABASE {schema} CHARACTER SET utf8mb4")
        self._made.append(schema)
        return self._url.set(database=schema).render_as_string(hide_password=False)

    def drop(self) -> None:
        for schema in self._made:
            self._server.execute(f"DROP DATABASE {schema}")


@pytest.fixture
def schemas(binlog_server: BinlogServer, binlog_url: str, unique: str) -> Iterator[Schemas]:
    made = Schemas(binlog_server, binlog_url, f"{unique}_")
    yield made
    made.drop()


def bridge_of(schemas: Schemas, server: ServerProcess, name: str = "tenants") -> Bridge:
    return Bridge([schemas.server_url], server.url, name=f"{schemas.prefix}{name}", schemas=f"{schemas.prefix}*")


def until(bridge: Bridge, is_done: Callable[[], object]) -> None:
    """Run a bridge until something is so."""
    with in_background(bridge.run()) as bridging:
        bridging.until(is_done, "the bridge to have done it")


@pytest.mark.long
def test_one_bridge_serves_schemas_that_come_and_go(schemas: Schemas, server: ServerProcess, unique: str) -> None:
    topics = [f"{unique}.{n}" for n in range(3)]
    for topic in topics:
        subscribe(server.url, topic, topic)
    urls = [schemas.add("a"), schemas.add("b")]
    for url, topic in zip(urls, topics, strict=False):
        outbox(url, topic, range(20))
    bridge = bridge_of(schemas, server)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.rows == 30, "what is there to be moved")
        outbox(schemas.add("c"), topics[2], range(20))
        bridging.until(lambda: bridge.totals.rows == 45, "the new schema's to be moved")
    assert once(bridge_of(schemas, server)).totals.rows == 0, "there is one position"
    for topic in topics:
        assert numbers(server, topic, 15) == [n for n in range(20) if n % 4 != 3]


@pytest.mark.long
def test_a_bridge_of_one_schema_leaves_the_others(schemas: Schemas, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    outbox(schemas.add("a"), unique, range(3))
    outbox(schemas.add("b"), unique, range(10, 13))
    once(Bridge([schemas.server_url], server.url, schema=f"{schemas.prefix}b"))
    assert numbers(server, unique, 2) == [10, 12]


def test_what_other_schemas_wrote_before_is_not_passed_over(
    schemas: Schemas, server: ServerProcess, unique: str
) -> None:
    """A bridge that was given more schemas, or another one, left out what these had written up to its position."""
    subscribe(server.url, unique, unique)
    urls = [schemas.add("a1"), schemas.add("b1")]

    def bridge(patterns: str) -> Bridge:
        patterns = ",".join(schemas.prefix + each for each in patterns.split(","))
        return Bridge([schemas.server_url], server.url, name=f"{unique}-tenants", schemas=patterns)

    outbox(urls[0], unique, range(2))
    once(bridge("a*"))
    outbox(urls[1], unique, range(12, 14))
    outbox(urls[0], unique, range(2, 3))
    once(bridge("a1,a2"))  # no more than before
    for wider in ("*", "b*", "a1,a*"):
        with pytest.raises(InvalidRequest, match=r"--backfill-from the time"):
            once(bridge(wider))
        with pytest.raises(InvalidRequest, match=r"--backfill-from the time"):
            once(bridge(wider), fill=True)
    once(bridge("*"), fill=True, fill_since_us=1)
    outbox(urls[1], unique, range(14, 15))
    once(bridge("*"))
    assert sorted(numbers(server, unique, 6)) == [0, 1, 2, 12, 13, 14]


def test_what_a_table_got_before_it_was_moved_to_another_schema_is_not_passed_over(
    schemas: Schemas, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """A database gets another name in MySQL by a RENAME of each table; its rows are logged under the old name."""
    subscribe(server.url, unique, unique)
    old, new = schemas.add("old"), schemas.add("new")
    outbox(old, unique, range(1))
    once(Bridge([old], server.url))
    outbox(old, unique, range(1, 3))
    names = [sa.make_url(url).database for url in (old, new)]
    tables = ("half_message", "notify_source", "notify_inbox", "notify_refused", "orders")
    binlog_server.execute(*(f"RENAME TABLE {names[0]}.{table} TO {names[1]}.{table}" for table in tables))
    with pytest.raises(InvalidRequest, match=rf"has read {names[0]} so far, and now is to read {names[1]}"):
        once(Bridge([new], server.url))
    once(Bridge([new], server.url), fill=True, fill_since_us=1)
    assert numbers(server, unique, 3) == [0, 1, 2]


@pytest.mark.long
def test_views_for_reports_are_no_schema(
    schemas: Schemas, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """The bridge refused to start, since a view may hide rows."""
    subscribe(server.url, unique, unique)
    outbox(url := schemas.add("b"), unique, range(3))
    reports, shop = sa.make_url(schemas.add("a")).database, sa.make_url(url).database
    for table in ("half_message", "notify_source"):
        binlog_server.execute(f"CREATE VIEW {reports}.{table} AS SELECT * FROM {shop}.{table}")
    once(bridge_of(schemas, server))
    assert numbers(server, unique, 3) == [0, 1, 2]


def test_several_schemas_need_a_name(schemas: Schemas, server: ServerProcess) -> None:
    for wrong, why in (
        ({"schemas": "a*"}, "--dsn NAME=URL"),
        ({"schemas": ","}, "at least one schema"),
        ({"schema": "a", "schemas": "a*"}, "not both"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            once(Bridge([schemas.server_url], server.url, **wrong))


@pytest.mark.long
@pytest.mark.parametrize(
    "fill", [pytest.param(False, id="binlog"), pytest.param(True, id="backfill", marks=pytest.mark.long)]
)
def test_each_schema_has_its_own_list(schemas: Schemas, server: ServerProcess, unique: str, fill: bool) -> None:
    subscribe(server.url, unique, unique)
    urls = [schemas.add("a"), schemas.add("b")]
    for url in urls:
        outbox(url, unique, range(1))
    engines = [sa.create_engine(url) for url in urls]
    for n in (1, 2):
        bring_back(engines[1], "no such topic", age_seconds=0, body=b'{"n": %d}' % n)
    first = once(bridge_of(schemas, server), fill=fill)
    assert (first.totals.stored, first.totals.refused) == (2, 2)
    assert [listed(engine) for engine in engines] == [[], ["WAITING", "WAITING"]]
    with engines[1].begin() as connection:
        connection.execute(half_message.update().values(topic=unique).where(half_message.c.topic != unique))
        ids = [row["transaction_id"] for row in refused.listed(connection)]
        assert retry(connection, ids, "mended") == ids
    until(bridge_of(schemas, server), lambda: not listed(engines[1]))
    assert sorted(numbers(server, unique, 4)) == [0, 0, 1, 2]
    name = f"{schemas.prefix}tenants"
    for engine, count in zip(engines, (1, 1), strict=True):  # two of b are marked
        once(bridge_of(schemas, server))  # reads its own marks
        assert asyncio.run(purge_moved(engine, server.url, older_than=0, name=name)) == count
        engine.dispose()


def listed(engine: sa.Engine) -> list[str]:
    if not sa.inspect(engine).has_table("notify_refused"):
        return []
    with engine.connect() as connection:
        return [row["state"] for row in refused.listed(connection)]


def test_a_right_that_a_schema_lacks_is_said(schemas: Schemas, binlog_server: BinlogServer, unique: str) -> None:
    urls = [schemas.add("a"), schemas.add("b")]
    for url in urls:
        outbox(url, unique, range(1))
    names = [str(sa.make_url(url).database) for url in urls]
    with binlog_reader(binlog_server, urls[0], unique, {"*": "ALL"}) as reader:
        grant(binlog_server, urls[1], unique, {"*": "SELECT"})
        engine = sa.create_engine(sa.make_url(reader).set(database=""))
        with engine.connect() as connection:
            lacking = [f for f in findings(connection, 4711, names) if " lacks " in f.what]
        engine.dispose()
    assert lacking and all(f"`{names[1]}`.half_message" in f.what or "notify_refused" in f.what for f in lacking)


@pytest.mark.long
def test_rows_that_a_dump_brings_back_are_not_sent_again(schemas: Schemas, server: ServerProcess, unique: str) -> None:
    """The queue forgets ids after a week: they were published a second time."""
    subscribe(server.url, unique, unique)
    url = schemas.add("a")
    outbox(url, unique, range(1))
    engine = sa.create_engine(url)
    old = bring_back(engine, unique, age_seconds=20 * DAYS, body=b'{"n": 100}')
    bring_back(engine, unique, age_seconds=3 * DAYS, body=b'{"n": 101}')
    bridge = once(Bridge([url], server.url))
    assert (bridge.totals.stored, bridge.totals.refused) == (2, 1)
    with engine.connect() as connection:
        (row,) = refused.listed(connection)
    assert (row["transaction_id"], row["code"]) == (old, "returned") and "notify refused retry" in row["detail"]
    with engine.begin() as connection:
        retry(connection, [old], "it was never sent")
    until(Bridge([url], server.url), lambda: not listed(engine))
    assert numbers(server, unique, 3) == [0, 101, 100]
    engine.dispose()
