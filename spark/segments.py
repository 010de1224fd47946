"""A log's segment files, and their Parquet copies for this audit and the next.

A sealed segment never changes, so its copy serves the next audit too, if the file has the same size, time and bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import msgspec
import pyarrow.parquet as pq

from notify.spark.facts import Facts, Hole
from notify.spark.scan import SegmentScan
from notify.storage.log.format import read_segment_header

_COPY_VERSION = 5
_READ_BYTES = 8 << 20


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
    """The segments in the order of their positions, and the files that are none."""
    heads: list[tuple[int, int, str]] = []
    problems: list[str] = []
    for path in sorted(directory.glob("*.log")):
        with path.open("rb") as file:
            try:
                heads.append((*read_segment_header(file.read(64)), path.name))
            except ValueError as error:
                problems.append(f"{path.name}: {error}")
    files = []
    for i, (base, created_us, name) in enumerate(heads):
        state = (directory / name).stat()
        following = heads[i + 1][0] if i + 1 < len(heads) else 0
        files.append(SegmentFile(name, base, created_us, following, state.st_size, state.st_mtime_ns))
    return files, problems


# --- copies -------------------------------------------------------------------------------------------------------


def has_copy(segment: SegmentFile, place: Path) -> bool:
    return (place / segment.copy_name / "facts.json").exists()


def facts_of(segment: SegmentFile, place: Path) -> Facts:
    return msgspec.json.decode((place / segment.copy_name / "facts.json").read_bytes(), type=Facts)


def make_copy(directory: str, segment: SegmentFile, place: str) -> str:
    """Scan a segment and write its copy, in a task. Returns the problem, or ""."""
    try:
        scan = SegmentScan(Path(directory), segment.name, segment.sealed_end)
        if segment.sealed_end:
            scan.facts.crc = _checksum(Path(directory) / segment.name, segment.size)
    except (OSError, ValueError) as error:
        return f"{segment.name}: {error}"
    to = Path(place) / segment.copy_name
    to.mkdir(parents=True, exist_ok=True)
    tables = {"messages": scan.messages, "acks": scan.acks, "checks": scan.checks, "letters": scan.letters}
    for name, table in tables.items():
        temporary = to / f"{name}.{os.getpid()}.tmp"
        # Ids and positions rarely repeat, so dictionaries would only cost time.
        pq.write_table(table, temporary, compression="lz4", use_dictionary=False, row_group_size=1 << 17)
        temporary.rename(to / f"{name}.parquet")
    temporary = to / f"facts.{os.getpid()}.tmp"
    temporary.write_bytes(msgspec.json.encode(scan.facts))
    temporary.rename(to / "facts.json")
    return ""


def has_rotted(directory: str, segment: SegmentFile, place: str) -> bool:
    """Whether a sealed segment's bytes are others than those that were copied, though its size and time are not.

    Also true for a file that cannot be read any more.
    """
    try:
        rotted = _checksum(Path(directory) / segment.name, segment.size) != facts_of(segment, Path(place)).crc
    except OSError:
        return True
    if not rotted:
        os.utime(Path(place) / segment.copy_name / "facts.json")  # compared just now
    return rotted


def longest_unread(segments: Iterable[SegmentFile], place: Path, most_bytes: int) -> list[SegmentFile]:
    """Sealed segments with a copy, those first that were compared with it the longest ago, up to so many bytes."""
    copied = [s for s in segments if s.sealed_end and has_copy(s, place)]
    chosen = []
    for segment in sorted(copied, key=lambda s: (place / s.copy_name / "facts.json").stat().st_mtime_ns):
        most_bytes -= segment.size
        if most_bytes < 0:
            break
        chosen.append(segment)
    return chosen


def forget_copy(place: Path, copy_name: str) -> None:
    """Remove a copy."""
    for file in (place / copy_name).iterdir():
        file.unlink()
    (place / copy_name).rmdir()


def forget_others(place: Path, wanted: set[str]) -> None:
    """Remove copies of segments that have changed or are gone."""
    for name in [entry.name for entry in place.iterdir()]:
        if name not in wanted:
            forget_copy(place, name)


def _checksum(path: Path, size: int) -> int:
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
