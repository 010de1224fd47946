"""An audit whose role does not see all rows says so: what it does not see is neither lost nor in order."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.cli import audit as command
from notify.client import create_tables
from notify.errors import HiddenRows
from notify.spark.inputs.databases import Database
from notify.spark.inputs.effects import BusinessEffects
from notify.storage.sql.administration import server_action
from notify.storage.sql.schema import upgrade
from notify.storage.sql.tables import server_key_map, server_member, server_shard
from notify.testing.process import ServerProcess
from tests.audit.shop import Shop
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.spoiled import spoil


@pytest.fixture
def server(tmp_path: Path) -> Any:
    process = ServerProcess(tmp_path / "server").start()
    yield process
    process.stop()


@pytest.mark.long
@pytest.mark.parametrize("table", ["half_message", "notify_inbox", "notify_source"])
def test_an_audit_of_hidden_rows_is_inconclusive(
    server: ServerProcess, shop: Shop, spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: str
) -> None:
    monkeypatch.setattr(command, "session", lambda *_, **__: contextlib.nullcontext(spark))
    for _ in range(3):
        shop.order()
    lost = shop.lose()
    role = f"few_{shop.engine.url.database}"
    spoil(
        shop.engine,
        [
            f"CREATE ROLE {role} LOGIN PASSWORD 'few'",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}",
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"CREATE POLICY own ON {table} FOR SELECT TO {role} USING (current_setting('app.tenant', true) = '1')",
        ],
    )
    few = shop.engine.url.set(username=role, password="few").render_as_string(hide_password=False)
    inputs = ("--database", few, "--log", str(server.data_dir))
    report = ("--report", str(tmp_path / "report"))
    try:
        code, said = cli("audit", "run", *inputs, *report, "--json")
        assert (code, said["verdict"], said["inconclusive"], said["exit_code"]) == (2, "INCONCLUSIVE", True, 2)
        (reason,) = said["reasons"]
        assert f"row level security may hide rows of the table public.{table} from SELECT by the role {role}" in reason
        assert not any(said["counts"].values()) and "INCONCLUSIVE" in (tmp_path / "report" / "report.html").read_text()
        code, said = cli("audit", "explain", lost, *inputs, *report)
        assert code == 2 and f"public.{table}" in said["text"]
        spoil(shop.engine, [f"CREATE POLICY every ON {table} FOR SELECT TO {role} USING (true)"])
        code, said = cli("audit", "run", *inputs, *report, "--json", "--max-transaction-seconds", "0")
        assert said["verdict"] != "INCONCLUSIVE" or "row level security" not in str(said["reasons"])
    finally:
        spoil(shop.engine, [f"DROP OWNED BY {role}", f"DROP ROLE {role}"])


@pytest.mark.long
def test_rows_that_are_hidden_from_a_query_of_effects_are_named(database_urls: dict[str, str], tmp_path: Path) -> None:
    """Also of a table that the query reads by a view, or beside another one."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        role = f"few_{engine.url.database}"
        spoil(
            engine,
            [
                "CREATE TABLE ledger (message_id text)",
                "CREATE TABLE open_ledger (message_id text)",
                "CREATE VIEW shown WITH (security_invoker) AS SELECT message_id FROM ledger",
                f"CREATE ROLE {role} LOGIN PASSWORD 'few'",
                f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}",
                "ALTER TABLE ledger ENABLE ROW LEVEL SECURITY",
                f"CREATE POLICY own ON ledger FOR SELECT TO {role} USING (current_setting('app.tenant', true) = '1')",
            ],
        )
        few = engine.url.set(username=role, password="few").render_as_string(hide_password=False)
        queries = {
            "SELECT message_id FROM ledger": True,
            "SELECT message_id FROM {schema}.shown": True,
            "SELECT o.message_id FROM open_ledger o LEFT JOIN ledger USING (message_id)": True,
            "SELECT message_id FROM open_ledger WHERE message_id LIKE '0%'": False,
        }
        try:
            with contextlib.closing(Database(few, "shop")) as database:
                hidden = {query: BusinessEffects(database, query).hidden for query in queries}
                assert {query: bool(why) for query, why in hidden.items()} == queries
                (why,) = hidden["SELECT message_id FROM ledger"]
                assert "--effects on database shop: row level security may hide rows of the table public.ledger" in why
                with pytest.raises(HiddenRows, match=r"public\.ledger"):
                    BusinessEffects(database, "SELECT message_id FROM ledger").check_seen()
                spoil(engine, [f"CREATE POLICY every ON ledger FOR SELECT TO {role} USING (true)"])
                assert not any(BusinessEffects(database, query).hidden for query in queries)
        finally:
            spoil(engine, [f"DROP OWNED BY {role}", f"DROP ROLE {role}"])
            engine.dispose()


@pytest.mark.long
@pytest.mark.parametrize("table", [server_shard.name, server_key_map.name, server_member.name, server_action.name])
def test_rows_that_are_hidden_of_a_servers_table_are_named(
    database_urls: dict[str, str], tmp_path: Path, table: str
) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        upgrade(engine, "main")
        role = f"few_{engine.url.database}"
        spoil(
            engine,
            [
                f"CREATE ROLE {role} LOGIN PASSWORD 'few'",
                f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}",
                f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            ],
        )
        few = engine.url.set(username=role, password="few").render_as_string(hide_password=False)
        try:
            with contextlib.closing(Database(few, "server", is_storage=True)) as storage:
                (why,) = storage.hidden
                assert why.startswith("storage server: ") and f"public.{table}" in why
        finally:
            spoil(engine, [f"DROP OWNED BY {role}", f"DROP ROLE {role}"])
            engine.dispose()
