"""A group that catches up waits while producers are busy, and only then."""

from __future__ import annotations

from notify.server.delivery.pace import LEAST_SHARE, STALE_US, WINDOW_US, Pace
from notify.server.metrics import Metrics

BUSY = 20_000
"""Messages that keep a server busy for longer than a window."""


def test_a_group_is_paced_while_producers_are_busy_and_no_longer() -> None:
    metrics = Metrics()
    pace = Pace(metrics, now_us=0)
    metrics.published += BUSY
    pace.look(WINDOW_US)
    assert pace.share == LEAST_SHARE
    assert pace.is_busy
    assert pace.pause_us(0.001) > 0
    pace.look(2 * WINDOW_US)
    assert not pace.is_busy, "nothing was sent in the last window"
    assert pace.pause_us(0.001) == 0


def test_a_pile_that_was_stored_before_anyone_read_does_not_pace_its_reader() -> None:
    metrics = Metrics()
    pace = Pace(metrics, now_us=0)
    metrics.published += 100 * BUSY
    pace.look(STALE_US + 1)
    assert not pace.is_busy


def test_the_share_of_a_group_grows_slowly_while_producers_send_less() -> None:
    metrics = Metrics()
    pace = Pace(metrics, now_us=0)
    metrics.published += BUSY
    pace.look(WINDOW_US)
    metrics.published += 1
    pace.look(2 * WINDOW_US)
    assert pace.is_busy
    assert LEAST_SHARE < pace.share < 0.5
