"""A log's segments as an audit has read them: as much of each as can never change, by which a later audit knows it."""

from __future__ import annotations

from dataclasses import dataclass

from notify.spark.log_files import LogFiles
from notify.spark.log_input import LogInput


@dataclass(frozen=True, slots=True)
class SegmentRead:
    """Bytes [base, end) of a log, which are durable, in one segment."""

    base: int
    created_us: int
    end: int
    crc: int | None
    """CRC32C of these bytes; None: it has to be computed from the file."""
    damage: str = ""
    """The first damage in it, in words; "" if there is none."""


@dataclass(frozen=True, slots=True)
class LogRead:
    """A log: its name, its files, up to where its own record says that retention dropped it, and its segments."""

    name: str
    files: LogFiles
    dropped_to: int
    segments: tuple[SegmentRead, ...]

    @classmethod
    def of(cls, log: LogInput) -> LogRead:
        """A log that is prepared."""
        facts = {each.base: each for each in log.facts}
        segments = []
        for segment in log.segments:
            if (known := facts.get(segment.base)) is None:
                continue  # it could not be read, which is a reason to doubt the audit
            damage = str(known.broken[0]["detail"]) if known.broken else ""
            is_whole = segment.sealed_end == segment.base + segment.size
            end = segment.sealed_end if is_whole else max(segment.base, known.durable)
            crc = known.crc if is_whole else None
            segments.append(SegmentRead(segment.base, segment.created_us, end, crc, damage))
        return cls(log.name, log.files, log.dropped_to, tuple(segments))
