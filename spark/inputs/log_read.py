"""The part of each segment of a log that an audit read and that cannot change, so that a later audit can skip it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from notify.spark.inputs.log_files import LogFiles
from notify.spark.inputs.log_input import LogInput


@dataclass(frozen=True, slots=True)
class SegmentRead:
    """Durable bytes [base, end) of a log, in one segment."""

    base: int
    created_us: int
    end: int
    crc: int | None
    """CRC32C of these bytes; None: it must be computed from the file."""
    damage: str = ""
    """A sentence about the first damage in these bytes; "" if they are sound."""


@dataclass(frozen=True, slots=True)
class LogRead:
    """A log: its name, its files, the position up to which retention dropped it, and its segments."""

    name: str
    files: LogFiles
    dropped_to: int
    segments: tuple[SegmentRead, ...]
    restored: tuple[tuple[int, int], ...] = ()
    """For each time that it lost its disk: the base of the first segment since, and when that was made, in microseconds
    since 1970. What was read before from there on is lost."""

    @classmethod
    def of(cls, log: LogInput) -> LogRead:
        """The log of an input that was prepared."""
        facts_by_base = {each.base: each for each in log.facts}
        segments = []
        for segment in log.segments:
            if (facts := facts_by_base.get(segment.base)) is None:
                continue  # the segment could not be read, which makes the audit inconclusive
            damage = str(facts.broken[0]["detail"]) if facts.broken else ""
            is_whole = segment.sealed_end == segment.base + segment.size
            end = segment.sealed_end if is_whole else max(segment.base, facts.durable)
            crc = facts.crc if is_whole else None
            segments.append(SegmentRead(segment.base, segment.created_us, end, crc, damage))
        bases = [segment.base for segment in segments]
        restored = [
            (bases[after - 1], restore.restored_us)
            for restore in log.catalog.restores
            if (after := bisect_right(bases, restore.position))
        ]
        return cls(log.name, log.files, log.dropped_to, tuple(segments), tuple(restored))

    def has_lost(self, base: int, read_us: int) -> bool:
        """Whether a segment that was read at an instant was lost with a disk since."""
        return any(base >= first and read_us < at_us for first, at_us in self.restored)
