"""The short form of the campaign over schedules, and what its comparison finds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.crash import schedules
from tests.support.databases import empty_database


@pytest.mark.crash
@pytest.mark.long  # tests/integration/test_schedules.py kills at the points that matter
def test_each_instant_once_over_kills(database_urls: Mapping[str, str], tmp_path: Path) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as storage:
        report = schedules.run(storage, tmp_path, schedules=4, kills=5, pause=0.8, seed=3)
    assert schedules.broken(report) == [] and report["messages"] > 20, report


def test_the_campaign_finds_planted_faults_of_schedules() -> None:
    """The planted faults: an instant that is missing, and one that is there twice."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    seconds = [noon + timedelta(seconds=n) for n in range(10)]
    assert schedules.wrong({"a": seconds}, {}) == {"lost": 0, "doubled": 0}
    assert schedules.wrong({"a": seconds[:4] + seconds[6:]}, {}) == {"lost": 2, "doubled": 0}
    assert schedules.wrong({"a": seconds[:4] + seconds[3:]}, {}) == {"lost": 0, "doubled": 1}
    resumed = {"a": [seconds[5]]}
    assert schedules.wrong({"a": seconds[:4] + seconds[6:]}, resumed) == {"lost": 0, "doubled": 0}
    assert schedules.wrong({"b": seconds[:4] + seconds[6:]}, resumed) == {"lost": 2, "doubled": 0}
