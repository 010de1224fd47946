"""Makes a data directory: its files stay in a folder within it until all of them are verified and on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from notify.errors import InvalidRequest
from notify.runtime.threads import in_thread

PARTIAL = "restore.partial"
"""The folder of a restore's files until all of them are verified and on the disk."""

OF_VOLUMES = "lost+found"
"""A directory that ext4 makes in the root of each volume: one that has nothing else is empty."""


def begun(data_dir: Path, *, goes_on: bool = False) -> Path:
    """Make the folder within a data directory for its files until `take_place`, and return its path. Raises
    InvalidRequest if the data directory has other files.

    The folder is within the data directory because that may be a separate volume, which cannot be renamed. `goes_on`:
    keep the files of an interrupted restore.
    """
    partial = data_dir / PARTIAL
    if data_dir.is_dir() and {path.name for path in data_dir.iterdir()} - {PARTIAL, OF_VOLUMES}:
        raise InvalidRequest(f"{data_dir} is not empty: name an empty directory, or one that does not exist")
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not goes_on:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, exist_ok=goes_on)
    return partial


def place(directory: Path, name: str) -> Path:
    """The path of a backup's file. Raises InvalidRequest for a name that leads out of the directory.

    Names come from a server or from an archive, and neither is trusted.
    """
    parts = name.split("/")
    is_plain = name.isprintable() and "\\" not in name and all(part not in ("", ".", "..") for part in parts)
    if not is_plain:
        raise InvalidRequest(f"backup: {name[:100]!r} is not a valid file name in a backup: nothing was written to it")
    target = directory / name
    if any(place.is_symlink() for place in (target, *target.parents) if directory in place.parents):
        raise InvalidRequest(f"backup: {name[:100]!r} leads elsewhere by a symbolic link: nothing was written to it")
    return target


def take_place(partial: Path, data_dir: Path) -> None:
    """Move a verified copy to its final place once all of it is on the disk; the log is moved last."""
    sync_all(partial)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == "log"):
        path.rename(data_dir / path.name)
    partial.rmdir()
    sync(data_dir)
    sync(data_dir.parent)


def sync_all(directory: Path) -> None:
    """Wait until all files in a directory, and their names, are on the disk."""
    for path in directory.iterdir():
        if path.is_dir():
            sync_all(path)
        else:
            sync(path)
    sync(directory)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


async def facts_of(log: Path, *, reads_all: bool = True) -> dict[str, Any]:
    """Open the log as a server would, and return its counts and damages. `reads_all`: check every frame for damages."""
    from notify.runtime.clock import wall_clock
    from notify.storage.log import LogStore

    store = LogStore(log)
    await store.open(wall_clock())
    try:
        damages = [str(damage) for damage in store.damages]
        if reads_all:
            damages += await in_thread(store.verify)
        counts = [
            store.count(topic.name, queue, *store.bounds(topic.name, queue))
            for topic in store.topics()
            for queue in range(topic.queues)
        ]
        doubt = await store.in_doubt()
        return {
            "topics": len(store.topics()),
            "messages": sum(counts),
            "undecided": doubt.prepared + doubt.parked,
            "damages": damages,
        }
    finally:
        await store.close()
