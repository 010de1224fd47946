"""Effects that --effects finds count, whatever the inbox lacks: in findings, figures, plans and repairs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.definitions import notify_inbox
from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.explain.explained import explain
from notify.spark.inputs.databases import Database
from notify.spark.inputs.effects import UNNAMED, BusinessEffects, with_operators
from notify.spark.inputs.ranges import Span
from notify.spark.repair.checks import Now
from notify.spark.repair.plan import RepairPlan, read_plan
from notify.spark.repair.planning import plan_of
from notify.spark.result import Found, Inputs, Result
from notify.storage.sql.rows import moment_of
from tests.audit.audited import PLAN, found
from tests.audit.trade import WITH_INBOX, WITHOUT_INBOX, Trade, effect_of
from tests.support.databases import DATABASES, empty_database
from tools.bench.made_run import transaction_id

LEDGER = ((WITH_INBOX, "SELECT message_id FROM ledger"),)
GONE = range(10, 16)
"""The messages without a row in the inbox."""
PROVEN = (10, 12, 15)


def ledger(trade: Trade, numbers: Any, columns: str = "message_id TEXT") -> None:
    rows = ", ".join(f"('{trade.message(n)}')" for n in numbers)
    trade.execute(WITH_INBOX, f"CREATE TABLE ledger ({columns})", f"INSERT INTO ledger (message_id) VALUES {rows}")


def without_rows(trade: Trade, numbers: Any = GONE) -> None:
    listed = ", ".join(f"'{trade.message(n)}'" for n in numbers)
    trade.execute(WITH_INBOX, f"DELETE FROM notify_inbox WHERE message_id IN ({listed})")


def audited(spark: Any, inputs: Inputs, trade: Trade, **plan: Any) -> Result:
    return Audit(spark, replace(PLAN, effects=LEDGER, **plan), inputs, trade.directory / "scratch").run()


def messages(trade: Trade, numbers: Any) -> set[str]:
    return {trade.message(n) for n in numbers}


@pytest.mark.long
@pytest.mark.parametrize("method", ["digest", pytest.param("window", marks=pytest.mark.long)])
def test_a_proven_effect_is_neither_missing_nor_sent_again(
    spark: Any, trade: Trade, tmp_path: Path, method: str
) -> None:
    without_rows(trade)
    ledger(trade, PROVEN)
    trade.execute(WITH_INBOX, "INSERT INTO ledger VALUES (NULL), (NULL)")
    bounds = {"method": method} if method == "digest" else {"from_us": trade.first_us - 1, "to_us": trade.at(400)}
    missing = [n for n in GONE if n not in PROVEN]
    with trade.inputs() as inputs:
        result = audited(spark, inputs, trade, **bounds)
        expected = {"ACKED_NO_EFFECT": messages(trade, missing), "UNGUARDED": messages(trade, PROVEN)}
        assert found(result) == expected
        done = result.completeness
        assert done is not None and (done.delivered, done.effective) == (trade.count, trade.count - len(missing))
        plan_of(result, inputs, effects=LEDGER).write(tmp_path / "plan.json")
        plan = read_plan(tmp_path / "plan.json")
        assert {item.message_id for item in plan.items} == messages(trade, missing)
        held = {each.message_id: each.why for each in plan.held_back}
        assert held.keys() == messages(trade, PROVEN) and all("as --effects proves" in why for why in held.values())
        known = explain(inputs, trade.message(PROVEN[0]), tmp_path / "explained", (5, 5), effects=LEDGER)
        assert (known.verdicts[0].finding, known.exit_code) == ("UNGUARDED", 0), known.sentence

        # An effect that came after the plan: a repair asks again, with the queries of the plan.
        trade.execute(WITH_INBOX, f"INSERT INTO ledger VALUES ('{trade.message(missing[0])}')")
        fates = standing(inputs, plan, tmp_path)
        assert (
            fates.pop(trade.message(missing[0]))
            == f"it took effect in {WITH_INBOX}, as --effects shows: only the row of the inbox is gone"
        )
        assert set(fates.values()) == {None}


def standing(inputs: Inputs, plan: RepairPlan, scratch: Path) -> dict[str, str | None]:
    """Why each item of a plan is not carried out now; None for one that is."""
    queries = [BusinessEffects(inputs.databases[-1], query) for _, query in plan.effects]
    now = Now.of(inputs, plan.items, scratch / "now", (), queries, plan.groups)
    settled = {item.message_id: now.settled(item) for item in plan.items}
    return {name: fate.why if fate is not None else None for name, fate in settled.items()}


@pytest.mark.long
def test_effects_of_no_known_group_are_not_sent_again_and_hide_nothing(
    spark: Any, trade: Trade, tmp_path: Path
) -> None:
    without_rows(trade)
    ledger(trade, PROVEN)
    other = [effect_of(trade, n, consumer_group=WITHOUT_INBOX) for n in range(0, 4, 2)]
    engine = sa.create_engine(trade.url(WITH_INBOX))
    with engine.begin() as connection:
        connection.execute(notify_inbox.insert(), other)
    engine.dispose()
    with trade.inputs() as inputs:
        result = audited(spark, inputs, trade, from_us=trade.first_us - 1)
        gone = {f.message_id for f in result.found if f.finding == "ACKED_NO_EFFECT" and WITH_INBOX in f.groups}
        assert gone == messages(trade, GONE) and result.counts["UNGUARDED"] == 0
        assert any("no column consumer_group" in note for note in result.notes), result.notes
        plan = plan_of(result, inputs, effects=LEDGER)
        sent = {item.message_id for item in plan.items if item.group == WITH_INBOX}
        assert sent == messages(trade, GONE) - messages(trade, PROVEN)


@pytest.mark.long
def test_a_group_that_nobody_knows_proves_nothing_and_nothing_is_sent_again(
    spark: Any, trade: Trade, tmp_path: Path
) -> None:
    """A name in other letters, say: the effects would happen a second time."""
    without_rows(trade)
    ledger(trade, PROVEN)
    other = ((WITH_INBOX, f"SELECT message_id, '{WITH_INBOX.title()}' AS consumer_group FROM ledger"),)
    with trade.inputs() as inputs:
        result = Audit(spark, replace(PLAN, effects=other), inputs, tmp_path / "scratch").run()
        assert found(result) == {"ACKED_NO_EFFECT": messages(trade, GONE)}
        assert any(f"knows, and proves no effect in these: '{WITH_INBOX.title()}'" in note for note in result.notes)
        plan = plan_of(result, inputs, effects=other)
        assert {item.message_id for item in plan.items} == messages(trade, GONE) - messages(trade, PROVEN)
        assert all("in which group that is known" in held.why for held in plan.held_back), plan.held_back
        later = next(n for n in GONE if n not in PROVEN)
        trade.execute(WITH_INBOX, f"INSERT INTO ledger VALUES ('{trade.message(later)}')")
        fates = standing(inputs, plan, tmp_path)
        assert [name for name, fate in fates.items() if fate] == [trade.message(later)]


def test_a_repetition_that_an_inbox_would_not_skip_is_held_back(trade: Trade) -> None:
    """Published again to all, it would take effect twice where only --effects knows it."""
    ledger(trade, [10])
    without_rows(trade, [10])
    evidence = {"local": "COMMITTED", "server": "unknown", "t_us": trade.at(10)}
    doubt = Found("IN_DOUBT", trade.name(10), evidence={"local": "COMMITTED"})
    with trade.inputs() as inputs:
        lost = Found("LOST", trade.name(10), at_us=trade.at(10), evidence=evidence)
        result = Result("FINDINGS", found=[lost, doubt], totals={"committed": 10_000}, from_us=1, to_us=2)
        plan = plan_of(result, inputs, effects=LEDGER)
    assert not plan.items and all(
        f"it took effect in {WITH_INBOX}" in held.why or "took effect" in held.why for held in plan.held_back
    )


COLUMNS = {
    "postgresql": ["text", "varchar(64)", "char(64)", "bytea"],
    "mysql": ["varchar(64)", "char(64)", "varbinary(64)", "text"],
    "mariadb": ["varchar(64)", "char(64)", "varbinary(64)"],
    "sqlite": ["TEXT", "BLOB"],
}
AT_US = 1_790_000_000_000_000


def made_at(us: int, number: int) -> bytes:
    """A transaction id of this time."""
    return transaction_id(number, us)


def test_question_marks_of_postgresql_are_operators_for_its_jdbc_driver() -> None:
    """The audit failed in the middle, with "No value specified for parameter 1"."""
    for query, expected in (
        ("a ? 'b' AND c ?| d AND e @? f", "a ?? 'b' AND c ??| d AND e @?? f"),
        ("'why?' || \"odd?\" || 'it''s?' || E'it\\'s?' || $$a?$$ || $x$ ' ? $x$", None),
        ("1 -- really?\n + 2 /* why\n? */ ? 3", "1 -- really?\n + 2 /* why\n? */ ?? 3"),
    ):
        assert with_operators(query) == (expected or query)


@pytest.mark.long
@pytest.mark.parametrize("kind", DATABASES)
def test_each_database_gives_ids_of_any_type(
    spark: Any, kind: str, database_urls: dict[str, str], tmp_path: Path
) -> None:
    names = [f"{ids.to_text(made_at(AT_US, n))}.{n}" for n in range(3)]
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        with engine.begin() as connection:
            row = {"consumer_group": "points", "message_id": names[0], "created_at": moment_of(AT_US)}
            connection.execute(notify_inbox.insert().values(row))
            for number, column in enumerate(COLUMNS[kind]):
                connection.exec_driver_sql(f"CREATE TABLE ledger{number} (message_id {column}, note varchar(9))")
                for name in (*names, names[2]):
                    connection.execute(sa.text(f"INSERT INTO ledger{number} VALUES ('{name}', 'a%b')"))
                connection.execute(sa.text(f"INSERT INTO ledger{number} VALUES (NULL, 'a%b')"))
            connection.exec_driver_sql("CREATE TABLE numbers (message_id int)")
            connection.exec_driver_sql("INSERT INTO numbers VALUES (19), (NULL), (19)")
        engine.dispose()
        with contextlib.closing(Database(url, "shop")) as database:
            for number in range(len(COLUMNS[kind])):
                where = "note LIKE 'a%'"
                if kind == "postgresql":
                    where += " AND to_jsonb(note) ? 'a%b' AND note <> 'why?'"
                effects = BusinessEffects(database, f"SELECT message_id FROM ledger{number} WHERE {where} -- all\n;\n")
                assert effects.of([*names, f"{names[0]}0"]) == {name: {"points"} for name in names}
                proven = effects.proven(spark, Span(AT_US - 1_000_000, AT_US + 1_000_000, AT_US * 2), None)
                assert proven is not None
                rows = [(bytes(row["id"]), row["no"], row["consumer_group"]) for row in proven.distinct().collect()]
                assert sorted(rows) == [(made_at(AT_US, n), n, "points") for n in range(3)]
                doubled = effects.doubled(spark, Span(AT_US - 1_000_000, AT_US + 1_000_000, AT_US * 2)).collect()
                assert [(row["message_id"], row["times"]) for row in doubled] == [(names[2], 2)]
                assert not list(effects.doubts())
            numbers = BusinessEffects(database, "SELECT message_id, 7 AS consumer_group FROM numbers")
            assert numbers.of(names) == {} and len(list(numbers.doubts())) == 1
            proven = numbers.proven(spark, None, None)
            assert proven is not None and proven.count() == 0
            with pytest.raises(InvalidRequest, match="column message_id"):
                BusinessEffects(database, "SELECT 1 AS other")
            groups = BusinessEffects(database, "SELECT message_id, NULL AS consumer_group FROM ledger0")
            assert groups.of(names[:1]) == {names[0]: {UNNAMED}}


def test_effects_are_found_in_a_ledger_that_sorts_ids_otherwise(
    spark: Any, database_urls: dict[str, str], tmp_path: Path
) -> None:
    """In Danish `aa` is a letter after z: an effect with an id that has it lay outside of all ranges."""
    before, at, after = 0x019F00A9, 0x019F00AA, 0x019F00AB
    names = [f"{ids.to_text(made_at((prefix << 16) * 1000, 0))}.0" for prefix in (before, at, after)]
    with empty_database("postgresql", database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql('CREATE TABLE ledger (message_id text COLLATE "da-x-icu", consumer_group text)')
            for name in names:
                connection.exec_driver_sql(f"INSERT INTO ledger VALUES ('{name}', 'points')")
        engine.dispose()
        with contextlib.closing(Database(url, "shop")) as database:
            effects = BusinessEffects(database, "SELECT * FROM ledger")
            for first in range(3):
                span = Span(((before + first) << 16) * 1000, ((after + 1) << 16) * 1000, 1 << 52)
                proven = effects.proven(spark, span, None)
                assert proven is not None and proven.distinct().count() == 3 - first


@pytest.mark.long
@pytest.mark.parametrize("kind", DATABASES)
def test_effects_of_groups_that_differ_by_case_alone_are_not_doubled(
    spark: Any, kind: str, database_urls: dict[str, str], tmp_path: Path
) -> None:
    """A ledger's own collation, or that which a converted text has, does not distinguish them."""
    ignoring = {
        "sqlite": "COLLATE NOCASE",
        "mysql": "COLLATE utf8mb4_0900_ai_ci",
        "mariadb": "COLLATE utf8mb4_general_ci",
    }
    name = f"{ids.to_text(made_at(AT_US, 1))}.0"
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        with engine.begin() as connection:
            column = f"varchar(64) {ignoring.get(kind, '')}"
            connection.exec_driver_sql(f"CREATE TABLE ledger (message_id {column}, consumer_group {column})")
            for group in ("points", "Points", "pöints"):
                connection.execute(sa.text(f"INSERT INTO ledger VALUES ('{name}', '{group}')"))
        engine.dispose()
        with contextlib.closing(Database(url, "shop")) as database:
            effects = BusinessEffects(database, "SELECT message_id, consumer_group FROM ledger")
            assert effects.doubled(spark).collect() == []
            assert effects.of([name]) == {name: {"points", "Points", "pöints"}}
            (doubt,) = effects.doubts({"points"})
            assert "'Points', 'pöints'" in doubt
