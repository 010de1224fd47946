"""The files of a server's log: in a directory, or shipped to a store (log_shipped.py).

Spark's workers get these objects pickled, so they hold only names and numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from notify.errors import InvalidRequest
from notify.protocol.workers import refuse_divided
from notify.storage.log import checkpoint
from notify.storage.log.checkpoint import Checkpoint
from notify.storage.log.disk import Disk
from notify.storage.log.format import SEGMENT_HEADER_SIZE, read_segment_header
from notify.storage.log.index import index_name
from notify.storage.log.sealed import SealedPart
from notify.storage.log.segments import segment_name
from notify.storage.shipped.records import NAME as RECORDS

_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment's file. `sealed_end`: the position at which the next segment begins; 0 if the segment may grow."""

    name: str
    base: int
    created_us: int
    sealed_end: int
    size: int
    mark: int
    """A number that changes with the file: its last change in nanoseconds, or a shipped segment's checksum."""
    sha256: str = ""
    """The checksum of the segment's bytes, from the manifest; "": there is no manifest."""
    index: tuple[str, int, str] = ("", 0, "")
    """Name, size and SHA-256 of the segment's index, if there is a manifest."""
    until_us: int = 1 << 62
    """Nothing in the segment was written after this instant, in microseconds since 1970."""

    @property
    def identity(self) -> tuple[int, int]:
        """A pair that no segment of another log has."""
        return self.base, self.created_us


class LogFiles(Protocol):
    """The files of one log. Every method may raise OSError."""

    @property
    def place(self) -> str:
        """The directory's path, or the store's URL."""

    @property
    def identity(self) -> str:
        """A text that no other log has, and that is the same on each machine that names the log in the same way."""

    @property
    def is_immutable(self) -> bool:
        """Whether segments never change once they are listed, so that a copy need not be compared again."""

    @property
    def nothing(self) -> str:
        """A sentence to show if there is no segment."""

    @property
    def dropped_to(self) -> int:
        """The position up to which retention dropped segments, by the list of segments; 0: there is no such list."""

    def segments(self) -> tuple[list[SegmentFile], list[str]]:
        """The segments in the order of their positions, and a sentence for each file that is not a valid segment."""

    def gone(self) -> str:
        """A sentence that says why listed segments are missing now; "" if the reason is not known."""

    def is_served(self) -> bool:
        """Whether a server writes to the log now."""

    def disk(self, segment: SegmentFile) -> Disk:
        """A disk with which this process reads the segment."""

    def crc_of(self, disk: Disk, segment: SegmentFile) -> int:
        """CRC32C of a segment, by the `disk` that has read it. Raises ObjectStoreFailed if it differs from the list."""

    def entries(self, segment: SegmentFile) -> NDArray[np.void] | None:
        """The entries of a sealed segment's index. None if the index is lost or of another version; the segment has the
        same entries."""

    def checkpoint(self) -> Checkpoint | None:
        """The newest sound checkpoint. Raises Corrupt if there are checkpoints but no sound one."""

    def checkpoints(self) -> Sequence[int]:
        """The positions of all checkpoints."""

    def created_us(self, base: int) -> int:
        """When a segment was made, by its header. Raises FileNotFoundError, or ValueError if the header is damaged."""

    def size_of(self, base: int) -> int:
        """The size of a segment in bytes."""

    def checksum(self, base: int, size: int) -> int:
        """CRC32C of a segment's first bytes."""

    def administration(self) -> AbstractContextManager[Sequence[Path]]:
        """Databases with the records of the server's administrators (notify.storage.sql.administration), to read."""


class ReadOnlyDisk(Disk):
    """Reads a log that a server may be writing to."""

    def open(self, name: str, create: bool = False) -> int:
        return os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True)
class LocalFiles:
    """A data directory on this machine, or a shared one that all workers reach by the same path."""

    directory: Path
    is_immutable = False

    @classmethod
    def of(cls, directory: Path | str) -> LocalFiles:
        """`directory`: a data directory, or the directory of the log in it. Raises InvalidRequest if it is missing."""
        path = Path(directory)
        refuse_divided(path, "name --log")
        log = path / "log" if (path / "log").is_dir() else path
        if not log.is_dir():
            raise InvalidRequest(f"{directory} has no log: there is no such directory")
        return cls(log)

    @property
    def place(self) -> str:
        return str(self.directory)

    @property
    def identity(self) -> str:
        return str(self.directory.resolve())

    @property
    def nothing(self) -> str:
        return "the directory has no log (no *.log files); name a server's --data-dir"

    @property
    def dropped_to(self) -> int:
        return 0

    def segments(self) -> tuple[list[SegmentFile], list[str]]:
        heads: list[tuple[int, int, str]] = []
        problems: list[str] = []
        for path in sorted(self.directory.glob("*.log")):
            with path.open("rb") as file:
                try:
                    base, created_us = read_segment_header(file.read(SEGMENT_HEADER_SIZE))
                except ValueError as error:
                    problems.append(f"{path.name}: {error}")
                    continue
            if path.name == segment_name(base):
                heads.append((base, created_us, path.name))
            else:
                problems.append(
                    f"{path.name}: its header says that it begins at byte {base}: it was renamed, or exchanged with "
                    "another file, and was not read"
                )
        files = []
        for place, (base, created_us, name) in enumerate(heads):
            state = (self.directory / name).stat()
            following, until_us = heads[place + 1][:2] if place + 1 < len(heads) else (0, 1 << 62)
            files.append(
                SegmentFile(name, base, created_us, following, state.st_size, state.st_mtime_ns, until_us=until_us)
            )
        return files, problems

    def gone(self) -> str:
        return ""

    def is_served(self) -> bool:
        # /proc/locks tells: taking the lock, even for a moment, could keep a server from starting.
        try:
            inode = (self.directory / "lock").stat().st_ino
            locks = Path("/proc/locks").read_text()
        except OSError:
            return False
        return any(f":{inode} " in line and " FLOCK " in line for line in locks.splitlines())

    def disk(self, segment: SegmentFile) -> Disk:
        return self._disk()

    def _disk(self) -> Disk:
        return ReadOnlyDisk(self.directory)

    def crc_of(self, disk: Disk, segment: SegmentFile) -> int:
        return checksum_of(disk, segment.name, segment.size)

    def entries(self, segment: SegmentFile) -> NDArray[np.void] | None:
        try:
            return SealedPart(self._disk(), index_name(segment.base)).entries
        except (OSError, ValueError):
            return None

    def checkpoint(self) -> Checkpoint | None:
        return checkpoint.load(self._disk())

    def checkpoints(self) -> Sequence[int]:
        return [int(name[:20]) for name in self._disk().names() if name.endswith(".ckpt")]

    def created_us(self, base: int) -> int:
        with (self.directory / segment_name(base)).open("rb") as file:
            return read_segment_header(file.read(SEGMENT_HEADER_SIZE))[1]

    def size_of(self, base: int) -> int:
        return (self.directory / segment_name(base)).stat().st_size

    def checksum(self, base: int, size: int) -> int:
        return checksum_of(self._disk(), segment_name(base), size)

    @contextmanager
    def administration(self) -> Iterator[Sequence[Path]]:
        # The workers of one machine share the records, in the directory that has theirs.
        own = self.directory.absolute().parent
        yield [path for place in (own, own.parent) if (path := place / RECORDS).is_file()]


def checksum_of(disk: Disk, name: str, size: int) -> int:
    """CRC32C of a file's first `size` bytes, read piece by piece. Raises OSError."""
    fd = disk.open(name)
    try:
        checksum = at = 0
        while at < size and (data := disk.read(fd, min(size - at, _READ_BYTES), at)):
            checksum = google_crc32c.extend(checksum, data)
            at += len(data)
    finally:
        disk.close(fd)
    return checksum
