"""The database of an exploration begins each run as it was, whatever its tables are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer, create_tables
from notify.testing.explored_database import ExploredDatabase
from notify.testing.statements import execute
from tests.support.databases import MOST, empty_database

_POSTGRESQL = (
    "CREATE SCHEMA tenant",
    "CREATE TYPE mood AS ENUM ('ok', 'bad')",
    "CREATE TYPE spot AS (x int, y int)",
    "CREATE TABLE documents (id int GENERATED ALWAYS AS IDENTITY, j json, b jsonb, "
    "twice int GENERATED ALWAYS AS (id * 2) STORED)",
    "INSERT INTO documents (j, b) VALUES ('{\"b\": 1, \"a\": 2}', 'null'), (NULL, '[1.10]')",
    "CREATE TABLE odd (m mood[], u uuid, i inet, r int4range, b bytea, v interval, n numeric, t timestamptz, d date, "
    'p spot, w tsvector, c char(5), "a %%b:c""" text)',
    "INSERT INTO odd VALUES ('{ok,bad}', '019aa4b7-0000-7000-8000-000000000000', '10.0.0.1', '[1,5)', '\\x00ff', "
    "'1 mon 2 days', 1.10, 'infinity', '-infinity', '(1,2)', 'a b', 'x', '50%% :x')",
    "CREATE TABLE parted (id int, at date) PARTITION BY RANGE (at)",
    "CREATE TABLE parted_2026 PARTITION OF parted FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
    "INSERT INTO parted VALUES (1, '2026-05-05')",
    "CREATE TABLE parent (id int)",
    "CREATE TABLE child (more int) INHERITS (parent)",
    "INSERT INTO parent VALUES (1)",
    "INSERT INTO child VALUES (2, 3)",
    "CREATE TABLE tenant.orders (id int)",
    "INSERT INTO tenant.orders VALUES (1)",
    "CREATE TABLE persons (id int PRIMARY KEY, boss int REFERENCES persons)",
    "INSERT INTO persons VALUES (2, NULL), (1, 2)",
    "UPDATE persons SET boss = 1 WHERE id = 2",
    "CREATE TABLE watched (id int)",
    "CREATE TABLE history (id int)",
    "CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN INSERT INTO history VALUES (1); RETURN coalesce(new, old); END $$",
    "CREATE TRIGGER noting AFTER INSERT OR DELETE ON watched FOR EACH ROW EXECUTE FUNCTION noted()",
    "INSERT INTO watched VALUES (1)",
    "CREATE VIEW seen AS SELECT * FROM watched",
    "CREATE MATERIALIZED VIEW kept AS SELECT * FROM watched",
)
_MYSQL = (
    "CREATE TABLE documents (id int AUTO_INCREMENT PRIMARY KEY, j json, twice int GENERATED ALWAYS AS (1 + 1) STORED)",
    "SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO'",
    "INSERT INTO documents (id, j) VALUES (0, '{\"a\": 1}'), (7, NULL)",
    "CREATE TABLE odd (i bit(9), p point, t time, y year, s set('a', 'b'), b blob, d date, at timestamp(6) NULL, "
    "`a %%b:c` varchar(9))",
    "SET SESSION time_zone = '+00:00'",
    "INSERT INTO odd VALUES (b'101', point(1, 2), '-100:00:01', 2020, 'a,b', x'00ff', '0000-00-00', "
    "'2026-10-25 01:30:00.123456', '50%% :x')",
    "CREATE TABLE a_history (id int)",
    "CREATE TABLE watched (id int)",
    "CREATE TRIGGER noting AFTER INSERT ON watched FOR EACH ROW INSERT INTO a_history VALUES (new.id)",
    "INSERT INTO watched VALUES (1)",
)
_SQLITE = (
    "CREATE TABLE documents (id integer PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
    "INSERT INTO documents (id) VALUES (3)",
    'CREATE TABLE odd (x, "a %b:c")',
    "INSERT INTO odd VALUES (x'00ff', '50% :x'), (1.5, NULL)",
    "CREATE TABLE a_history (id int)",
    "CREATE TABLE watched (id int)",
    "CREATE TRIGGER noting AFTER INSERT ON watched BEGIN INSERT INTO a_history VALUES (new.id); END",
    "INSERT INTO watched VALUES (1)",
)
_WORLDS = {"postgresql": _POSTGRESQL, "mysql": _MYSQL, "mariadb": _MYSQL, "sqlite": _SQLITE}
_READ = {
    "postgresql": (
        "SELECT documents::text FROM documents", "SELECT odd::text FROM odd", "SELECT parted::text FROM parted",
        "SELECT tableoid::regclass::text, id FROM parent", "SELECT id FROM tenant.orders",
        "SELECT persons::text FROM persons", "SELECT id FROM watched", "SELECT id FROM history",
    ),
    "sqlite": (
        "SELECT id, twice FROM documents", "SELECT quote(x), quote(\"a %b:c\") FROM odd", "SELECT id FROM watched",
        "SELECT id FROM a_history",
    ),
}  # fmt: skip
_READ_MYSQL = (
    "SELECT id, CAST(j AS char), twice FROM documents",
    "SELECT HEX(i), HEX(ST_AsBinary(p)), CAST(t AS char), y, s, HEX(b), CAST(d AS char), UNIX_TIMESTAMP(at), "
    "`a %%b:c` FROM odd",
    "SELECT id FROM watched", "SELECT id FROM a_history",
)  # fmt: skip


@pytest.mark.parametrize("kind", MOST)
def test_each_run_begins_with_the_same_rows(kind: str, database_urls: Mapping[str, str], tmp_path: Path) -> None:
    """Values of many types could not be written, rows of partitions came twice, and those of other schemas stayed."""
    with empty_database(kind, database_urls, tmp_path) as url, closing(ExploredDatabase(url)) as explored:
        execute(url, *_WORLDS[kind])

        def rows() -> list[list[str]]:
            return [sorted(map(str, execute(url, query))) for query in _READ.get(kind, _READ_MYSQL)]

        before = rows()
        explored.remember()
        for _ in range(2):
            if kind == "postgresql":
                execute(url, "INSERT INTO tenant.orders VALUES (2)", "INSERT INTO parted VALUES (2, '2026-06-06')")
            execute(url, "INSERT INTO watched VALUES (2)")
            explored.restore()
            assert rows() == before


def test_rows_with_lists_and_objects_are_counted(tmp_path: Path) -> None:
    """They could not be (`unhashable type`), and a colon in a text was taken for a parameter."""
    found = [{"b": 1, "a": [2]}, {"a": [2], "b": 1}, (1, {"a": 2})]
    with closing(ExploredDatabase(f"sqlite:///{tmp_path}/shop.db")) as explored:
        assert explored.count(lambda connection: found) == {'{"a": [2], "b": 1}': 2, '[1, {"a": 2}]': 1}
        assert explored.count(r"SELECT 'a :b', 'c \:d', '50%'") == {("a :b", "c :d", "50%"): 1}


def test_an_outbox_in_a_schema_of_its_own_is_seen(database_urls: Mapping[str, str], tmp_path: Path) -> None:
    """Its rows were not waited for, so that a run ended before a relay had moved them."""
    with empty_database("postgresql", database_urls, tmp_path) as url, closing(ExploredDatabase(url)) as explored:
        execute(url, "CREATE SCHEMA tenant")
        engine = sa.create_engine(url)
        create_tables(engine, schema="tenant")
        nowhere = "http://127.0.0.1:9"  # an outbox needs no server
        producer = TransactionProducer(nowhere, group="orders", engine=engine, mode="outbox", schema="tenant")
        with producer, Session(engine) as session, session.begin():
            producer.send(session, Message("order.placed", "book"))
        engine.dispose()
        assert explored.waiting() == 1 and explored.topics() == {"order.placed"} and not explored.has_delayed()
        assert len(explored.committed()) == 1
