"""The room on the disk of a data directory, for metrics and alarms: the directory or the disk may not tell it."""

from __future__ import annotations

import shutil
from pathlib import Path

from notify.server.data_directory import Room, room_of


def test_a_directory_that_was_deleted_is_looked_for_where_it_was(tmp_path: Path) -> None:
    """`/metrics` and the console were answered with 500, and no alarm was looked for any more."""
    usage = shutil.disk_usage(tmp_path)
    assert room_of(tmp_path / "data" / "worker-1").total == room_of(str(tmp_path)).total == usage.total


def test_a_disk_without_a_size_is_not_full() -> None:
    assert Room(0, 0).used_share == 0.0 and Room(200, 50).used_share == 0.75
