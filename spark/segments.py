"""A log's segment files, and their Parquet copies for this audit and the next.

A segment that no server writes to never changes, so its copy serves the next audit too, if the file has the same size,
time and bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import msgspec
import pyarrow.parquet as pq

from notify.spark.facts import Facts, Hole
from notify.spark.scan import SegmentScan
from notify.storage import crash_point
from notify.storage.log.format import read_segment_header
from notify.storage.log.segments import segment_name

_COPY_VERSION = 9
_READ_BYTES = 8 << 20
_LEFT_SECONDS = 3600.0
"""A temporary file of this age was left behind by an audit that was killed."""


@dataclass(frozen=True)
class SegmentFile:
    """A segment's file; `sealed_end` is where the next segment begins, 0 for the last one."""

    name: str
    base: int
    created_us: int
    sealed_end: int
    size: int
    changed_ns: int

    @property
    def copy_name(self) -> str:
        return f"{self.base:020d}-{self.sealed_end}-{self.size}-{self.changed_ns}-v{_COPY_VERSION}"

    @property
    def identity(self) -> tuple[int, int]:
        """No segment of another log has the same."""
        return self.base, self.created_us


def segments_of(directory: Path) -> tuple[list[SegmentFile], list[str]]:
    """The segments in the order of their positions, and what is wrong with the other files."""
    heads: list[tuple[int, int, str]] = []
    problems: list[str] = []
    for path in sorted(directory.glob("*.log")):
        with path.open("rb") as file:
            try:
                base, created_us = read_segment_header(file.read(64))
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
    for i, (base, created_us, name) in enumerate(heads):
        state = (directory / name).stat()
        following = heads[i + 1][0] if i + 1 < len(heads) else 0
        files.append(SegmentFile(name, base, created_us, following, state.st_size, state.st_mtime_ns))
    return files, problems


def is_locked(path: Path) -> bool:
    """Whether a server has a log open. `path`: of the file that it locks."""
    # Reads /proc/locks: taking the lock, even for a moment, could keep a server from starting.
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any(f":{inode} " in line and " FLOCK " in line for line in locks.splitlines())


# --- copies -------------------------------------------------------------------------------------------------------


def has_copy(segment: SegmentFile, place: Path) -> bool:
    return (place / segment.copy_name / "facts.json").exists()


def facts_of(segment: SegmentFile, place: Path) -> Facts:
    return msgspec.json.decode((place / segment.copy_name / "facts.json").read_bytes(), type=Facts)


def make_copy(directory: str, segment: SegmentFile, place: str) -> str:
    """Scan a segment and write its copy, in a task. Returns the problem, or ""."""
    try:
        scan = SegmentScan(Path(directory), segment.name, segment.sealed_end)
        scan.facts.crc = checksum_of(Path(directory) / segment.name, segment.size)
    except (OSError, ValueError) as error:
        return f"{segment.name}: {error}"
    to = Path(place) / segment.copy_name
    to.mkdir(parents=True, exist_ok=True)
    for left in to.glob("*.tmp"):
        if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
            left.unlink(missing_ok=True)
    tables = {"messages": scan.messages, "acks": scan.acks, "checks": scan.checks, "letters": scan.letters}
    for name, table in tables.items():
        temporary = to / f"{name}.{os.getpid()}.tmp"
        # Ids and positions rarely repeat, so dictionaries would only cost time.
        pq.write_table(table, temporary, compression="lz4", use_dictionary=False, row_group_size=1 << 17)
        temporary.rename(to / f"{name}.parquet")
    crash_point.reached("copy.before_facts")
    temporary = to / f"facts.{os.getpid()}.tmp"
    temporary.write_bytes(msgspec.json.encode(scan.facts))
    temporary.rename(to / "facts.json")
    return ""


def keep_copy(directory: str, segment: SegmentFile, place: str) -> str:
    """Compare a segment with its copy, in a task, and copy it again if it differs. Returns the problem, or ""."""
    if not _has_rotted(directory, segment, place):
        return ""
    forget_copy(Path(place), segment.copy_name)
    return make_copy(directory, segment, place)


def _has_rotted(directory: str, segment: SegmentFile, place: str) -> bool:
    """Whether a segment's bytes are others than those that were copied, though its size and time are not.

    Also true for a file that cannot be read any more.
    """
    try:
        rotted = checksum_of(Path(directory) / segment.name, segment.size) != facts_of(segment, Path(place)).crc
    except OSError:
        return True
    if not rotted:
        os.utime(Path(place) / segment.copy_name / "facts.json")  # compared just now
    return rotted


def longest_unread(copied: Iterable[SegmentFile], place: Path, most_bytes: int) -> list[SegmentFile]:
    """Segments with a copy, those first that were compared with it the longest ago, up to so many bytes."""
    chosen = []
    for segment in sorted(copied, key=lambda s: (place / s.copy_name / "facts.json").stat().st_mtime_ns):
        most_bytes -= segment.size
        if most_bytes < 0:
            break
        chosen.append(segment)
    return chosen


def forget_copy(place: Path, copy_name: str) -> None:
    """Remove a copy. What a kill leaves of it counts as none: its facts go first."""
    copy = place / copy_name
    (copy / "facts.json").unlink(missing_ok=True)
    crash_point.reached("copy.forgetting")
    for file in copy.iterdir():
        file.unlink()
    copy.rmdir()


def forget_others(place: Path, wanted: set[str]) -> None:
    """Remove copies of segments that have changed or are gone."""
    for name in [entry.name for entry in place.iterdir()]:
        if name not in wanted:
            forget_copy(place, name)


def checksum_of(path: Path, size: int) -> int:
    """CRC32C of a file's first bytes. Raises OSError."""
    checksum = 0
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, _READ_BYTES))):
            checksum = google_crc32c.extend(checksum, data)
            size -= len(data)
    return checksum


# --- what is not there --------------------------------------------------------------------------------------------


def holes_of(facts: Sequence[Facts]) -> Iterator[Hole]:
    """The parts between the first and the last segment that could not be read."""
    end, last_us = 0, 0
    for number, each in enumerate(facts):
        holes = list(each.holes)
        if number and each.base > end:
            holes.insert(0, Hole(end, each.base, last_us, each.first_us))
        for hole in holes:
            # At an end of a segment, or in one without a sound frame, the segments beside it say the time.
            following = (f.first_us for f in facts[number + (hole.start > each.base) :] if f.first_us)
            yield Hole(hole.start, hole.end, hole.from_us or last_us, hole.to_us or next(following, 0))
            end = max(end, hole.end)
        end = max(end, each.end)
        last_us = each.last_us or last_us


def foreign_of(facts: Iterable[Facts], given: Set[str]) -> dict[int, str]:
    """The segments that are another log's, by where they begin, and why. `given`: the ids of the given databases.

    Where a segment has halves of a given database, all databases in it are this log's; no half in a foreign segment
    came from one of them.
    """
    sources = {f.base: {s.source for s in f.sent if s.source} for f in facts}
    own = set().union(*(names for names in sources.values() if names & given))
    return {
        base: f"all halves in it came from {', '.join(sorted(names))}, which is no given database and in no other "
        "segment: it is another log's, and was not read"
        for base, names in sources.items()
        if own and names and not names & own
    }
