"""Where Debian's Chromium is, and how it is started for tests and pictures: without anything that asks other hosts."""

from __future__ import annotations

import shutil
from pathlib import Path

QUIET = (
    "--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip


def chromium_path() -> str | None:
    """The browser's program; None where none is installed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return path if path is not None and Path(path).exists() else None
