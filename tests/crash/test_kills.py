"""The short form of `make crash`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from notify.storage.crash_point import POINTS
from tests.crash import loop_device, strace
from tests.crash.dropping import WHILE_DROPPING, killed_at
from tests.crash.kills import UNDER_LOAD, Kills

pytestmark = pytest.mark.crash


def test_no_promise_is_broken_by_kill_9(tmp_path: Path) -> None:
    """Promises 1 to 5, 8, 9 and 13, on a real server under load: at each crash point, then at any moment."""
    runner = Kills(tmp_path, seed=7)
    a = runner.answers
    try:
        for point in UNDER_LOAD:
            asyncio.run(runner.cycle(f"{point}:2"))
        asyncio.run(runner.cycle())
        asyncio.run(runner.cycle(enough=lambda: min(map(len, (a.stored, a.committed, a.acked, a.dead))) > 50))
        asyncio.run(runner.finish())
    finally:
        runner.kill()
    assert a.violations == []


@pytest.mark.parametrize("point", WHILE_DROPPING)
def test_segments_are_dropped_although_it_is_killed(point: str, tmp_path: Path) -> None:
    """Messages that wait in a segment are carried forward before that segment goes."""
    for count in (1, 2):
        assert killed_at(tmp_path / "log", f"{point}:{count}") == []


def test_every_crash_point_is_armed_in_one_of_the_two() -> None:
    assert {*UNDER_LOAD, *WHILE_DROPPING} == set(POINTS)


def test_power_loss_on_ext4() -> None:
    """Promise 1 on a real file system."""
    result = loop_device.lose_power(4, seed=3)
    if result.startswith("SKIPPED"):
        pytest.skip(result)
    assert "4 shutdowns" in result


@pytest.mark.long
def test_a_server_whose_fdatasync_fails_stops() -> None:
    """Promise 11 on a real process."""
    result = strace.fail_syncs(1)
    if result.startswith("SKIPPED"):
        pytest.skip(result)
    assert "each stopped" in result
