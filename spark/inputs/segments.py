"""Copies a log's segments, and finds the missing and the foreign ones.

A segment that no server writes to never changes. The next audit can use its copy, too, if the file still has the same
size, time and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from notify.errors import NotifyError
from notify.spark.inputs.copies import Copies
from notify.spark.inputs.facts import Facts, Hole, Scanned
from notify.spark.inputs.log_files import LogFiles, SegmentFile
from notify.spark.inputs.scan import SegmentScan

Copied = tuple[str, Scanned | None]
"""The problem that prevented the copy of a segment, or ""; and the facts of the copy if there is one."""


def copied(files: LogFiles, copies: Copies, segment: SegmentFile) -> Copied:
    """Copy a segment; called in a task of Spark, or in this process."""
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
    """Whether a segment still has the bytes that were copied: bytes can rot while size and time stay the same.

    `copied`: the segment, and the CRC32C of the copied bytes. False if the file cannot be read any more.
    """
    segment, crc = copied
    try:
        return files.crc_of(files.disk(segment), segment) == crc
    except (OSError, NotifyError):
        return False


# --- missing and foreign segments ---------------------------------------------------------------------------------


def holes_of(facts: Sequence[Facts]) -> Iterator[Hole]:
    """The parts between the first and the last segment that could not be read."""
    end, last_us = 0, 0
    for number, each in enumerate(facts):
        holes = list(each.holes)
        if number and each.base > end:
            holes.insert(0, Hole(end, each.base, last_us, each.first_us))
        for hole in holes:
            # At an end of a segment, or in a segment without a sound frame, the neighbouring segments give the times.
            following = (later.first_us for later in facts[number + (hole.start > each.base) :] if later.first_us)
            yield Hole(hole.start, hole.end, hole.from_us or last_us, hole.to_us or next(following, 0))
            end = max(end, hole.end)
        end = max(end, each.end)
        last_us = each.last_us or last_us


def foreign_of(sources: Mapping[int, Set[str]], given: Set[str]) -> dict[int, str]:
    """By base: why a segment belongs to another log.

    `sources`: the databases that the halves of each segment came from. `given`: the ids of the given databases. If a
    segment has halves of a given database, all databases in that segment use this log. A segment is foreign if no half
    in it came from one of these databases.
    """
    of_this_log = set().union(*(names for names in sources.values() if names & given))
    return {
        base: f"all halves in it came from {', '.join(sorted(names))}, which was not given and is in no other segment: "
        "the segment belongs to another log, and was not read"
        for base, names in sources.items()
        if of_this_log and names and not names & of_this_log
    }
