"""A small file system for the server's data, so that only its disk can be full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Room:
    """The directory of the server's data. `can_fill`: whether its disk can be filled."""

    def __init__(self, directory: Path, can_fill: bool) -> None:
        self.directory = directory
        self.can_fill = can_fill

    def fill(self) -> None:
        """Fill the disk: the file system refuses every further block."""
        with (self.directory / "filler").open("ab", buffering=0) as filler:
            size = 4 << 20
            while size >= 512:
                try:
                    filler.write(bytes(size))
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Free the disk again."""
        (self.directory / "filler").unlink(missing_ok=True)


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[Room]:
    """Mount a file system of so many megabytes in memory; without permission use the directory itself."""
    directory.mkdir()
    is_mounted = False
    if os.geteuid() == 0 and shutil.which("mount") is not None:
        words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)]
        is_mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    try:
        yield Room(directory, is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(directory)], check=True)
