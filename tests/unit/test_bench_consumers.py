"""`make bench-consumers`: shares, the table, turns that fail, and what counts as lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.errors import Unavailable
from tools.bench import consumers
from tools.bench.consumers import PLAIN, Figures, Kind, Plan, Report, Turn
from tools.bench.fill import order

PLAN = Plan(messages=1000, body=256, seconds=3.0, only=())


def figures(rate: float, **others: float) -> Figures:
    return {"per_second": rate, "client_us": 1e6 / rate, "server_us": 15.0, "lost": 0, "doubled": 0} | others


def report(*rounds: dict[str, Figures]) -> Report:
    made = Report(PLAN)
    made.rounds += rounds
    return made


def test_a_share_is_that_of_one_round() -> None:
    """The machine is half as fast in the second round; the shares do not show it."""
    made = report(
        {PLAIN: figures(60_000), "Consumer": figures(6000), "Consumer, timed": {"p50_ms": 1.5}},
        {PLAIN: figures(30_000), "Consumer": figures(3000)},
        {"Consumer": figures(5000)},
    )
    lines = made.table().splitlines()
    assert lines[2] == f"| {PLAIN} | 45,000 (30,000 to 60,000) |  | 25.0 | 15.0 |  |"
    assert lines[3] == "| Consumer | 5,000 (3,000 to 6,000) | 0.10 (0.10 to 0.10) | 200.0 | 15.0 | 1.50 |"
    assert len(lines) == 4, "what was not measured has no line"


def test_lost_and_doubled_messages_are_named() -> None:
    made = report({PLAIN: figures(1000), "Consumer": figures(1000, lost=2, doubled=1)})
    assert made.wrong() == ["Consumer lost 2 and doubled 1 in round 1"]


def test_a_kind_brings_the_one_that_it_stands_beside() -> None:
    names = [kind.name for kind in Plan(1, 1, 1, ("AsyncConsumer, ordered",)).chosen(consumers.QUEUE)]
    assert names == [PLAIN, "AsyncConsumer, ordered"]


def test_a_turn_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def fails() -> Figures:
        raise Unavailable("no PostgreSQL")

    @contextlib.contextmanager
    def system(directory: Path, plan: Plan, number: int) -> Iterator[dict[str, Turn]]:
        yield {"bad": fails, "good": lambda: figures(10)}

    @contextlib.contextmanager
    def missing(directory: Path, plan: Plan, number: int) -> Iterator[dict[str, Turn]]:
        raise Unavailable("no Java")
        yield {}

    monkeypatch.setattr(consumers, "SYSTEMS", {"here": system, "there": missing})
    *_, made = consumers.measure(PLAN, 2, ["here", "there"], said.append)
    assert [list(round_) for round_ in made.rounds] == [["good"], ["good"]]
    of_round_1 = ["bad, round 1: no PostgreSQL", "there, round 1: no Java"]
    assert made.skipped == [*of_round_1, "there, round 2: no Java", "bad, round 2: no PostgreSQL"]


@pytest.mark.parametrize(
    ("unique", "is_cut", "lost"),
    [(1000, False, 0), (990, False, 10), (990, True, 0)],
    ids=["the whole pile", "ended early", "the time was over"],
)
def test_a_turn_that_ran_out_of_time_lost_nothing(
    monkeypatch: pytest.MonkeyPatch, unique: int, is_cut: bool, lost: int
) -> None:
    group = {"group": "g", "received": unique, "unique": unique}
    got = {"groups": [group], "counted": unique, "seconds": 1.0, "is_cut": is_cut, "cpu_seconds": 0.1}

    class Ended:
        """A process that has ended."""

        def __init__(self, *_: object) -> None:
            """Starts nothing."""

        def result(self, _: float) -> dict[str, Any]:
            return got

    monkeypatch.setattr(consumers, "Process", Ended)
    assert consumers.consumed(Kind("x", "threads"), {}, PLAN, lambda: 0.0)["lost"] == lost


def test_the_file_has_the_ratios_by_their_keys() -> None:
    round_ = {PLAIN: figures(60_000), "Consumer": figures(6000), consumers.PUSH.name: figures(12_000)}
    got = report(round_).as_json({})
    assert {key: got[key] for key in ("plain", *consumers.RATIOS)} == {
        "plain": 60_000, "thread": 0.1, "async": None, "batch": None, "inbox_postgresql": None, "kafka": None,
        "rocketmq": 0.5,
    }  # fmt: skip
    assert got["shares"]["Consumer"] == 0.1
    assert got["shares"]["AsyncConsumer"] is None


@pytest.mark.parametrize("size", [10, 256])
def test_a_body_has_its_number_and_its_size(size: int) -> None:
    assert len(order(7, size)) == max(size, len(b'{"number":7,"text":""}'))
    assert order(7, size).startswith(b'{"number":7,')
