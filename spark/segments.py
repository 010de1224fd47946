"""Copying a log's segments, and what is missing or foreign among them.

A segment that no server writes to never changes, so its copy serves the next audit too, if the file has the same size,
time and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from notify.errors import NotifyError
from notify.spark.copies import Copies
from notify.spark.facts import Facts, Hole, Scanned
from notify.spark.log_files import LogFiles, SegmentFile
from notify.spark.scan import SegmentScan

Copied = tuple[str, Scanned | None]
"""The problem that kept a segment from being copied, or ""; and the facts of a copy that was made."""


def copied(files: LogFiles, copies: Copies, segment: SegmentFile) -> Copied:
    """Make a segment's copy, in a task."""
    try:
        disk = files.disk(segment)
        scan = SegmentScan(disk, segment.name, segment.sealed_end)
        scan.facts.crc = files.crc_of(disk, segment)
        tables = {"messages": scan.messages, "acks": scan.acks, "checks": scan.checks, "letters": scan.letters}
    except (OSError, ValueError, NotifyError) as error:
        return f"{segment.name}: {error}", None
    copies.write(segment, tables, scan.facts)
    return "", scan.facts


def is_as_copied(files: LogFiles, copied: tuple[SegmentFile, int]) -> bool:
    """Whether a segment still has the bytes of its copy, which may rot without a change of the file's size or time.

    `copied`: the segment, and the CRC32C of the bytes that were copied. False for a file that cannot be read any more.
    """
    segment, crc = copied
    try:
        return files.crc_of(files.disk(segment), segment) == crc
    except (OSError, NotifyError):
        return False


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


def foreign_of(sources: Mapping[int, Set[str]], given: Set[str]) -> dict[int, str]:
    """The segments that are another log's, by where they begin, and why. `sources`: the databases that the halves of
    each segment came from; `given`: the ids of the given databases.

    Where a segment has halves of a given database, all databases in it are this log's; no half in a foreign segment
    came from one of them.
    """
    own = set().union(*(names for names in sources.values() if names & given))
    return {
        base: f"all halves in it came from {', '.join(sorted(names))}, which is no given database and in no other "
        "segment: it is another log's, and was not read"
        for base, names in sources.items()
        if own and names and not names & own
    }
