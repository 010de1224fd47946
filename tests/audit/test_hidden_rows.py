"""An audit whose role does not see all rows says so: what it does not see is neither lost nor in order."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from notify.cli import audit as command
from notify.testing.process import ServerProcess
from tests.audit.shop import Shop
from tests.support.commands import cli
from tests.support.spoiled import spoil


@pytest.fixture
def server(tmp_path: Path) -> Any:
    process = ServerProcess(tmp_path / "server").start()
    yield process
    process.stop()


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
