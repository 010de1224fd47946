"""Objectives of groups: the share of a group's messages that was acknowledged in time, over the last five minutes."""

from __future__ import annotations

import pytest

from notify.admin_api.words import percent
from notify.protocol.latency import BOUNDS, BUCKETS, share_within
from notify.server.core.objectives import SAMPLE_US, WINDOW_US, Met, Objective, Objectives
from notify.server.latency import Histograms


class Scene:
    """An objective of group mail, a histogram, and a clock that the test moves."""

    def __init__(self, began: int = 0) -> None:
        self.now, self.latencies = began, Histograms()
        self.objectives = Objectives(self.latencies, lambda: self.now)
        self.objectives.follow({"mail": Objective(5.0)})

    def add(self, seconds: int, count: int = 1) -> None:
        self.latencies.of("mail").add(seconds * 1_000_000, count)

    def met(self) -> Met:
        return self.objectives.met("mail")


def test_messages_of_more_than_five_minutes_ago_do_not_count() -> None:
    s = Scene()
    s.add(60, 10)
    assert s.met() == Met(10, 0.0)
    while s.now < WINDOW_US + SAMPLE_US:
        s.now += SAMPLE_US
        s.objectives.sample()
    s.add(1, 99)
    s.add(60)
    assert s.met() == Met(100, 0.99)


def test_a_group_that_is_recreated_begins_at_zero() -> None:
    s = Scene()
    s.add(60, 10)
    s.objectives.follow({})
    s.objectives.follow({"mail": Objective(5.0)})
    s.latencies.forget("mail")
    assert s.met() == Met(0, None)
    s.add(1, 3)
    assert s.met() == Met(3, 1.0)


def test_a_clock_that_is_set_back_keeps_no_sample_of_the_future() -> None:
    s = Scene(WINDOW_US)
    s.add(60, 10)
    s.now = 0
    s.objectives.sample()
    assert s.met() == Met(0, None)


def test_an_objective_that_is_removed_takes_its_samples_along() -> None:
    s = Scene()
    s.objectives.follow({})
    assert s.met() == Met(0, None)


@pytest.mark.parametrize(
    ("seconds", "share"),
    [(BOUNDS[0], 0.25), (BOUNDS[1], 0.5), (0.0015, 0.375), (0.0005, 0.125), (1000.0, 0.75), (1e9, 0.75)],
)
def test_a_share_is_interpolated_in_its_bucket(seconds: float, share: float) -> None:
    counts = [0] * BUCKETS
    counts[0] = counts[1] = counts[-2] = counts[-1] = 1
    assert share_within(counts, seconds) == pytest.approx(share)
    assert share_within([0] * BUCKETS, seconds) is None


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.99, "99 %"), (0.9899999, "98.99 %"), (1.0, "100 %"), (0.9999, "99.99 %"), (0.5, "50 %"), (None, "–")],
)
def test_a_share_that_is_missed_is_not_rounded_up(share: float | None, text: str) -> None:
    assert percent(share) == text
