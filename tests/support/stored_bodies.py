"""A store of bodies in a directory, and what lies in it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from notify.object_store.store import Store
from notify.protocol.large_bodies import FOLDER, NAME

LARGE = 300 << 10
"""Bytes of a body that producers store by default."""


class BodyStore:
    """A store of `file://`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"file://{directory}"

    def names(self) -> set[str]:
        """The names of the bodies."""
        return {name for name in Store(self.url).names(FOLDER) if NAME.match(name)}

    def path(self, name: str) -> Path:
        return self.directory / name

    def age(self, seconds: float = 7_200) -> None:
        """Have all bodies be so many seconds older."""
        for name in self.names():
            written_at = self.path(name).stat().st_mtime - seconds
            os.utime(self.path(name), (time.time(), written_at))
