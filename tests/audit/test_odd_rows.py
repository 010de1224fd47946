"""Rows that no version of the SDK writes: each is a finding, whatever else is in the tables, and the audit
continues."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_inbox
from notify.protocol import ids
from notify.protocol.wire import NO_DATABASE
from notify.spark.audit import Audit
from notify.spark.checks.malformed import malformed
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.ranges import Span
from notify.spark.result import Plan, Result
from notify.storage.groups import SettleKind
from notify.storage.log.store import LogStore
from notify.storage.records import State
from notify.storage.sql.rows import moment_of
from tests.audit.audited import PLAN
from tests.audit.trade import (
    AGO_US,
    COUNT,
    STEP_US,
    TOPICS,
    WITH_INBOX,
    WITHOUT_INBOX,
    Trade,
    effect_of,
    half_of,
    row_of,
)
from tests.support.databases import DATABASES, empty_database
from tools.bench.made_run import transaction_id

HOURS_US = 3 * 3_600_000_000


def audited(spark: Any, trade: Trade, plan: Plan = PLAN) -> Result:
    with trade.inputs() as inputs:
        return Audit(spark, plan, inputs, trade.directory / "scratch").run()


def found(result: Result) -> dict[str, set[str]]:
    """The message ids of each class."""
    classes: dict[str, set[str]] = {}
    for case in result.found:
        if case.finding != "PENDING":
            classes.setdefault(case.finding, set()).add(case.message_id or case.evidence["id"])
    return classes


def insert(trade: Trade, service: str, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
    engine = sa.create_engine(trade.url(service))
    with engine.begin() as connection:
        connection.execute(table.insert(), rows)
    engine.dispose()


@pytest.mark.long
@pytest.mark.parametrize(
    "what",
    [
        "window",
        *(
            pytest.param(what, marks=pytest.mark.long)
            for what in ("digest", "full", "digest of a window", "watch", "continue")
        ),
    ],
)
def test_odd_rows_are_found_and_nothing_else(spark: Any, trade: Trade, what: str) -> None:
    lost = row_of(trade, COUNT + 2, created_at=moment_of(trade.at(COUNT + 2) + HOURS_US))
    garbage = [
        row_of(trade, 4, transaction_id="no id at all"),
        row_of(trade, 4, transaction_id="ffffffff-ffff-ffff-ffff-ffffffffffff"),
        row_of(trade, 4, transaction_id=""),
        row_of(trade, 24, message_no=-1),
        row_of(trade, 26, message_no=70_000),
    ]
    insert(trade, "shop", half_message, [lost, *garbage])
    ahead = moment_of(trade.at(10) + HOURS_US)
    trade.execute(
        "shop",
        f"UPDATE half_message SET topic = 'order.gone' WHERE transaction_id = '{trade.name(6)}'",
        f"UPDATE half_message SET digest = digest + 1 WHERE transaction_id = '{trade.name(20)}'",
        f"UPDATE half_message SET producer_group = 'others' WHERE transaction_id = '{trade.name(28)}'",
        f"UPDATE half_message SET key = 'another' WHERE transaction_id = '{trade.name(30)}'",
        f"UPDATE half_message SET key = NULL WHERE transaction_id = '{trade.name(32)}'",
        f"UPDATE half_message SET tag = 'red' WHERE transaction_id = '{trade.name(34)}'",
        f"UPDATE half_message SET created_at = 'yesterday' WHERE transaction_id = '{trade.name(36)}'",
        f"UPDATE half_message SET created_at = '' WHERE transaction_id = '{trade.name(38)}'",
        f"UPDATE half_message SET created_at = 20261125 WHERE transaction_id = '{trade.name(40)}'",
        f"UPDATE half_message SET digest = NULL WHERE transaction_id = '{trade.name(22)}'",  # an older SDK's row
        f"UPDATE half_message SET state = 'GARBAGE' WHERE transaction_id = '{trade.name(8)}'",
        f"UPDATE half_message SET state = 'ROLLED_BACK', created_at = '{ahead}' "
        f"WHERE transaction_id = '{trade.name(10)}'",
        f"UPDATE half_message SET transaction_id = upper(transaction_id) WHERE transaction_id = '{trade.name(12)}'",
        f"DELETE FROM half_message WHERE transaction_id = '{trade.name(14)}'",
    )
    trade.execute(
        "points",
        f"UPDATE notify_inbox SET created_at = 'never' WHERE message_id = '{trade.message(42)}'",
        f"UPDATE notify_inbox SET created_at = '' WHERE message_id = '{trade.message(44)}'",
    )
    insert(trade, "bank", half_message, [row_of(trade, 14)])
    insert(trade, "shop", notify_inbox, [effect_of(trade, 16)])
    insert(trade, "points", notify_inbox, [effect_of(trade, 17, consumer_group="nobody")])
    insert(trade, "points", notify_inbox, [effect_of(trade, 18, message_id="no.id")])
    # No ghost, though its group has local rows otherwise: it was sent outside of databases, as `prepare` does.
    outside = made_at(trade.at(COUNT), 0)
    asyncio.run(stored(trade, [outside], source=NO_DATABASE))
    insert(trade, "points", notify_inbox, [effect_of(trade, COUNT, message_id=f"{ids.to_text(outside)}.0")])
    window = replace(PLAN, from_us=trade.first_us, to_us=trade.at(COUNT + 2) + STEP_US)
    plan = {
        "digest": replace(PLAN, method="digest"),
        "full": replace(PLAN, method="full"),
        "window": window,
        "digest of a window": replace(window, method="digest"),
        "watch": replace(window, closes_by_clock=True),
        "continue": replace(PLAN, from_us=trade.first_us, continues=True),
    }[what]
    result = audited(spark, trade, plan)
    assert (result.verdict, result.exit_code) == ("FINDINGS", 1)
    assert found(result) == {
        "LOST": {trade.message(COUNT + 2)},
        "CONFLICT": {trade.message(10)},
        "MISDATED": {trade.message(COUNT + 2), trade.message(10)},
        "ALTERED": {trade.message(n) for n in (6, 14, 20, 28, 30, 32, 34)},
        "MALFORMED": {
            trade.message(8), "no id at all", "ffffffff-ffff-ffff-ffff-ffffffffffff", "", trade.name(12).upper(),
            "no.id", *[trade.name(n) for n in (24, 26, 36, 38, 40)], trade.message(42), trade.message(44),
        },
        "DUP_EFFECT": {trade.message(16)},
        "ORPHAN_ROW": {trade.message(17)},
    }  # fmt: skip
    assert {name: len(messages) for name, messages in found(result).items()} == {
        name: count for name, count in result.counts.items() if count and name != "PENDING"
    }


def test_explain_finds_rows_whose_ids_are_in_upper_case(trade: Trade) -> None:
    trade.execute("shop", f"UPDATE half_message SET transaction_id = '{trade.name(12).upper()}' "
                  f"WHERE transaction_id = '{trade.name(12)}'")  # fmt: skip
    trade.execute("points", f"UPDATE notify_inbox SET message_id = '{trade.message(14).upper()}' "
                  f"WHERE message_id = '{trade.message(14)}'")  # fmt: skip
    with trade.inputs() as inputs:
        explained = [explain(inputs, trade.message(n), trade.directory / "scratch", (5, 5)) for n in (12, 14)]
    assert [[(v.finding, *v.others) for v in known.verdicts] for known in explained] == [[("MALFORMED",)], [("",)]]


@pytest.mark.long
def test_a_table_without_digests_is_told(spark: Any, trade: Trade) -> None:
    trade.execute("shop", "ALTER TABLE half_message DROP COLUMN digest")
    result = audited(spark, trade)
    assert (result.verdict, result.counts["ALTERED"]) == ("PASS", 0)
    assert [line.name for line in result.coverage if not line.is_whole] == ["database shop"]


@pytest.mark.long
def test_a_conflict_that_is_dated_back_is_in_one_window(spark: Any, trade: Trade) -> None:
    back = moment_of(trade.at(100) - HOURS_US)
    trade.execute(
        "shop",
        f"UPDATE half_message SET state = 'ROLLED_BACK', created_at = '{back}' "
        f"WHERE transaction_id = '{trade.name(100)}'",
    )
    windows = [
        (trade.first_us - HOURS_US - 10_000_000, trade.first_us - HOURS_US + 10_000_000),
        (trade.first_us, trade.at(COUNT // 2)),
        (trade.at(COUNT // 2), trade.at(COUNT) + STEP_US),
    ]
    conflicts = [
        [
            found(audited(spark, trade, replace(PLAN, from_us=start, to_us=end, closes_by_clock=True))).get("CONFLICT")
            for start, end in windows
        ]
    ]
    assert conflicts == [[None, {trade.message(100)}, None]]


DAYS_US = 3 * 86_400_000_000


def made_at(us: int, number: int) -> bytes:
    """A transaction id of this time."""
    return transaction_id(10 * COUNT + number, us)


async def stored(trade: Trade, names: Sequence[bytes], **fields: Any) -> None:
    """Let the shop send messages with these ids, which are delivered and settled. `fields`: of the transactions."""
    now_us = trade.at(COUNT)
    store = LogStore(trade.log, clock=lambda: now_us)
    await store.open(now_us)
    made = [msgspec.structs.replace(half_of(trade, 0), id=name, **fields) for name in names]
    await store.put(made, now_us)
    await store.decide([(t.id, t.producer_group, State.COMMITTED) for t in made], now_us + 1000)
    for group in (WITH_INBOX, WITHOUT_INBOX):
        await store.settle(group, TOPICS["shop"], 0, [(COUNT // 2, len(names))], SettleKind.ACK, now_us + 2000)
    now_us += AGO_US // 2
    await store.checkpoint()
    await store.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "what",
    ["digest", *(pytest.param(what, marks=pytest.mark.long) for what in ("watch", "full", "window"))],
)
def test_ids_of_a_clock_that_is_days_off_are_found(spark: Any, trade: Trade, what: str) -> None:
    """Whether the message is lost or delivered, in an audit of everything and in one of a window."""
    ahead_us, unset_us, behind_us = trade.at(COUNT) + DAYS_US, DAYS_US, trade.at(COUNT) - DAYS_US
    lost = [made_at(ahead_us, 0), made_at(unset_us, 1)]
    delivered = [made_at(ahead_us, 2), made_at(unset_us, 3), made_at(behind_us, 4)]
    asyncio.run(stored(trade, delivered))
    at = moment_of(trade.at(COUNT))
    names = [ids.to_text(name) for name in (*lost, *delivered)]
    insert(trade, "shop", half_message, [row_of(trade, 0, transaction_id=name, created_at=at) for name in names])
    effects = [effect_of(trade, 0, message_id=f"{ids.to_text(name)}.0", created_at=at) for name in delivered]
    insert(trade, "points", notify_inbox, effects)
    window = {"from_us": trade.first_us, "to_us": trade.at(COUNT) + STEP_US}
    plan = replace(PLAN, method=what) if what in ("full", "digest") else replace(PLAN, **window)
    result = audited(spark, trade, replace(plan, closes_by_clock=what == "watch"))
    assert found(result) == {"LOST": {f"{name}.0" for name in names[:2]}, "MISDATED": {f"{name}.0" for name in names}}
    assert result.reasons == [] and result.counts["MISDATED"] == len(names)


@pytest.mark.parametrize("method", ["digest", pytest.param("range", marks=pytest.mark.long)])
@pytest.mark.long
def test_an_inbox_row_of_an_id_of_no_time_is_found(spark: Any, trade: Trade, method: str) -> None:
    name = f"{ids.to_text(made_at(trade.at(COUNT) + DAYS_US, 0))}.0"
    insert(trade, "points", notify_inbox, [effect_of(trade, 0, message_id=name)])
    plan = replace(PLAN, method="digest") if method == "digest" else replace(PLAN, from_us=trade.first_us)
    assert found(audited(spark, trade, plan)).get("ORPHAN_ROW") == {name}


IDS = {
    "019aa4b7-50f8-77b0-90f7-e29bfbb51171": True,
    "019AA4B7-50F8-77B0-90F7-E29BFBB51171": False,
    "019aa4b7-50f8-47b0-90f7-e29bfbb51171": False,
    "019aa4b7-50f8-77b0-70f7-e29bfbb51171": False,
    "019aa4b7-50f8-77b0-90f7-e29bfbb5117g": False,
    "019aa4b--50f8-77b0-90f7-e29bfbb51171": False,
    "019aa4b7-50f8-77b0-90f7-e29bfbb5117": False,
    "no id": False,
    "": False,
}
NUMBERS = {".0": True, ".9999": True, "": False, ".": False, ".x": False, ".10000": False, "-0": False, ".0 ": False}


@pytest.mark.long
@pytest.mark.parametrize("kind", DATABASES)
def test_each_database_knows_ids(spark: Any, kind: str, database_urls: dict[str, str], tmp_path: Path) -> None:
    messages = {f"{name}.0": is_sound for name, is_sound in IDS.items()}
    messages |= {f"{next(iter(IDS))}{number}": is_sound for number, is_sound in NUMBERS.items()}
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        at = moment_of(1_800_000_000_000_000)
        rows = [
            {"transaction_id": name, "message_no": 0, "producer_group": "g", "mode": "half", "state": "COMMITTED",
             "shards": "", "topic": "t", "relayed": 1, "created_at": at}
            for name in IDS
        ]  # fmt: skip
        with engine.begin() as connection:
            connection.execute(half_message.insert(), rows)
            # A group each: MariaDB's key takes ids that differ in case, or in a last space, for the same.
            effects = [
                {"consumer_group": f"g{n}", "message_id": name, "created_at": at} for n, name in enumerate(messages)
            ]
            connection.execute(notify_inbox.insert(), effects)
        engine.dispose()
        with contextlib.closing(Database(url, "shop")) as database:
            count, cases = malformed(database, None)
            local, inbox = database.local_rows(spark, None), database.effects(spark, None)
            assert local is not None and inbox is not None
            ids_read = [bytes(row["id"]).hex() for row in local.collect()]
            made_us = ids.milliseconds(ids.from_text(next(iter(IDS)))) * 1000
            rows_in_window = database.local_rows(spark, Span(made_us - 1_000_000, made_us + 1_000_000))
            assert rows_in_window is not None
            ids_in_window = [bytes(row["id"]).hex() for row in rows_in_window.collect()]
            numbers = {row["no"] for row in inbox.where("no >= 0").collect()}
    odd = [name for name, is_sound in (*IDS.items(), *messages.items()) if not is_sound]
    assert sorted(case.evidence["id"] for case in cases) == sorted(odd) and count == len(odd)
    assert "019aa4b750f877b090f7e29bfbb51171" in ids_read and {0, 9999} <= numbers
    of_window = [name for name in ids_read if name.startswith("019aa4b750f8")]
    assert sorted(ids_in_window) == sorted(of_window)  # once each, also the one in upper case
    assert of_window.count("019aa4b750f877b090f7e29bfbb51171") == 2


NO_TIMES = {"sqlite": ["soon", "", "2026-13-45 00:00:00"], "postgresql": ["infinity", "-infinity", "20000-01-01"],
            "mariadb": ["0000-00-00 00:00:00"], "mysql": ["0000-00-00 00:00:00"]}  # fmt: skip
"""Values that each database takes for a time, and that are none."""


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(NO_TIMES))
def test_each_database_knows_times(spark: Any, kind: str, database_urls: dict[str, str], tmp_path: Path) -> None:
    """PostgreSQL's driver cannot read infinity, and its cast of it to a number failed: the audit ended there."""
    us = 1_790_000_000_000_000
    names = [ids.to_text(made_at(us, number)) for number in range(len(NO_TIMES[kind]) + 1)]
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        with engine.begin() as connection:
            if kind in ("mysql", "mariadb"):
                connection.exec_driver_sql("SET sql_mode = ''")
            for name in names:
                row = {"transaction_id": name, "message_no": 0, "producer_group": "g", "mode": "half",
                       "state": "COMMITTED", "shards": "", "topic": "t", "relayed": 1}  # fmt: skip
                connection.execute(half_message.insert().values(row | {"created_at": moment_of(us)}))
                effect = {"consumer_group": "g", "message_id": f"{name}.0", "created_at": moment_of(us)}
                connection.execute(notify_inbox.insert().values(effect))
            for name, text in zip(names[1:], NO_TIMES[kind], strict=True):
                of_row = f"created_at = '{text}' WHERE transaction_id = '{name}'"
                connection.exec_driver_sql(f"UPDATE half_message SET {of_row}")
                of_effect = f"created_at = '{text}' WHERE message_id = '{name}.0'"
                connection.exec_driver_sql(f"UPDATE notify_inbox SET {of_effect}")
        engine.dispose()
        odd = sorted(name for bare in names[1:] for name in (bare, f"{bare}.0"))
        window = Span(us - 1_000_000, us + 1_000_000)
        with contextlib.closing(Database(url, "shop")) as database:
            for span in (None, window):
                count, cases = malformed(database, span)
                assert (count, sorted(case.evidence["id"] for case in cases)) == (len(odd), odd)
                assert all("is not a time" in case.detail for case in cases)
                local, inbox = database.local_rows(spark, span), database.effects(spark, span)
                assert local is not None and inbox is not None
                times = [None] * (len(names) - 1) + [us]
                assert sorted((row["at_us"] for row in local.collect()), key=str) == sorted(times, key=str)
                assert sorted((row["at_us"] for row in inbox.collect()), key=str) == sorted(times, key=str)
            rows = database.rows_of(names)
            assert [row["created_at"] for row in rows].count(None) == len(names) - 1
