"""The benches: `python -m tools.bench NAME`, `make bench-consumers` with its shares and losses, and `make profile`."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tools.bench
from notify.errors import Unavailable
from tools.bench import consumers
from tools.bench.__main__ import PROGRAMS, main
from tools.bench.consumers import PLAIN, Figures, Kind, Plan, Report, Turn
from tools.bench.fill import order
from tools.bench.profile.__main__ import Profile, by_function, table

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


# --- `python -m tools.bench NAME`: its names, and what it refuses ---------------------------------------------------

ROOM = Path(tools.bench.__file__).parent


def test_each_module_with_options_of_its_own_has_a_name() -> None:
    found = {
        ".".join(path.relative_to(ROOM).with_suffix("").parts).removesuffix(".__main__")
        for path in ROOM.rglob("*.py")
        if path != ROOM / "__main__.py" and "ArgumentParser(" in path.read_text()
    }
    assert found == set(PROGRAMS)


def test_each_target_of_the_makefile_names_a_bench() -> None:
    named = re.findall(r"-m tools\.bench ([\w.]+)", (ROOM.parents[1] / "Makefile").read_text())
    assert set(named) == set(PROGRAMS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bridge", "--dsn", "nonsense"), "not a database URL"),
        (("bridge", "--dsn", "sqlite:///x.db"), "SQLite has one writer, and no log"),
        (("delivery", "--client", "wires"), "--client must be one of wire, plain, threads, coroutines"),
        (("delivery", "--mode", "broadcast"), "--mode must be shared, ordered, failover or exclusive"),
    ],
)
def test_a_wrong_argument_is_refused(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools.bench", *words])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in printed and "Traceback" not in printed


# --- `make profile`: its table, and what it reads of py-spy's samples -----------------------------------------------


def test_a_table_has_both_sides_and_sums_what_is_small() -> None:
    before = Profile("1" * 40, "message", 1000.0, {"server": {"a f": 6.0, "b g": 3.96, "c tiny": 0.04}})
    after = Profile("2" * 40, "message", 2000.0, {"server": {"a f": 2.0, "d new": 3.0}})
    assert table("server", before, after).splitlines() == [
        "| server, µs of CPU a message | 1111111 | 2222222 |",
        "|---|---|---|",
        "| all | 10.00 | 5.00 |",
        "| `a f` | 6.00 | 2.00 |",
        "| `b g` | 3.96 |  |",
        "| `d new` |  | 3.00 |",
        "| functions below 1% | 0.04 |  |",
    ]


def test_samples_count_for_the_innermost_function() -> None:
    raw = (
        "main (/n/cli.py:3);run (/n/loop.py:9);read (/n/http.py:44) 7\n"
        "main (/n/cli.py);read (/n/http.py) 2\n"
        "<module> (/n/x (1).py);<lambda> (/n/loop.py) 1\n"
    )
    assert by_function(raw) == {"/n/http.py:read": 9, "/n/loop.py:<lambda>": 1}
