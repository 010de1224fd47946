"""Copies a log's segments, gathers their facts, and finds the missing and the foreign ones.

A segment that no server writes to never changes. The next audit can use its copy, too, if the file still has the same
size, time and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from notify.errors import NotifyError
from notify.spark.inputs.catalog import Catalog, learn
from notify.spark.inputs.copies import Copies
from notify.spark.inputs.facts import Facts, Hole, Scanned
from notify.spark.inputs.log_files import LogFiles, SegmentFile
from notify.spark.inputs.scan import SegmentScan
from notify.storage.log import meta

MOST_BROKEN = 100_000
"""The most damages of one log that are held; further ones are only counted."""
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


class Gathered:
    """Collects the facts of a log's segments, in log order: a few numbers for each segment, and sums over all.

    Segments repeat the names of groups, databases and topics. Each name is held once, and the facts about it
    are added up while the facts of the segments are read, one segment after the other.
    """

    def __init__(self, catalog: Catalog) -> None:
        """`catalog`: the catalog of the log's checkpoint; the META records of the segments are added to it."""
        self.catalog = catalog
        self.facts: list[Facts] = []
        self.groups: set[str] = set()
        """Every consumer group that settled something."""
        self.sources: dict[int, frozenset[str]] = {}
        """The databases that the halves of a segment came from, by the segment's base."""
        self._sent: dict[str, dict[int, int]] = {}
        self._names: dict[str, str] = {}
        self._lists: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        self._seen: set[tuple[str, str]] = set()
        self._broken = 0

    def take(self, scanned: Scanned) -> None:
        """Add the facts of the next segment."""
        facts = scanned.numbers()
        facts.masked = self._list_of(facts.masked)
        room = max(0, MOST_BROKEN - self._broken)
        facts.broken_left += len(facts.broken[room:])
        facts.broken = facts.broken[:room]
        self._broken += len(facts.broken)
        self.facts.append(facts)
        self.groups |= set(map(self._shared, scanned.consumer_groups))
        sources = frozenset(self._shared(sent.source) for sent in scanned.sent if sent.is_of_database)
        self.sources[facts.base] = self._sets.setdefault(sources, sources)
        for sent in scanned.sent:
            if sent.is_of_database:
                last = self._sent.setdefault(self._shared(sent.source), {})
                last[sent.producer_group] = max(last.get(sent.producer_group, 0), sent.last_us)
        for position, time_us, record in scanned.meta:
            learn(self.catalog, position, time_us, meta.of_plain(record), self._seen)

    def sent(self, from_us: int = 0) -> dict[str, dict[str, int]]:
        """By database id and producer group: when the last committed message was decided.

        Groups whose last message was decided before `from_us` are left out.
        """
        last_by_source: dict[str, dict[str, int]] = {}
        for source, by_number in self._sent.items():
            for number, last_us in by_number.items():
                if last_us >= from_us:
                    groups = last_by_source.setdefault(source, {})
                    name = self.catalog.producer_groups.get(number, "")
                    groups[name] = max(groups.get(name, 0), last_us)
        return last_by_source

    def broken(self) -> Iterator[dict[str, Any]]:
        """The damages that are held."""
        for facts in self.facts:
            yield from facts.broken

    def _shared(self, name: str) -> str:
        """The one object that is held for equal names."""
        return self._names.setdefault(name, name)

    def _list_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        shared = self._lists.get(names)
        if shared is None:
            shared = self._lists[names] = tuple(map(self._shared, names))
        return shared
