"""Trends in the console: whether a figure gets better."""

from __future__ import annotations

import time
from typing import Any

import pytest

from notify.server.console.filters import trend, way


def history(**figures: float | None) -> dict[str, Any]:
    """A group's history with one lag for each age in minutes, the oldest first: `m20=5` is a lag of 5, 20 min ago."""
    now = time.time()
    return {"at": [now - 60 * int(age[1:]) for age in figures], "lag": list(figures.values())}


@pytest.mark.parametrize(
    ("now", "figures", "said"),
    [
        (1736, {"m20": 40, "m15": 1436, "m5": 1700, "m1": 1735}, "15 min ago 1,436: it grows"),
        (3, {"m11": 110, "m1": 4}, "11 min ago 110: it shrinks"),
        (102, {"m11": 100}, "11 min ago 100: it is steady"),
        (0, {"m11": 0}, ""),
        (9, {"m4": 3, "m1": 8}, "4 min ago 3: it grows"),
        (9, {"m20": None, "m5": 3}, "5 min ago 3: it grows"),
        (9, {"m1": 3}, ""),
        (9, {"m20": None}, ""),
        (None, {"m20": 3}, ""),
        (9, {}, ""),
    ],
)
def test_a_figure_says_what_it_was_ten_minutes_ago(
    now: float | None, figures: dict[str, float | None], said: str
) -> None:
    """The newest figure that is ten minutes old is meant; of a new group the oldest, from two minutes on."""
    assert trend(now, history(**figures), "lag") == said


@pytest.mark.parametrize(
    ("lag", "arrived", "settled", "said"),
    [
        (1000, 6.0, 0.0, "grows"),
        (1000, 0.0, 6.0, "shrinks"),
        (1000, 6.0, 5.99, ""),
        (0, 6.0, 0.0, ""),
        (1000, None, 6.0, ""),
        (1000, 6.0, None, ""),
    ],
)
def test_a_row_says_where_its_lag_goes(lag: int, arrived: float | None, settled: float | None, said: str) -> None:
    assert way({"lag": lag, "arrived_per_second": arrived, "settled_per_second": settled}) == said
