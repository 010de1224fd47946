"""SQLite keeps a value of any type in any column: each such row is MALFORMED by name, and none ends an audit."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client.tables.definitions import half_message, notify_inbox, notify_source
from notify.spark.audit import Audit
from notify.spark.checks.malformed import malformed
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.expressions import Expressions
from notify.spark.repair.planning import plan_of
from notify.spark.result import Inputs
from tests.audit.audited import PLAN
from tests.audit.trade import WITH_INBOX, Trade

VALUES = {
    "a text": "'x'", "bytes": "x'00ff'", "a fraction": "1.5", "NULL": "NULL", "a huge number": str(1 << 62),
    "more than 32 bits": str(1 << 40), "no UTF-8": "CAST(x'ff41fe' AS TEXT)", "a zero byte": "'x' || char(0) || 'y'",
}  # fmt: skip
KEYS = {half_message: "transaction_id", notify_inbox: "message_id"}


def loosened(trade: Trade, service: str, table: sa.Table) -> None:
    """Make the table again without what refuses a value."""
    trade.execute(
        service, f"CREATE TABLE loose AS SELECT * FROM {table.name}", f"DROP TABLE {table.name}",
        f"ALTER TABLE loose RENAME TO {table.name}",
    )  # fmt: skip


def spoil(trade: Trade, service: str, table: sa.Table, numbers: Any) -> dict[int, str]:
    """Put each value into each column of a row of its own; by number: the column."""
    loosened(trade, service, table)
    key, spoiled = KEYS[table], {}
    name_of = trade.name if table is half_message else trade.message
    for column, value in itertools.product(table.c, VALUES.values()):
        n = next(numbers)
        trade.execute(service, f"UPDATE {table.name} SET {column.name} = {value} WHERE {key} = '{name_of(n)}'")
        spoiled[n] = column.name
    return spoiled


def odd_rows(trade: Trade, service: str, table: sa.Table) -> int:
    """How many rows have a value of another type, by SQLite itself."""
    kinds = {sa.LargeBinary: ["blob"], sa.Float: ["real"], sa.Integer: ["integer"], sa.String: ["text"]}
    odd = []
    for column in table.c:
        if isinstance(column.type, sa.DateTime):
            odd.append(f"{column.name} NOT GLOB '2*-*-* *:*:*.*' OR typeof({column.name}) = 'blob'")
            odd += [f"{column.name} IS NULL"] * (not column.nullable)
            continue
        (known,) = [kinds[kind] for kind in kinds if isinstance(column.type, kind)]
        listed = ", ".join(map(repr, [*known, *["null"] * bool(column.nullable)]))
        odd.append(f"typeof({column.name}) NOT IN ({listed})")
    odd += [f"length({KEYS[table]}) NOT IN (36, 38)", "state NOT IN ('COMMITTED')" if table is half_message else "0"]
    odd += ["message_no NOT BETWEEN 0 AND 9999"] if table is half_message else []
    engine = sa.create_engine(trade.url(service))
    with engine.connect() as connection:
        count = connection.exec_driver_sql(f"SELECT count(*) FROM {table.name} WHERE {' OR '.join(odd)}").scalar_one()
    engine.dispose()
    return int(count)


@pytest.mark.long
@pytest.mark.parametrize("is_window", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_type_in_every_column_is_named(spark: Any, trade: Trade, is_window: bool) -> None:
    rows = spoil(trade, "shop", half_message, iter(range(0, trade.count, 2)))
    effects = spoil(trade, WITH_INBOX, notify_inbox, iter(range(1, trade.count, 2)))
    plan = replace(PLAN, from_us=trade.first_us - 1) if is_window else PLAN
    with trade.inputs() as inputs:
        result = Audit(spark, plan, inputs, trade.directory / "scratch").run()
        assert result.verdict == "FINDINGS"
        expected = odd_rows(trade, "shop", half_message) + odd_rows(trade, WITH_INBOX, notify_inbox)
        assert result.counts["MALFORMED"] == expected, sorted(
            f.detail for f in result.found if f.finding == "MALFORMED"
        )
        named = {
            f.finding
            for f in result.found
            if f.message_id in {trade.message(n) for n in range(1, 300, 2)} - {trade.message(n) for n in effects}
        }
        assert not named, "the other rows are judged as before"
        assert plan_of(result, inputs, force=True).held_back
        for n in [*rows, *effects][:: 1 if is_window else 9]:  # 9: each column, and each value in turn
            explain(inputs, trade.message(n), trade.directory / "explained", (5, 5))


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_an_odd_source_is_named(trade: Trade, value: str) -> None:
    loosened(trade, "shop", notify_source)
    for column in notify_source.c:
        before = "purged_before" if column.name != "purged_before" else "rows_from"
        trade.execute("shop", f"UPDATE notify_source SET {column.name} = {value}")
        with contextlib.closing(Database(trade.url("shop"), "shop")) as database:
            assert all(isinstance(mark, int) for mark in database.purged()) and isinstance(database.source_id(), str)
            is_odd = database.rows(f"SELECT {Expressions('sqlite').is_typed(column)} FROM notify_source")[0][0] == 0
            count, cases = malformed(database, None)
            assert count == len(cases) == is_odd, (column.name, before)
            assert all("notify_source" in case.detail for case in cases)
        trade.execute(
            "shop",
            f"UPDATE notify_source SET {column.name} = {0 if column.name != 'id' else repr(trade.source('shop'))}",
        )


def test_a_row_that_is_malformed_is_not_sent_again(trade: Trade, tmp_path: Path) -> None:
    for n, change in enumerate(
        ["deliver_at = 'soon'", "ttl = 'long'", "headers = '{', body = x'00'", "body = 'text'", "delay = x'00'"]
    ):
        trade.execute(
            "shop", f"UPDATE half_message SET mode = 'outbox', {change} WHERE transaction_id = '{trade.name(2 * n)}'"
        )
    from notify.spark.result import Found, Result

    evidence = {"local": "COMMITTED", "server": "unknown"}
    lost = [Found("LOST", trade.name(2 * n), at_us=trade.at(2 * n), evidence=evidence) for n in range(5)]
    with trade.inputs() as inputs:
        bare = Inputs(inputs.databases[:2], inputs.logs)  # without the inbox, where they took effect
        plan = plan_of(Result("FINDINGS", found=lost, totals={"committed": 10_000}, from_us=1, to_us=2), bare)
    assert not plan.items and all("malformed" in held.why for held in plan.held_back), plan.held_back
