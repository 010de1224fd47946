"""Where Debian's Chromium is, and how it is started for tests and pictures: without anything that asks other hosts."""

from __future__ import annotations

import shutil
from pathlib import Path

QUIET = (
    "--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip


PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first one that is there is used. The shell has no window, and takes half the CPU: 0.3 s a page instead of 0.6."""


def chromium_path() -> str | None:
    """The browser's program; None where none is installed."""
    path = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    return path if path is not None and Path(path).exists() else None
