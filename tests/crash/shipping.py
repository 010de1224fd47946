"""A process that ships a directory, and dies while it does."""

from __future__ import annotations

from pathlib import Path

from notify.storage import crash_point
from notify.testing import forked
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
