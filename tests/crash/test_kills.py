"""The short form of `make crash`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from storage.crash_point import POINTS
from tests.crash import loop_device, strace
from tests.crash.kills import Kills


@pytest.mark.crash
def test_no_promise_is_broken_by_kill_9(tmp_path: Path) -> None:
    """Promises 1 to 5, 8 and 9, on a real server under load."""
    runner = Kills(tmp_path, seed=7)
    try:
        for _ in range(7):
            asyncio.run(runner.cycle())
        for point in POINTS:
            asyncio.run(runner.cycle(f"{point}:2"))
        asyncio.run(runner.finish())
    finally:
        runner.close()
    a = runner.answers
    assert a.violations == []
    assert min(len(a.stored), len(a.committed), len(a.acked), len(a.dead)) > 50


@pytest.mark.crash
def test_power_loss_on_ext4() -> None:
    """Promise 1 on a real file system."""
    result = loop_device.lose_power(4, seed=3)
    if result.startswith("SKIPPED"):
        pytest.skip(result)
    assert "4 shutdowns" in result


@pytest.mark.crash
def test_a_server_whose_fdatasync_fails_stops() -> None:
    """Promise 11 on a real process."""
    result = strace.fail_syncs(1)
    if result.startswith("SKIPPED"):
        pytest.skip(result)
    assert "each stopped" in result
