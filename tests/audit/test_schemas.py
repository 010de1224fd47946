"""Schemas of one database, such as tenants: each is a source, and an audit does not mix their rows."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.cli.audit import effect_queries
from notify.cli.audit_inputs import InputFlags, Schemas
from notify.client.tables.definitions import half_message, metadata, notify_inbox, notify_source
from notify.errors import InvalidRequest
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.result import Result
from tests.audit.audited import PLAN, found
from tests.audit.trade import SERVICES, WITH_INBOX, Trade, effect_of, make_trade, row_of
from tests.support.databases import empty_database, have_md5

KINDS = ("postgresql", pytest.param("mysql", marks=pytest.mark.long), pytest.param("mariadb", marks=pytest.mark.long))
STEP_US = 5_000_000
"""The trade lies in some 10 slots."""


@contextmanager
def in_schema(url: str, schema: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url, execution_options={"schema_translate_map": {None: schema}})
    with engine.begin() as connection:
        yield connection
    engine.dispose()


class Tenants:
    """A trade whose services have a schema each, in one database; in the schema that the user's connections find
    stand other rows."""

    def __init__(self, url: str, kind: str, trade: Trade) -> None:
        self.url, self.kind, self.trade = url, kind, trade
        self.prefix = f"t{uuid.uuid4().hex[:8]}"
        for service in SERVICES:
            with in_schema(url, self.schema(service)) as connection:
                connection.exec_driver_sql(f"CREATE SCHEMA {self.schema(service)}")
                metadata.create_all(connection)
                ledger = f"{self.schema(service)}.ledger"
                connection.exec_driver_sql(f"CREATE TABLE {ledger} (message_id varchar(64) NOT NULL)")
                for table in (notify_source, half_message, notify_inbox):
                    if rows := self._rows(service, table):
                        connection.execute(table.insert(), rows)
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            metadata.create_all(connection)
            connection.execute(notify_source.insert().values(id=str(uuid.uuid4()), purged_before=0))
            connection.execute(half_message.insert(), [row_of(trade, n, state="ROLLED_BACK") for n in range(10)])
            connection.execute(notify_inbox.insert(), [effect_of(trade, n, message_id=f"{n}.x") for n in range(10)])
        engine.dispose()

    def _rows(self, service: str, table: sa.Table) -> list[dict[str, Any]]:
        engine = sa.create_engine(self.trade.url(service))
        with engine.connect() as connection:
            rows = [dict(row) for row in connection.execute(sa.select(table)).mappings()]
        engine.dispose()
        return rows

    def schema(self, service: str) -> str:
        return f"{self.prefix}_{service}"

    def drop(self) -> None:
        engine = sa.create_engine(self.url)
        with engine.begin() as connection:
            for service in SERVICES:
                connection.exec_driver_sql(
                    f"DROP SCHEMA {self.schema(service)}" + (" CASCADE" if self.kind == "postgresql" else "")
                )
        engine.dispose()

    def execute(self, service: str, statement: Any) -> None:
        with in_schema(self.url, self.schema(service)) as connection:
            connection.execute(statement)


@pytest.fixture
def tenants(request: pytest.FixtureRequest, database_urls: dict[str, str], tmp_path: Path) -> Iterator[Tenants]:
    trade = make_trade(tmp_path / "trade", step_us=STEP_US, count=120)
    with empty_database(request.param, database_urls, tmp_path) as url:
        if request.param == "mysql":
            have_md5(url)
        made = Tenants(url, request.param, trade)
        yield made
        made.drop()


def audited(spark: Any, tenants: Tenants, schemas: Schemas, scratch: Path, method: str, effects: list[str]) -> Result:
    log = str(tenants.trade.log)
    with InputFlags([f"shop={tenants.url}"], [log], schemas=schemas).opened() as inputs:
        assert [d.name for d in inputs.databases] == [f"shop.{tenants.schema(s)}" for s in sorted(SERVICES)]
        plan = replace(PLAN, method=method, effects=effect_queries(effects, inputs))
        return Audit(spark, plan, inputs, scratch).run()


@pytest.mark.long
@pytest.mark.parametrize("tenants", KINDS, indirect=True)
def test_schemas_of_one_database_are_sources(spark: Any, tenants: Tenants, tmp_path: Path) -> None:
    trade = tenants.trade
    patterns = Schemas([], [f"shop={tenants.prefix}_*"])
    effects = ["shop:SELECT message_id FROM {schema}.ledger"]
    # The same ids in another tenant's tables make up for nothing.
    gone, surplus = trade.name(2), trade.name(0)[:-4] + "ffff"
    tenants.execute("shop", half_message.delete().where(half_message.c.transaction_id == gone))
    tenants.execute("bank", half_message.insert().values(row_of(trade, 1, transaction_id=surplus)))
    tenants.execute("shop", notify_inbox.insert().values(effect_of(trade, 4, consumer_group="others")))
    tenants.execute(WITH_INBOX, notify_inbox.delete().where(notify_inbox.c.message_id == trade.message(4)))
    twice = sa.Table("ledger", sa.MetaData(), sa.Column("message_id", sa.String))
    tenants.execute(WITH_INBOX, twice.insert().values([{"message_id": trade.message(6)}] * 2))
    for method in ("digest", "full"):
        result = audited(spark, tenants, patterns, tmp_path / "copies", method, effects)
        assert found(result) == {
            "GHOST": {f"{gone}.0"}, "LOST": {f"{surplus}.0"}, "ACKED_NO_EFFECT": {trade.message(4)},
            "DUP_EFFECT": {trade.message(6)}, "ORPHAN_ROW": {trade.message(4)},
        }  # fmt: skip
        assert (result.reasons, result.totals["committed"]) == ([], trade.count)
        assert method == "full" or result.slots["equal"] > 5, result.notes
        (lost,) = [case for case in result.found if case.finding == "LOST"]
        assert lost.database == f"shop.{tenants.schema('bank')}"
    named = Schemas([f"shop={tenants.schema(service)}" for service in ("shop", "bank", WITH_INBOX)], [])
    with InputFlags([f"shop={tenants.url}"], [str(trade.log)], schemas=named).opened() as inputs:
        told = explain(inputs, surplus, str(tmp_path / "copies"), (5.0, 5.0), ())
        assert "LOST" in str(told.plain(surplus))


@pytest.mark.long
def test_the_schema_is_the_one_that_a_role_finds(database_urls: dict[str, str], tmp_path: Path) -> None:
    """By the options of the URL, by those of the role, and by those of the database; Spark's statements name it."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        for schema in ("public", "a", "b", "c"):
            with in_schema(url, schema) as connection:
                connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
                metadata.create_all(connection)

        def schema_of(name: str = "", **query: str) -> str:
            parsed = sa.make_url(url).set(query=query)
            own = (parsed.set(username=name, password=name) if name else parsed).render_as_string(hide_password=False)
            with closing(Database(own, "shop")) as database:
                assert database.in_schema("half_message") == f'"{database.schema}"."half_message"'
                return database.schema

        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        role = f"r{uuid.uuid4().hex[:12]}"
        with engine.connect() as connection:
            assert schema_of() == "public"
            connection.exec_driver_sql(f"ALTER DATABASE {sa.make_url(url).database} SET search_path = a")
            assert schema_of() == "a"
            assert schema_of(options="-csearch_path=nowhere,b") == "b", "the first one that has the tables"
            connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'; GRANT USAGE ON SCHEMA c TO {role}")
            connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA c TO {role}")
            connection.exec_driver_sql(f"ALTER ROLE {role} SET search_path = c")
            assert schema_of(role) == "c"
            connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")
        engine.dispose()
        with pytest.raises(InvalidRequest, match="schema nowhere has no table half_message or notify_inbox"):
            Database(url, "shop", schema="nowhere")


def test_schemas_belong_to_the_databases_that_their_flags_name(tmp_path: Path) -> None:
    flags = Schemas(["shop=a", "b"], ["bank=t_*", "bank=u_*,v"])
    assert flags.of("shop") == (["a", "b"], "")
    assert flags.of("bank") == (["b"], "t_*,u_*,v")
    flags.check({"shop", "bank"})
    with pytest.raises(InvalidRequest, match=r"--schemas bank=t_\*: no database bank was given: name it with --data"):
        flags.check({"shop"})
    trade = make_trade(tmp_path / "trade", count=2)
    given = [f"shop={trade.url('shop')}"]
    with InputFlags(given, [str(trade.log)], schemas=Schemas(["main"], [])).opened() as inputs:
        assert [(d.name, d.schema) for d in inputs.databases] == [("shop", "main")]
    with (
        pytest.raises(InvalidRequest, match=r"no schema matches 't_\*' and has a table half_message or notify_inbox"),
        InputFlags(given, [str(trade.log)], schemas=Schemas([], ["t_*"])).opened(),
    ):
        pass
