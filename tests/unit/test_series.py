"""Figures over time: of each slot the mean or the highest, gaps where nothing is known, and never more memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from notify.errors import NotFound
from notify.server.watch import figures
from notify.server.watch.chart_file import FILE, ChartFile
from notify.server.watch.figures import Counts, Figures
from notify.server.watch.history import COUNTERS, History
from notify.server.watch.series import LATELY, SPANS, Field, Series

T0 = 1_800_000_000 // 900 * 900
FIELDS = (Field("rate"), Field("lag", is_highest=True))


def test_a_quarter_of_an_hour_has_the_mean_rate_and_the_highest_lag() -> None:
    series = Series(FIELDS)
    for minute in range(15):
        series.add(T0 + minute * 60, (float(minute), float(minute % 7)))
    assert series.columns("day") == {"at": [T0], "rate": [7.0], "lag": [6.0]}
    hour = series.columns("hour")
    assert hour["at"] == [T0 + minute * 60 for minute in range(15)]
    assert hour["rate"] == [float(minute) for minute in range(15)] and series.newest("rate") == 14.0


def test_a_pause_is_a_gap_and_the_oldest_are_overwritten() -> None:
    series = Series(FIELDS)
    series.add(T0, (1.0, 1.0))
    series.add(T0 + 180, (None, 4.0))
    assert series.columns("hour") == {
        "at": [T0, T0 + 60, T0 + 120, T0 + 180],
        "rate": [1.0, None, None, None],
        "lag": [1.0, None, None, 4.0],
    }
    assert series.newest("rate") is None
    series.add(T0 + 60 * 60, (3.0, 0.0))
    hour = series.columns("hour")
    assert hour["at"][0] == T0 + 180 and len(hour["at"]) == SPANS["hour"].slots - 2
    series.add(T0 + 10 * 86_400, (2.0, 0.0))
    assert series.columns("hour")["rate"] == [2.0] and series.columns("day")["rate"] == [2.0]


def test_a_week_has_two_hours_a_slot_and_five_minutes_are_the_end_of_the_hour() -> None:
    series = Series(FIELDS)
    for minute in range(8 * 24 * 60):
        series.add(T0 + minute * 60, (float(minute % 120), 1.0))
    week = series.columns("week")
    assert len(week["at"]) == SPANS["week"].slots and week["at"][1] - week["at"][0] == 7200
    assert week["rate"] == [59.5] * SPANS["week"].slots
    assert series.columns(LATELY)["at"] == series.columns("hour")["at"][-5:]
    assert Series(FIELDS).columns(LATELY) == {"at": [], "rate": [], "lag": []}


def test_the_spans_of_an_older_file_are_kept() -> None:
    series = Series(FIELDS)
    series.add(T0, (1.0, 2.0))
    kept = series.kept()
    del kept.slots["week"], kept.counts["week"], kept.values["week"]
    restored = Series(FIELDS)
    restored.restore(kept)
    assert restored.columns("hour") == series.columns("hour") and restored.columns("day") == series.columns("day")
    assert restored.columns("week") == {"at": [], "rate": [], "lag": []}


def test_a_clock_that_was_set_back_changes_nothing() -> None:
    series = Series(FIELDS)
    series.add(T0 + 600, (1.0, 1.0))
    before = series.columns("hour")
    series.add(T0, (9.0, 9.0))
    assert series.columns("hour") == before
    assert Series(FIELDS).columns("day") == {"at": [], "rate": [], "lag": []}


class Queues:
    """Topics and groups whose figures the test sets."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.group_total = 100
        self.group_lag = 7
        self.dead_letters: int | None = None
        self.lag = 5

    def topics(self) -> list[str]:
        return list(self.totals)

    def topic(self, name: str) -> Counts:
        if name not in self.totals:
            raise NotFound("there is none")
        return Counts(self.totals[name], self.lag)

    def groups(self) -> list[str]:
        return ["g"]

    def group(self, name: str) -> Counts:
        return Counts(self.group_total, self.group_lag, 2.5, dead_letters=self.dead_letters)


def test_rates_are_of_the_time_between_two_looks() -> None:
    now = [T0 * 1_000_000]
    queues = Queues()
    kept = Figures(queues, lambda: now[0])
    queues.totals = {"a": 10, "b": 0}
    asyncio.run(kept.sample())
    assert kept.rate("a") is None and kept.topic("a", "hour")["lag"] == [5.0]
    now[0] += 60_000_000
    queues.totals = {"a": 130}
    queues.group_total = 40  # set back
    asyncio.run(kept.sample())
    assert kept.rate("a") == 2.0 and kept.rate("b") is None
    assert kept.group("g", "hour")["settled"] == [None, 0.0]
    assert kept.group("g", "day")["oldest_seconds"] == [2.5]
    with pytest.raises(NotFound):
        kept.topic("b", "hour")


def test_arrivals_are_settlements_plus_growth_of_the_lag() -> None:
    now = [T0 * 1_000_000]
    queues = Queues()
    kept = Figures(queues, lambda: now[0])
    asyncio.run(kept.sample())
    assert kept.lately("g") == {"arrived_per_second": None, "settled_per_second": None, "oldest_seconds": 2.5}
    now[0] += 60_000_000
    queues.group_total, queues.group_lag = 160, 127
    asyncio.run(kept.sample())
    assert kept.lately("g") == {"arrived_per_second": 3.0, "settled_per_second": 1.0, "oldest_seconds": 2.5}
    assert kept.group("g", "hour")["arrived"] == [None, 3.0]
    assert set(kept.lately("none").values()) == {None}


def test_a_group_fails_while_its_dead_letters_grow() -> None:
    now = [T0 * 1_000_000]
    queues = Queues()
    kept = Figures(queues, lambda: now[0])
    assert not kept.is_failing("g", 7)  # nothing is known yet
    for dead, is_failing in ((3, False), (5, True), (5, False), (0, False)):
        queues.dead_letters = dead
        asyncio.run(kept.sample())
        assert kept.is_failing("g", dead) is is_failing
        now[0] += 60_000_000
    assert kept.is_failing("g", 1)  # since the last minute
    assert kept.group("g", "hour")["dead_letters"] == [3.0, 5.0, 5.0, 0.0]


def test_a_topic_that_somebody_looks_at_takes_the_place_of_one_that_nobody_looks_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figures, "MOST_SERIES", 2)
    queues = Queues()
    kept = Figures(queues, lambda: T0 * 1_000_000)
    queues.totals = {"a": 1, "b": 1, "c": 1}
    asyncio.run(kept.sample())
    kept.topic("a", "hour")
    assert kept.topic("c", "hour")["lag"] == [5.0]
    queues.lag = 9
    asyncio.run(kept.sample())
    assert kept.topic("a", "hour")["lag"] == [9.0] == kept.topic("c", "hour")["lag"]
    assert kept.rate("b") is None


async def charts(directory: Path, queues: Queues) -> tuple[ChartFile, History, Figures]:
    """A server's charts with what an earlier one left, and one more figure of each."""
    clock = [T0 * 1_000_000]
    core = SimpleNamespace(metrics=SimpleNamespace(**dict.fromkeys(COUNTERS, 0)), clock=lambda: clock[0])
    history, figures = History(core, lambda: queues.lag), Figures(queues, core.clock)
    file = ChartFile(directory, history, figures)
    await file.load()
    clock[0] += (120 if (directory / FILE).exists() else 0) * 1_000_000
    history.sample()
    await figures.sample()
    return file, history, figures


async def test_charts_go_on_after_a_restart(tmp_path: Path) -> None:
    queues = Queues()
    queues.totals = {"orders": 10}
    file, _, _ = await charts(tmp_path, queues)
    await file.stop()
    queues.lag = 9
    _, history, figures = await charts(tmp_path, queues)
    assert history.columns("hour")["lag"] == [5.0, 9.0] and history.columns("day")["lag"] == [9.0]
    assert figures.topic("orders", "hour")["lag"] == [5.0, None, 9.0]


@pytest.mark.parametrize("content", [b"", b"\x93no charts", b"\x81\xa7version\x02"])
async def test_a_file_that_is_not_a_chart_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    _, history, _ = await charts(tmp_path, Queues())
    assert history.columns("hour")["lag"] == [5.0]
