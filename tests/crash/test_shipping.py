"""Killed while it ships: what is listed afterwards is true, and the next run ships the rest."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from notify.storage import crash_point
from notify.storage.crash_point import SHIP_POINTS
from notify.testing import forked
from tests.support.logs import write_log
from tests.support.object_store import bodies, listed, untrue
from tests.support.shipping import ship_directory

SECONDS = 120


def ship(data_dir: Path, url: str, crash_at: str) -> int | None:
    """Ship in a process of its own, which dies at a point; its exit code. None: it has not ended within SECONDS."""
    process = forked.context().Process(target=_ship, args=(data_dir, url, crash_at), daemon=True)
    process.start()
    process.join(SECONDS)
    return process.exitcode


def _ship(data_dir: Path, url: str, crash_at: str) -> None:
    crash_point.arm(crash_at)
    ship_directory(data_dir, url, most_inline=1, page_segments=1)


pytestmark = pytest.mark.crash


@pytest.mark.parametrize("point", SHIP_POINTS)
def test_killed_at_a_point(point: str, tmp_path: Path) -> None:
    data, url = tmp_path / "data", f"file://{tmp_path}/store"
    write_log(data)
    assert ship(data, url, f"{point}:2") == -signal.SIGKILL
    after_kill = listed(url)
    assert after_kill is not None and untrue(url) == []
    assert 1 <= after_kill.count <= 3
    ship_directory(data, url)
    whole = listed(url)
    assert whole is not None and untrue(url) == []
    assert whole.end == max(int(path.stem) for path in (data / "log").glob("*.log"))
    messages = bodies(url, tmp_path)
    assert messages == [b"%06d" % n for n in range(len(messages))]
    assert len(messages) > 40
