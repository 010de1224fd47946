"""How long things take: counts by bucket, their shares, the text of a report, and a bound on the number of names."""

from __future__ import annotations

import asyncio
import random
import re
from array import array
from pathlib import Path

import pytest

from notify.protocol.latency import (
    BOUNDS,
    BUCKETS,
    Histogram,
    parsed,
    parsed_slowest,
    quantile,
    shown,
    written,
    written_slowest,
)
from notify.server import latency
from notify.server.data.routes import WAITING, DataRoutes
from notify.server.exposition import Exposition
from notify.server.latency import (
    EXEMPLAR_US,
    KINDS,
    LOOK_US,
    MOST_LABELLED,
    OTHER,
    Exemplar,
    Histograms,
    Latencies,
    Latency,
)
from notify.server.metrics import Metrics
from notify.server.watch.figures import OF_GROUPS, OF_TOPICS, Counts, Figures
from notify.storage.message_run import CommitTimes, total_of

NOW = 1_800_000_000_000_000


def counted(*durations: float) -> Histogram:
    """A histogram of durations in seconds."""
    histogram = Histogram()
    for seconds in durations:
        histogram.add(round(seconds * 1e6))
    return histogram


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(-1.0, 0), (0.0, 0), (0.001, 0), (0.0011, 1), (5.0, 11), (1000.0, 18), (1000.1, 19)]
)
def test_a_bucket_has_what_is_at_most_its_bound(seconds: float, bucket: int) -> None:
    histogram = counted(seconds)
    assert [n for n, count in enumerate(histogram.counts) if count] == [bucket]
    assert histogram.sum_us == max(0, round(seconds * 1e6))


def test_many_ages_are_counted_as_one_by_one() -> None:
    chosen = random.Random(7)
    for _ in range(200):
        ages = [round(10 ** chosen.uniform(0, 9.5)) for _ in range(chosen.randint(1, 60))]
        times = array("Q", sorted(NOW - age for age in ages))
        one_by_one, together = Histogram(), Histogram()
        for time_us in times:
            one_by_one.add(NOW - time_us)
        together.add_ages(NOW, *CommitTimes(times, total_of(times)).of(range(len(times))))
        assert together.counts == one_by_one.counts and together.sum_us == one_by_one.sum_us


def test_many_durations_are_counted_as_one_by_one() -> None:
    chosen = random.Random(11)
    for _ in range(200):
        durations = [10 ** chosen.uniform(-6, 3.5) for _ in range(chosen.randint(0, 60))]
        durations += chosen.choices(BOUNDS, k=3)
        together = Histogram()
        together.add_all_of(durations)
        one_by_one = counted(*durations)
        assert together.counts == one_by_one.counts
        assert abs(together.sum_us - one_by_one.sum_us) <= len(durations)


def test_times_in_any_order_and_parts_of_them_are_counted() -> None:
    ages = [300_000_000, 10, 20_000, 5]
    times = CommitTimes(array("Q", [NOW - age for age in ages]))
    histogram = Histogram()
    histogram.add_ages(NOW, *times.of(range(3)))
    assert histogram.counts == counted(300, 10e-6, 0.02).counts and histogram.sum_us == 300_020_010


def test_commits_in_the_future_count_as_no_time() -> None:
    """A clock that was set back."""
    times = array("Q", [NOW + 5, NOW + 10])
    histogram = Histogram()
    histogram.add_ages(NOW, times, sum(times))
    assert histogram.counts[0] == 2 and histogram.sum_us == 0


def test_a_share_lies_in_the_bucket_of_the_duration() -> None:
    chosen = random.Random(3)
    durations = sorted(10 ** chosen.uniform(-4, 2) for _ in range(1000))
    histogram = counted(*durations)
    for share in (0.5, 0.95, 0.99):
        exact = durations[round(share * 1000) - 1]
        above = next(bound for bound in BOUNDS if exact <= bound)
        below = max((bound for bound in BOUNDS if bound < exact), default=0.0)
        found = quantile(histogram.counts, share)
        assert found is not None and below <= found <= above
    assert quantile(Histogram().counts, 0.5) is None
    assert quantile(counted(5000).counts, 0.5) == BOUNDS[-1]


def test_a_report_is_read_as_it_was_written() -> None:
    histogram = counted(0.0005, 0.03, 0.03, 2000)
    again = parsed(written(histogram))
    assert again is not None and again.counts == histogram.counts and again.sum_us == histogram.sum_us
    assert len(written(counted(*BOUNDS, 5000))) < 200


TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_the_slowest_call_is_read_as_it_was_written() -> None:
    assert parsed_slowest(written_slowest(61_000, TRACE)) == (61_000, TRACE)
    wrong = (
        "",
        "x",
        f"1.{TRACE[1:]}",
        f"1.{TRACE}0",
        f".{TRACE}",
        f"-1.{TRACE}",
        f"1.{TRACE.upper()}",
        f"1.{'g' * 32}",
    )
    assert [text for text in wrong if parsed_slowest(text) is not None] == []


def test_a_bucket_keeps_one_exemplar_for_a_while() -> None:
    timed = Latency(with_exemplars=True)
    asked: list[str] = []

    def exemplify(us: int, now_us: int, trace_id: str) -> None:
        def find_trace() -> str:
            asked.append(trace_id)
            return trace_id

        timed.exemplify(us, now_us, find_trace)

    exemplify(3_000, NOW - LOOK_US, "")
    exemplify(3_000, NOW - 1, "soon")
    exemplify(3_000, NOW, "a")
    exemplify(4_000, NOW + EXEMPLAR_US - 1, "b")
    exemplify(30_000, NOW, "c")
    assert timed.exemplars == {2: Exemplar(3_000, NOW, "a"), 5: Exemplar(30_000, NOW, "c")}
    exemplify(4_000, NOW + EXEMPLAR_US, "")
    exemplify(4_000, NOW + EXEMPLAR_US + LOOK_US, "d")
    assert timed.exemplars[2] == Exemplar(4_000, NOW + EXEMPLAR_US + LOOK_US, "d")
    assert asked == ["", "a", "c", "", "d"], "a message is read only if its trace is wanted, and seldom"
    for us in range(0, 2_000_000_000, 500_000):
        exemplify(us, NOW, "e")
    assert len(timed.exemplars) <= BUCKETS


def test_a_server_that_does_not_trace_keeps_no_exemplars() -> None:
    timed = Latencies()["commit_to_ack"].of("g")
    timed.exemplify(3_000, NOW, lambda: TRACE)
    assert timed.exemplars is None


@pytest.mark.parametrize(
    "text", ["", "x", "1_", "1_2", "1_20.1", "1_0.1234567890", "1_-1.1", "1_0.²", "1" * 19, "1" + "_0.1" * 30]
)
def test_a_text_that_is_not_a_report_is_ignored(text: str) -> None:
    assert parsed(text) is None


def test_figures_of_the_last_minutes_forget_what_came_before() -> None:
    timed = Latency()
    timed.add(30_000)
    timed.turn()
    assert sum(timed.minute()) == sum(timed.lately()) == 1
    timed.add(40_000)
    assert sum(timed.minute()) == 1 and sum(timed.lately()) == 2
    timed.turn()
    timed.turn()
    assert shown(timed.lately()) == {"count": 0, "p50": None, "p95": None, "p99": None}
    assert sum(timed.counts) == 2


def test_the_number_of_series_is_bounded_and_no_count_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MOST_NAMES", 5)
    monkeypatch.setattr(latency, "MOST_LABELLED", 2)
    histograms = Histograms()
    histograms.of("idle")
    for name in "abcdef":
        histograms.of(name).add(1_000)
    seen = {name: sum(histogram.counts) for name, histogram in histograms.samples()}
    assert seen == {"a": 1, "b": 1, OTHER: 4}
    histograms.forget("c")  # which had no series of its own
    histograms.forget("a")
    histograms.of("g").add(1_000)
    histograms.of("d").add(1_000)
    seen = {name: sum(histogram.counts) for name, histogram in histograms.samples()}
    assert seen == {"b": 1, "g": 1, OTHER: 5}
    assert all(len(histogram.counts) == BUCKETS for _, histogram in histograms.samples())


def test_topics_and_groups_make_no_more_series_than_the_reference_says() -> None:
    """10,000 topics, and 1,000 groups and producer groups, each with a figure of every kind; and every route."""
    routes = [f"{method} {path}" for method, path, name in DataRoutes.ROUTES if name not in WAITING]
    names = {
        "topic": [f"topic.{n}" for n in range(10_000)],
        "group": [f"group.{n}" for n in range(1_000)],
        "producer_group": [f"producer.{n}" for n in range(1_000)],
        "route": routes,
    }
    latencies = Latencies()
    for kind in KINDS:
        for name in names[kind.label]:
            latencies[kind.name].of(name).add(3_000)
    exposition = Exposition(Metrics())
    for kind in KINDS:
        exposition.histograms(f"notify_{kind.name}_seconds", kind.text, kind.label, latencies[kind.name].samples())
    lines = [line for line in exposition.text().splitlines() if re.match(r"notify_\w+_seconds", line)]
    labels = sum(len(routes) if kind.label == "route" else MOST_LABELLED + 1 for kind in KINDS)
    assert len(lines) == labels * (BUCKETS + 2)
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    assert f"at most {len(lines):,} series of histograms" in reference
    counted = {line.split("{")[0]: 0.0 for line in lines if "_count{" in line}
    for line in lines:
        if "_count{" in line:
            counted[line.split("{")[0]] += float(line.split()[-1])
    assert counted == {f"notify_{kind.name}_seconds_count": len(names[kind.label]) for kind in KINDS}, "all are counted"


class Queues:
    """A topic and a group, of which only their times are known."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    def topics(self) -> list[str]:
        return ["t"]

    def topic(self, name: str) -> Counts:
        return Counts(None, None, None, self._latencies.minute(name, OF_TOPICS))

    def groups(self) -> list[str]:
        return ["g"]

    def group(self, name: str) -> Counts:
        return Counts(None, None, None, self._latencies.minute(name, OF_GROUPS))


def test_a_chart_shows_what_each_minute_took() -> None:
    latencies, now = Latencies(), [NOW]
    figures = Figures(Queues(latencies), lambda: now[0], latencies)
    asyncio.run(figures.sample())
    latencies["handler"].of("g").add(30_000, 40)
    latencies["commit_to_queue"].of("t").add(3_000)
    now[0] += 60_000_000
    asyncio.run(figures.sample())
    handled = quantile(counted(*[0.03] * 40).counts, 0.99)
    assert figures.group("g", "hour")["handler_p99"] == [pytest.approx(handled)]
    assert figures.topic("t", "hour")["commit_to_queue_p50"] == [pytest.approx(0.0035)]
    now[0] += 60_000_000
    asyncio.run(figures.sample())
    assert figures.group("g", "hour")["handler_p99"][-1] is None, "nothing was handled in this minute"
