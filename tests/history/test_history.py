"""The checker finds each kind of violation, and a short history under most faults has none."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.history.checker import KINDS, Effect, History, counts, violations
from tests.history.faults import Faults
from tests.history.run import (
    Least,
    Outcome,
    lacking,
    least_of,
    most_seconds,
    most_settle_seconds,
    options_of,
    play,
)
from tests.history.scene import Scene
from tests.history.settling import settle
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database

SECONDS = 8.0
PAUSE = 0.25
LEAST = Least(messages=150, faults={"server killed": 1}, seconds=PATIENCE_SECONDS)


def sound() -> History:
    """A sound history: two intents, one rolled back, and a group that received the other's message in order."""
    return History(
        committed={"a.0": "t", "b.0": "t"},
        intents={"a", "b"},
        answers={"a": "committed", "c": "rolled back", "d": "refused"},
        expected={"g": {"a.0", "b.0"}},
        ordered=frozenset(("g",)),
        effects=[
            Effect("g", "a.0", "k", 0, 1, "2026-01-01T00:00:01Z"),
            Effect("g", "b.0", "k", 1, 0, "2026-01-01T00:00:02Z"),
        ],
    )


def test_a_sound_history_breaks_nothing() -> None:
    assert violations(sound()) == []


PLANTED = {
    "LOST": lambda h: h.effects.pop(),
    "DOUBLED": lambda h: h.effects.append(
        dataclasses.replace(h.effects[1], committed_at="2026-01-01T00:00:03Z", offset=9)
    ),
    "PHANTOM": lambda h: h.effects.append(Effect("g", "c.0", "other", 0, 5, "2026-01-01T00:00:03Z")),
    "DISORDER": lambda h: h.effects.reverse(),
    "EARLY": lambda h: h.early.append("a.0 was handled in g 1 s before it was due"),
    "FAILED": lambda h: h.failed.append("POST groups/g/pause was answered with 500"),
    "DIED": lambda h: h.died.append("consumer g ended with -6"),
    "STUCK": lambda h: h.unsettled.append("group g is 1 behind"),
    "OPPOSITE": lambda h: h.opposite.append("x is COMMITTED in one, and ROLLED_BACK at the server"),
    "ANSWER": lambda h: h.answers.update(e="committed"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_caught(kind: str) -> None:
    history = sound()
    PLANTED[kind](history)
    counted = counts(violations(history))
    assert counted == {name: int(name == kind) for name in KINDS}


def test_messages_that_are_moved_out_of_order_are_caught() -> None:
    history = sound()
    history.moved_in_order = {"k": ["b.0", "a.0"]}
    assert counts(violations(history))["DISORDER"] == 1


def test_disorder_within_a_queue_is_caught() -> None:
    history = sound()
    history.effects[1] = dataclasses.replace(history.effects[1], queue=0, offset=0)
    assert counts(violations(history))["DISORDER"] == 1


def test_a_history_that_shows_less_than_was_asked_for_is_caught() -> None:
    outcome = Outcome(sound(), [], Counter(), [], Counter(), Counter(), fewest_kills=3)
    assert lacking(outcome, Least(2, {}, 0.0, kills=3)) == ""
    assert lacking(outcome, Least(3, {}, 0.0, kills=4)) == "2 messages of 3; 3 kills of 4"


def ended() -> None:
    """Freeze a process that has just ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    os.kill(process.pid, signal.SIGSTOP)


def fails() -> None:
    raise AssertionError("the server does not start again")


@pytest.mark.parametrize(("fault", "broken", "refused"), [(ended, 0, 1), (fails, 1, 0)])
def test_a_fault_that_cannot_be_made_ends_no_campaign(fault: Callable[[], None], broken: int, refused: int) -> None:
    """A campaign of ten minutes had no verdict where a message had killed a process just before it was to be frozen."""
    stage = SimpleNamespace(
        scene=Scene({}), servers=SimpleNamespace(by_name={}), room=SimpleNamespace(can_fill=False),
        actors={}, movers=[], guests={},
    )  # fmt: skip
    faults = Faults(stage, 1)

    def once() -> None:
        faults._over.set()
        fault()

    faults._go_on({"frozen": once}, 0.0)
    assert (faults.refused["frozen"], len(faults.broken)) == (refused, broken)


@pytest.mark.parametrize("moves", [False, True])
def test_a_history_that_progresses_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    """A loaded machine may need longer than a campaign waits, and what is late then is no violation."""
    left = itertools.count()
    monkeypatch.setattr("tests.history.settling._waiting", lambda _: [f"{next(left) if moves else 0} wait"])
    unchanged, most = (PATIENCE_SECONDS, 0.1) if moves else (0.1, PATIENCE_SECONDS)
    settled = settle(SimpleNamespace(directory=tmp_path), unchanged, most)
    assert (settled.moves, bool(settled.waiting)) == (moves, True)


def test_kills_of_nodes_are_asked_for_beside_those_of_processes() -> None:
    kills = ["server killed", "node killed", "pg restarted"]
    assert least_of(options_of(["--over-kafka", "--seconds", "600"])).wanted(kills) == {
        "server killed": 0,
        "node killed": 20,
        "pg restarted": 0,
    }
    assert least_of(options_of(["--kills", "3"])).wanted(kills) == dict.fromkeys(kills, 3)


def test_a_campaign_says_how_long_it_may_take() -> None:
    given = options_of(["--over-kafka", "--seconds", "600"])
    assert 2 * 600 + most_settle_seconds(600) < most_seconds(given) < 120 * 60


@pytest.mark.long
@pytest.mark.parametrize("bridged", ["mariadb", "mysql"])
def test_a_short_history_over_databases(bridged: str, tmp_path: Path, database_urls: Mapping[str, str]) -> None:
    """Servers store transactions in two databases, from which a bridge and a relay move them to a queue server."""
    with (
        empty_database("postgresql", database_urls, tmp_path) as pg,
        empty_database(bridged, database_urls, tmp_path) as my,
    ):
        scene = Scene({"pg": pg, "my": my}, is_over_databases=True, pause=PAUSE)
        outcome = play(tmp_path, SECONDS / 2, 2, scene, LEAST)
    assert (outcome.violations, outcome.broken) == ([], [])
    assert outcome.faults["server killed"] >= 1
    assert len(outcome.history.committed) >= LEAST.messages
    assert outcome.history.moved_in_order


@pytest.mark.long
def test_a_short_history_of_workers(tmp_path: Path, database_urls: Mapping[str, str]) -> None:
    """Workers are killed and frozen alone, with their parent, or left by it; a relay points at the one port."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        sources = {"pg": url, "lite": f"sqlite:///{tmp_path}/lite.db"}
        least = Least(messages=150, faults={"worker killed": 1, "server killed": 1}, seconds=PATIENCE_SECONDS)
        outcome = play(tmp_path, SECONDS, 1, Scene(sources, callers=2, workers=2, pause=PAUSE), least)
    assert (outcome.violations, outcome.broken) == ([], [])
    assert outcome.faults["worker killed"] >= 1
    assert len(outcome.history.committed) >= least.messages


def test_a_short_history(tmp_path: Path, database_urls: Mapping[str, str]) -> None:
    """Play everything at once on two databases, without restarts of them, because other tests use one of them."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        sources = {"pg": url, "lite": f"sqlite:///{tmp_path}/lite.db"}
        outcome = play(tmp_path, SECONDS / 2, 1, Scene(sources, callers=2, pause=PAUSE), LEAST)
    assert (outcome.violations, outcome.broken) == ([], [])
    assert outcome.faults["server killed"] >= 1
    assert len(outcome.history.committed) >= LEAST.messages
