"""Findings become causes: whose, since when, how many, and commands that the CLI takes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from notify.cli import main
from notify.spark.causes.cause import Cause
from notify.spark.causes.commands import Commands
from notify.spark.causes.grouping import MOST, causes_of
from notify.spark.causes.settled import LastSettled, Settled, Standstill
from notify.spark.causes.stretches import PAUSE_US
from notify.spark.judge.evidence import NOT_GIVEN
from notify.spark.judge.findings import FINDINGS
from notify.spark.result import Found, Result
from tests.support.transactions import new_id

MINUTE = 60_000_000
T0 = 1_795_428_240_000_000
"""2026-11-23 10:04:00Z."""
NOW = T0 + 60 * MINUTE
COMMANDS = Commands(
    ("--database", "shop=postgresql://app:***@db.example/shop", "--log", "/var/lib/notify data"),
    ("--max-transaction-seconds", "5", "--deliver-seconds", "7"),
    ("--from", "2026-11-23T10:00:00Z"),
    ("--url", "http://127.0.0.1:7401"),
    (("the source", "postgresql://app:***@db.example/shop", ""),),
)


def told(cases: Sequence[Found], last: LastSettled | None = None, **fields: Any) -> list[Cause]:
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.finding] = counts.get(case.finding, 0) + 1
    result = Result("FINDINGS", found=list(cases), counts=counts | fields.pop("counts", {}), **fields)
    return causes_of(result, Standstill(last or {}, NOW - 10 * MINUTE), COMMANDS)[0]


def undelivered(at_us: int, group: str = "points", topic: str = "orders", queue: int = 0) -> Found:
    return Found(
        "UNDELIVERED", new_id(), topic=topic, queue=queue, offset=1, groups=[group], at_us=at_us,
        evidence={"queued_us": at_us},
    )  # fmt: skip


def lost(at_us: int, group: str = "bank", **evidence: Any) -> Found:
    return Found(
        "LOST", new_id(), topic="orders", producer_group=group, at_us=at_us, database="shop", evidence=evidence
    )


def test_a_backfill_names_the_schema_of_its_source() -> None:
    tenants = tuple((source, COMMANDS.databases[0][1], f"t_{source}") for source in "ab")
    lines = replace(COMMANDS, databases=tenants)._backfill("b", T0)
    assert [line.partition(" --backfill")[0] for line in lines] == [
        "notify bridge --dsn 'b=postgresql://app:***@db.example/shop' --schema t_b"
    ]


def test_a_group_that_stands_still() -> None:
    cases = [undelivered(T0 + n * MINUTE) for n in range(1, 41)]
    last = {("points", "orders", 0): Settled(T0, T0)}
    (cause,) = told(cases, last)
    assert cause.sentence == (
        "group points has been stuck since 2026-11-23 10:04:00Z: 40 messages of topic orders are undelivered"
    )
    assert (cause.finding, cause.count, cause.fails, cause.subject) == ("UNDELIVERED", 40, True, "group points")
    assert cause.commands[0] == "notify group show points --url http://127.0.0.1:7401"
    assert cause.commands[1].endswith("data' --max-transaction-seconds 5 --deliver-seconds 7")
    (never,) = told(cases)
    assert never.sentence.startswith("group points has settled nothing since 2026-11-23 10:05:00Z: 40 messages")


def test_a_queue_that_stands_still_while_others_go_on() -> None:
    last = {("points", "orders", 0): Settled(T0, T0), ("points", "mails", 0): Settled(NOW, NOW)}
    (cause,) = told([undelivered(T0 + MINUTE)], last)
    assert cause.sentence.startswith("group points has been stuck there since 2026-11-23 10:04:00Z: 1 message of topic")


def test_a_slow_group_and_single_messages() -> None:
    behind = {("points", "orders", 0): Settled(NOW - MINUTE, T0)}
    (cause,) = told([undelivered(T0 + MINUTE), undelivered(T0 + 2 * MINUTE)], behind)
    assert cause.sentence.startswith("group points is behind: 2 messages of topic orders, queued between 2026-11-23")
    assert "last settlement was at 2026-11-23 11:03:00Z" in cause.sentence
    passed = {("points", "orders", 0): Settled(NOW - MINUTE, NOW - 2 * MINUTE)}
    (cause,) = told([undelivered(T0 + MINUTE)], passed)
    assert cause.sentence == (
        "group points left out 1 message of topic orders, queued at 2026-11-23 10:05:00Z: it settled later ones"
    )


def test_stretches_of_time_are_told_apart() -> None:
    early = [lost(T0 + n) for n in range(3)]
    late = [lost(T0 + PAUSE_US + 2 * MINUTE + n) for n in range(2)]
    first, second = told([*late, *early])
    assert first.sentence == (
        "producer group bank, database shop: 3 messages committed and in no queue, at 2026-11-23 10:04:00Z"
    )
    assert second.count == 2 and "at 2026-11-23 10:16:00Z" in second.sentence
    (one,) = told([lost(T0 + n * 2 * PAUSE_US) for n in range(9)])
    assert one.count == 9 and one.sentence.endswith("in 9 stretches")


def test_ghosts_name_who_sent_them() -> None:
    ghost = Found("GHOST", new_id(), producer_group="bank", at_us=T0, evidence={"sent_from": NOT_GIVEN, "source": "X1"})
    (cause,) = told([ghost])
    assert cause.sentence.startswith("producer group bank, source X1: 1 message delivered that no database committed")


def test_causes_are_ordered_by_weight_without_harmless_ones() -> None:
    cases = [
        Found("MISDATED", new_id(), producer_group="bank", at_us=T0), undelivered(T0), lost(T0), lost(T0),
        Found("ACKED_NO_EFFECT", new_id(), groups=["mail", "points"], at_us=T0, evidence={"acked_us": T0}),
        Found("REDELIVERED", new_id(), groups=["mail"], at_us=T0), lost(T0, repaired=True),
    ]  # fmt: skip
    causes = told(cases, reasons=["the log cannot be read from 10:04 to 10:05"])
    assert [cause.finding for cause in causes] == [
        "LOST", "ACKED_NO_EFFECT", "ACKED_NO_EFFECT", "UNDELIVERED", "INCONCLUSIVE", "MISDATED",
    ]  # fmt: skip
    assert causes[0].count == 2
    assert causes[1].sentence == "group mail acknowledged 1 message at 2026-11-23 10:04:00Z without an effect"
    assert causes[4].sentence == "the log cannot be read from 10:04 to 10:05" and not causes[4].fails


def test_there_are_at_most_so_many_and_the_rest_is_counted() -> None:
    cases = [lost(T0, f"group{n}") for n in range(MOST + 5)]
    result = Result("FINDINGS", found=cases, counts={"LOST": len(cases)})
    causes, left = causes_of(result, Standstill({}, NOW), COMMANDS)
    assert (len(causes), left) == (MOST, 5)


def test_a_number_that_is_not_whole_says_so() -> None:
    (cause,) = told([lost(T0)], counts={"LOST": 150_000})
    assert "at least 1 message committed" in cause.sentence


def test_dead_letters_by_group_and_reason() -> None:
    letter = Found("DEAD", new_id(), groups=["mail"], at_us=T0)
    rows = [{"group": "mail", "reason": "refused", "count": 28}, {"group": "mail", "reason": "late", "count": 3}]
    (cause,) = told([letter], dead=rows)
    assert cause.sentence == (
        "group mail gave up 31 messages since 2026-11-23 10:04:00Z that were not redriven: 28 × 'refused', 3 × 'late'"
    )
    assert (cause.count, cause.fails) == (31, False)
    assert "notify dead-letter redrive mail --all --reason 'after an audit' --url" in cause.commands[2]


def test_damage_names_its_log_and_a_gap_its_bridge() -> None:
    broken = Found("CORRUPT", detail="x", at_us=T0, log="data", evidence={"position": 10, "end": 20, "is_read": True})
    gap = Found(
        "BRIDGE_GAP", detail="x", at_us=T0, log="data", evidence={"source": "the source", "from_us": T0 - MINUTE}
    )
    causes = told([broken, gap])
    assert [c.sentence for c in causes] == [
        "log data: 1 damaged place from byte 10 to 20, written at 2026-11-23 10:04:00Z",
        "source the source: its bridge left 1 gap, at 2026-11-23 10:04:00Z",
    ]
    assert causes[1].commands[1] == (
        "notify bridge --dsn 'the source=postgresql://app:***@db.example/shop' --backfill-from 2026-11-23T10:03:00Z "
        "--url http://127.0.0.1:7401"
    )


def cases_of_every_class() -> list[Found]:
    cases = []
    for f in FINDINGS:
        evidence = {"queued_us": T0, "position": 1, "end": 2, "source": "the source", "from_us": T0}
        cases.append(Found(f.name, new_id(), 0, "x", "orders", 0, 1, "bank", ["points"], T0, "shop", "data", evidence))
        cases.append(Found(f.name, new_id(), 0, "x", "orders", 0, 1, "bank", [], T0, "shop", "data", evidence))
        cases.append(Found(f.name, "", 0, "x", database="shop", evidence=evidence))
    return cases


@pytest.mark.parametrize("kafka", ["", "kafka://broker.example:9092"])
def test_every_command_is_one_that_the_command_line_takes(kafka: str) -> None:
    names = {f.name for f in FINDINGS}
    over = replace(COMMANDS, kafka=kafka)
    result = Result(
        "FINDINGS", found=cases_of_every_class(), counts=dict.fromkeys(names, 3), bad=tuple(names), reasons=["why"],
        dead=[{"group": "points", "reason": "x", "count": 1}],
    )  # fmt: skip
    several: list[Cause] = []
    for name in sorted(names):
        alone = Result(found=[f for f in result.found if f.finding == name], counts=result.counts, bad=result.bad)
        several += causes_of(alone, Standstill({}, NOW), over)[0]
    several += causes_of(result, Standstill({}, NOW), over)[0]
    commands = {command for cause in several for command in cause.commands}
    assert len(commands) > 20
    for command in commands:
        parse(command)
    said = {" ".join(command.split()[1:3]) for command in commands}
    assert {"group show", "audit explain", "dead-letter redrive", "transaction list", "node bridges"} <= said
    assert any("--plan" in command for command in commands) == (not kafka)
    assert not [cause.sentence for cause in several if "{" in cause.sentence]


def parse(line: str) -> None:
    """Parse a line as the command line does, up to calling the command. Raises UsageError."""
    command: Any = main.command()
    program, *words = shlex.split(line)
    assert program == "notify"
    context = typer.Context(command, info_name=program)
    while isinstance(command, TyperGroup):
        name, command, words = command.resolve_command(context, words)
        assert command is not None
        if not isinstance(command, TyperGroup):
            command.make_context(name, words, parent=context)
        context = typer.Context(command, info_name=name, parent=context)
