"""Relays of schemas: each moves its own rows, one relay moves those of many, and no schema holds up another."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.definitions import half_message
from notify.errors import InvalidRequest, Unavailable
from notify.movers import refused
from notify.movers.relay import relay as relays
from notify.movers.relay.leases import BUCKETS, MySqlLease, PostgreSqlLeases
from notify.movers.relay.relay import Relay
from notify.movers.relay.sources import Sources
from notify.protocol import ids
from notify.runtime.databases import database_now, within_schema
from notify.runtime.schemas import AT_ONCE
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.groups import bodies, drain, subscribe
from tests.support.http import admin
from tests.support.kafka import committed
from tests.support.shop import make_engine

KINDS = ("postgresql", "mysql", pytest.param("mariadb", marks=pytest.mark.long))
LONGEST_SECONDS = 600.0
"""How long 20,000 messages may take on a loaded machine."""


class Tenants:
    """Schemas of one PostgreSQL database, or databases of one MySQL, whose names begin with `prefix`."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url = url
        self.prefix = prefix
        self.engine = make_engine(url)
        self._kind = self.engine.dialect.name
        self.names: list[str] = []
        self._sent: dict[str, int] = defaultdict(int)

    def add(self, *names: str) -> list[str]:
        """Make schemas with Notify's tables; their whole names."""
        added = []
        for name in names:
            schema = f"{self.prefix}{name}"
            with self.engine.begin() as connection:
                word = "SCHEMA" if self._kind == "postgresql" else "DATABASE"
                connection.exec_driver_sql(f"CREATE {word} {schema}")
            own = self.within(schema)
            create_tables(own)
            own.dispose()
            added.append(schema)
        self.names += added
        return added

    def within(self, schema: str) -> sa.Engine:
        """An engine whose connections find the tables of a schema without its name."""
        if self._kind != "postgresql":
            return make_engine(sa.make_url(self.url).set(database=schema).render_as_string(hide_password=False))
        url = sa.make_url(self.url).update_query_dict({"options": f"-csearch_path={schema}"})
        return make_engine(url.render_as_string(hide_password=False))

    def send(self, schema: str, topic: str, count: int, keys: int = 10, **fields: Any) -> None:
        """Insert transactions of one message each; a body says schema, key and number."""
        first = self._sent[schema]
        self._sent[schema] += count
        row = {
            "message_no": 0, "producer_group": "g", "mode": "outbox", "state": "COMMITTED", "shards": "",
            "topic": topic, "relayed": 0,
        } | fields  # fmt: skip
        rows = [
            row
            | {"transaction_id": ids.to_text(ids.new_id()), "key": f"k{n % keys}"}
            | {"body": f"{schema} k{n % keys} {n}".encode()}
            for n in range(first, first + count)
        ]
        with within_schema(self.engine, schema).begin() as connection:
            for begin in range(0, count, 500):
                # One statement for a row: their times must rise.
                connection.execute(half_message.insert().values(created_at=database_now()), rows[begin : begin + 500])

    def waiting(self, schemas: Sequence[str] = ()) -> int:
        """How many rows wait in these schemas, or in all."""
        count = 0
        for schema in schemas or self.names:
            with within_schema(self.engine, schema).connect() as connection:
                waiting = sa.select(sa.func.count()).where(half_message.c.relayed == 0)
                count += int(connection.scalar(waiting) or 0)
        return count

    def drop(self, schema: str) -> None:
        self.names.remove(schema)
        with self.engine.begin() as connection:
            word = f"SCHEMA {schema} CASCADE" if self._kind == "postgresql" else f"DATABASE {schema}"
            connection.exec_driver_sql(f"DROP {word}")

    def close(self) -> None:
        if self._kind != "postgresql":
            for name in list(self.names):
                self.drop(name)
        self.engine.dispose()


@contextlib.contextmanager
def tenants_of(kind: str, urls: Mapping[str, str], directory: Path, prefix: str) -> Iterator[Tenants]:
    with empty_database(kind, urls, directory) as url:
        made = Tenants(url, prefix)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(params=KINDS)
def tenants(
    request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path: Path, unique: str
) -> Iterator[Tenants]:
    with tenants_of(request.param, database_urls, tmp_path, f"{unique}_") as made:
        yield made


@pytest.fixture
def postgresql(database_urls: Mapping[str, str], tmp_path: Path, unique: str) -> Iterator[Tenants]:
    with tenants_of("postgresql", database_urls, tmp_path, f"{unique}_") as made:
        yield made


def until(running: Sequence[Relay], check: Callable[[], bool], waiting_for: str) -> None:
    """Run relays until something holds."""
    with ExitStack() as stack:
        relaying = [stack.enter_context(in_background(relay.run(interval=0.05))) for relay in running]
        eventually(lambda: any(r.has_ended for r in relaying) or check(), waiting_for, seconds=LONGEST_SECONDS)


def check_order(came: Sequence[str], expected: Mapping[str, int]) -> None:
    """Every message of every schema came once, and in order within its key."""
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for body in came:
        schema, key, number = body.split()
        numbers[schema, key].append(int(number))
    assert all(each == sorted(each) for each in numbers.values())
    for schema, count in expected.items():
        all_of_it = sorted(n for (of, _), each in numbers.items() if of == schema for n in each)
        assert all_of_it == list(range(count)), schema


def two_services(tenants: Tenants, server: ServerProcess, topic: str, count: int) -> None:
    """Two services in two schemas with a relay each."""
    subscribe(server.url, topic, topic)
    one, other = tenants.add("one", "other")
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda schema: tenants.send(schema, topic, count), (one, other)))
    engines = [tenants.within(schema) for schema in (one, other)]
    relays_of_each = [Relay(engines[0], server.url), Relay(engines[1], server.url)]
    until(relays_of_each, lambda: not tenants.waiting(), "both to be moved")
    for engine in engines:
        engine.dispose()
    check_order(bodies(drain(server.url, topic, topic, 2 * count)), {one: count, other: count})


def many_tenants(tenants: Tenants, server: ServerProcess, topic: str, schemas: int, count: int, large: int) -> None:
    """One relay of many tenants, the first of which has far more messages."""
    subscribe(server.url, topic, topic)
    names = tenants.add(*[f"t{n}" for n in range(schemas)])
    counts = dict.fromkeys(names, count) | {names[0]: large}
    for name, its_count in counts.items():
        tenants.send(name, topic, its_count)
    relay = Relay(tenants.engine, server.url, schemas=f"{tenants.prefix}t*")
    until([relay], lambda: not tenants.waiting(names[1:]), "the small ones to be moved")
    assert large <= 500 or tenants.waiting(names[:1]), "the others waited until the large one was moved"
    total = asyncio.run(relay_once(tenants, server.url))
    assert total.refused == 0
    check_order(bodies(drain(server.url, topic, topic, sum(counts.values()))), counts)


def relay_once(tenants: Tenants, url: str) -> Any:
    return Relay(tenants.engine, url, schemas=f"{tenants.prefix}*").run(once=True)


@pytest.mark.long
def test_two_services_in_two_schemas_have_a_relay_each(tenants: Tenants, server: ServerProcess, unique: str) -> None:
    """They shared the locks of one database: each moved half of its rows, and the others waited without a word."""
    two_services(tenants, server, unique, 300)


@pytest.mark.long
def test_one_relay_serves_many_tenants(tenants: Tenants, server: ServerProcess, unique: str) -> None:
    many_tenants(tenants, server, unique, 5, 40, 3000)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["postgresql", "mysql", "mariadb"])
def test_services_and_tenants_of_a_large_database(
    kind: str, database_urls: Mapping[str, str], server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    with tenants_of(kind, database_urls, tmp_path, f"{unique}_") as tenants:
        two_services(tenants, server, unique, 10_000)
    with tenants_of(kind, database_urls, tmp_path, f"{unique}2_") as tenants:
        many_tenants(tenants, server, unique + "2", 50, 200, 10_000)


@pytest.mark.long
def test_tenants_come_and_go(
    tenants: Tenants, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LOOK_SECONDS", 0.05)
    subscribe(server.url, unique, unique)
    first, dropped = tenants.add("a", "b")
    relay = Relay(tenants.engine, server.url, schemas=f"{tenants.prefix}*")
    with in_background(relay.run(interval=0.05)) as relaying:
        tenants.send(first, unique, 3)
        tenants.send(dropped, unique, 2)
        relaying.until(lambda: relay.total.sent == 5, "both to be moved")
        tenants.drop(dropped)
        (later,) = tenants.add("c")
        tenants.send(later, unique, 4)
        relaying.until(lambda: relay.total.sent == 9, "the new one to be moved")
        # A schema that is made again is another one: its locks are those of the new one.
        (again,) = tenants.add("b")
        tenants.send(again, unique, 1)
        relaying.until(lambda: relay.total.sent == 10, "the one made again to be moved")
    assert relay.total.refused == 0


@pytest.mark.long
def test_a_tenant_that_cannot_be_read_holds_up_no_other(tenants: Tenants, server: ServerProcess, unique: str) -> None:
    """One is locked by a migration, and the table of one lacks a column."""
    subscribe(server.url, unique, unique)
    names = tenants.add("a", "b", "c", "d")
    for name in names:
        tenants.send(name, unique, 5)
    locking = {"postgresql": f"LOCK TABLE {names[1]}.half_message IN ACCESS EXCLUSIVE MODE"}.get(
        tenants.engine.dialect.name, f"LOCK TABLES {names[1]}.half_message WRITE"
    )
    with tenants.engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {names[2]}.half_message DROP COLUMN tag")
    relay = Relay(tenants.engine, server.url, schemas=f"{tenants.prefix}*")
    with tenants.engine.connect() as other:
        other.exec_driver_sql(locking)
        until([relay], lambda: relay.total.sent == 10, "the others to be moved")
        other.invalidate()
    with pytest.raises(Unavailable, match=r"1 schemas could not be moved"):
        asyncio.run(relay_once(tenants, server.url))
    assert tenants.waiting([names[1]]) == 0 and tenants.waiting([names[2]]) == 5


def test_a_tenant_whose_topic_takes_nothing_holds_up_no_other(
    tenants: Tenants, server: ServerProcess, unique: str
) -> None:
    """A relay that runs once ended at the first one, in the order of names, each time."""
    subscribe(server.url, unique, unique)
    subscribe(server.url, unique + "f", unique + ".full")
    admin(server.url, "PUT", f"topics/{unique}.full", {"backlog": 1})
    full, other = tenants.add("a", "b")
    tenants.send(full, unique + ".full", 20, keys=1)
    tenants.send(other, unique, 5)
    with pytest.raises(Unavailable, match=r"1 schemas could not be moved"):
        asyncio.run(relay_once(tenants, server.url))
    assert tenants.waiting([other]) == 0 and tenants.waiting([full]) > 0


@pytest.mark.long
def test_a_list_of_refused_messages_beside_a_locked_source_holds_up_no_other(
    tenants: Tenants, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    listed, other = tenants.add("a", "b")
    tenants.send(listed, "no name", 1)
    assert asyncio.run(relay_once(tenants, server.url)).refused == 1
    tenants.send(other, unique, 5)
    locking = {"postgresql": f"LOCK TABLE {listed}.notify_source IN ACCESS EXCLUSIVE MODE"}.get(
        tenants.engine.dialect.name, f"LOCK TABLES {listed}.notify_source WRITE"
    )
    relay = Relay(tenants.engine, server.url, schemas=f"{tenants.prefix}*")
    with tenants.engine.connect() as locker:
        locker.exec_driver_sql(locking)
        until([relay], lambda: relay.total.sent == 5, "the other to be moved")
        locker.invalidate()


@pytest.mark.long
def test_relays_of_one_schema_and_of_all_exclude_each_other(
    tenants: Tenants, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    names = tenants.add("a", "b")
    for name in names:
        tenants.send(name, unique, 400, keys=3)
    own = tenants.within(names[0])
    engines = [make_engine(tenants.url) for _ in range(2)]
    running = [Relay(own, server.url)] + [Relay(each, server.url, schemas=f"{tenants.prefix}*") for each in engines]
    until(running, lambda: not tenants.waiting(), "all to be moved")
    for engine in [own, *engines]:
        engine.dispose()
    check_order(bodies(drain(server.url, unique, unique, 800)), dict.fromkeys(names, 400))


@pytest.mark.long
def test_locks_are_a_schemas(postgresql: Tenants) -> None:
    one, other = postgresql.add("one", "other")
    leases = [PostgreSqlLeases(make_engine(postgresql.url)) for _ in range(3)]
    try:
        assert leases[0].renew(one) and leases[1].renew(other) and leases[0].all() and leases[1].all()
        assert not leases[2].renew(one)  # it is counted from now on
        assert leases[0].renew(one) and leases[2].renew(one) and len(leases[0].held) == BUCKETS / 2
        assert leases[1].renew(other) and leases[1].all()
        leases[2].leave()
        assert leases[0].renew(one) and leases[0].all()
        assert leases[0].renew(other) is False and leases[2].renew(one) and leases[2].all()
    finally:
        for each in leases:
            each.close()


def test_a_named_lock_is_a_databases(database_urls: Mapping[str, str], tmp_path: Path, unique: str) -> None:
    with tenants_of("mysql", database_urls, tmp_path, f"{unique}_") as tenants:
        one, other = tenants.add("one", "other")
        leases = [MySqlLease(make_engine(tenants.url)) for _ in range(2)]
        try:
            assert leases[0].renew(one) and leases[0].renew(one) and leases[1].renew(other)
            assert not leases[1].renew(one)
            assert leases[0].renew(other), "the other one has left it"
            assert leases[1].renew(one)
        finally:
            for each in leases:
                each.close()


@pytest.mark.long
def test_a_look_into_hundreds_of_schemas_is_few_statements(postgresql: Tenants) -> None:
    names = postgresql.add("t0", "t1")
    sources = Sources(postgresql.engine, leases := PostgreSqlLeases(postgresql.engine), "relay", schemas="*")
    statements: list[str] = []
    try:
        sources.find()
        postgresql.send(names[1], "t", 1)
        for n in range(2 * AT_ONCE):  # schemas that were dropped since they were found
            sources.by_schema[f"gone{n}"] = sources.by_schema[names[0]]
        sa.event.listen(postgresql.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        seen = sources.look(names)
        assert (seen.waiting, seen.polled, seen.open) == ([names[1]], set(), set())
        assert len(statements) == 2
        assert set(sources.look(list(sources.by_schema)).waiting) >= {names[1]}
    finally:
        leases.close()


def test_schemas_that_cannot_be_served_are_said(postgresql: Tenants, server: ServerProcess) -> None:
    engine = postgresql.engine
    with pytest.raises(InvalidRequest, match="schema nowhere has neither"):
        asyncio.run(Relay(engine, server.url, schema="nowhere").run(once=True))
    with pytest.raises(Unavailable, match="no schema that matches"):
        asyncio.run(Relay(engine, server.url, schemas="nowhere_*").run(once=True))
    for wrong in ({"schema": "a", "schemas": "b"}, {"schemas": " , "}):
        with pytest.raises(InvalidRequest, match="name"):
            asyncio.run(Relay(engine, server.url, **wrong).run(once=True))


def test_a_schemas_refused_messages_are_its_own(tenants: Tenants, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    one, other = tenants.add("one", "other")
    tenants.send(one, "no name", 1)
    tenants.send(other, unique, 1)
    url = ("--url", server.url, "--dsn", tenants.url)
    code, said = cli("relay", *url, "--schemas", f"{tenants.prefix}*", "--once", "--json")
    assert (code, said) == (1, {"sent": 1, "refused": 1})
    listed = {}
    for name in (one, other):
        listed[name] = cli("refused", "list", "--dsn", tenants.url, "--schema", name, "--json")
    assert listed[one][0] == 1 and listed[one][1]["waiting"] == 1 and listed[other][1]["waiting"] == 0
    with within_schema(tenants.engine, one).begin() as connection:
        connection.execute(half_message.update().values(topic=unique))
    reason = ("--all", "--reason", "mended", "--json")
    assert cli("refused", "retry", "--dsn", tenants.url, "--schema", one, *reason)[0] == 0
    assert cli("relay", *url, "--schema", one, "--once", "--json") == (0, {"sent": 1, "refused": 0})
    with within_schema(tenants.engine, one).connect() as connection:
        assert refused.count(connection) == 0


@pytest.mark.long
def test_many_tenants_over_kafka(
    postgresql: Tenants, kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each schema is a source with a position of its own, and few publishers are kept open."""
    monkeypatch.setattr(relays, "MOST_SINKS", 1)
    names = postgresql.add("a", "b", "c")
    for _ in range(2):
        for name in names:
            postgresql.send(name, unique, 20)
        total = asyncio.run(relay_once(postgresql, kafka_url))
        assert (total.sent, total.refused) == (60, 0)
    came = [message.value().decode() for message in committed(kafka_url, unique, 120)]
    check_order(came, dict.fromkeys(names, 40))
