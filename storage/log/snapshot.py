"""Copies the log at one moment while it is being written: the copy is what a crash at that moment would have left.

Finished files are linked, or copied where no link can lead. The durable part of the open segment is copied.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from notify.errors import StorageFailed
from notify.storage.log import ballast, lock
from notify.storage.log.journal import Journal
from notify.storage.log.segments import SET_ASIDE, Segments

TRIES = 20
CHUNK = 8 << 20
LEFT_OUT = (".tmp", *SET_ASIDE)
"""Files that recovery sets aside, and files that are not complete yet."""
NO_LINKS = frozenset((errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
"""The log is on another file system than the copy, or on one without hard links."""


async def snapshot(log: Path, segments: Segments, journal: Journal, directory: Path) -> int:
    """Copy the log in directory `log` to a new directory; returns the size in bytes.

    Raises StorageFailed if that fails; then nothing is left.
    """
    for _ in range(TRIES):
        try:
            os.mkdir(directory, 0o700)
        except OSError as error:  # including FileExistsError: this function must not remove another's files
            raise _failed(directory, error) from None
        try:
            # Checkpoints first: a segment is dropped only after a later checkpoint, so each copy finds its segments.
            written = _link(log, segments, journal.durable, directory)
            return await asyncio.to_thread(_copy, written, directory)
        except FileNotFoundError:
            _remove(directory)  # retention or a seal was quicker: try again
        except OSError as error:
            _remove(directory)
            raise _failed(directory, error) from None
    raise StorageFailed(f"no snapshot in {directory}: the log's files kept changing during {TRIES} attempts; try again")


def _failed(directory: Path, error: OSError) -> StorageFailed:
    return StorageFailed(f"no snapshot in {directory}: {error.strerror}")


def _link(log: Path, segments: Segments, durable: int, directory: Path) -> list[tuple[Path, int]]:
    """Link complete files; returns those to copy, with how many of their bytes are durable."""
    by_name = {s.name: s for s in segments.all()}
    names = [n for n in os.listdir(log) if n not in (lock.NAME, ballast.NAME) and not n.endswith(LEFT_OUT)]
    written: list[tuple[Path, int]] = []
    for name in sorted(names, key=lambda n: (not n.endswith(".ckpt"), n)):
        segment = by_name.get(name)
        source = log / name
        if segment is None or 0 < segment.sealed_end <= durable:
            try:
                os.link(source, directory / name)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                written.append((source, source.stat().st_size))
        elif segment.base < durable or len(by_name) == 1:
            written.append((source, durable - segment.base))
    return written


def _copy(files: list[tuple[Path, int]], directory: Path) -> int:
    """Copy the files, sync the directory, and return its size in bytes."""
    for source, size in files:
        with open(source, "rb") as old, open(directory / source.name, "xb", opener=_private) as new:
            for chunk in _chunks(old.fileno(), size):
                new.write(chunk)
            new.flush()
            os.fsync(new.fileno())
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return sum(file.stat().st_size for file in directory.iterdir())


def _chunks(fd: int, size: int) -> Iterator[bytes]:
    at = 0
    while at < size and (chunk := os.pread(fd, min(CHUNK, size - at), at)):
        yield chunk
        at += len(chunk)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
