"""A watch's memory of the segments of logs: it finds segments that were removed, replaced, cut or changed.

A window's audit says nothing about segments that have only older messages, because these concern other windows. So the
watch notes when each segment was made, up to where it was read, and the checksum of these bytes, and compares them with
the files at each window. A difference is reported once; from then on the watch knows the segment as it is now. It
forgets segments that retention dropped, and those that were lost with a disk, by the log's own records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from notify.spark.inputs.log_read import LogRead, SegmentRead
from notify.spark.result import Found
from notify.spark.times import instant_text
from notify.spark.watch.ledger import Ledger, Noted
from notify.storage.log.segments import segment_name

GONE, EXCHANGED, CUT, CHANGED = "gone", "exchanged", "cut", "changed"
_WORDS = {
    GONE: ("is gone", "are gone", "and no record says that retention dropped it"),
    EXCHANGED: ("was exchanged", "were exchanged", "for a segment of another log, or one that was recreated"),
    CUT: ("was cut", "were cut", "or is an older copy: it is shorter than what was read"),
    CHANGED: ("was changed", "were changed", "its bytes differ from those that were read"),
}


@dataclass
class Compared:
    """The findings of a comparison, and what it changes in the ledger."""

    found: list[Found] = field(default_factory=list)
    noted: list[Noted] = field(default_factory=list)
    forgotten: list[Noted] = field(default_factory=list)

    def write(self, ledger: Ledger) -> None:
        """Record the changes. Call it within the ledger's transaction."""
        for known in self.forgotten:
            ledger.forget_segment(known)
        for known in self.noted:
            ledger.note_segment(known)


def compare(ledger: Ledger, logs: Sequence[LogRead], now_us: int) -> Compared:
    """Compare logs with their notes; changes nothing. `now_us`: when they were read, in microseconds since
    1970. A file that cannot be read just now is compared at the next window."""
    compared = Compared()
    for log in logs:
        noted = {known.base: known for known in ledger.segments(log.name)}
        reads = {read.base: read for read in log.segments}
        differing: dict[str, list[Noted]] = {}
        for base in sorted(noted.keys() | reads.keys()):
            known, read = noted.get(base), reads.get(base)
            if base < log.dropped_to:
                compared.forgotten += [known] if known is not None else []
                continue
            if known is not None and log.has_lost(base, known.read_us):
                compared.forgotten.append(known)
                known = None
                if read is None:
                    continue
            try:
                kind = "" if known is None else _difference(log, known, read)
                seen = _seen(log, None if kind else known, read, now_us)
            except OSError:
                continue
            if kind and known is not None:
                differing.setdefault(kind, []).append(known)
                compared.forgotten.append(known)
            if seen is not None:
                compared.noted.append(seen)
        compared.found += [_found(log, kind, several, reads) for kind, several in sorted(differing.items())]
    return compared


def _difference(log: LogRead, known: Noted, read: SegmentRead | None) -> str:
    """How a segment differs from its note; "" if it does not. Raises OSError."""
    try:
        created_us = log.files.created_us(known.base)
    except FileNotFoundError:
        return GONE
    except ValueError:
        return CHANGED
    if created_us != known.created_us:
        return EXCHANGED
    if log.files.size_of(known.base) < known.end - known.base:
        return CUT
    is_computed = read is not None and read.crc is not None and read.end == known.end
    crc = read.crc if read is not None and is_computed else log.files.checksum(known.base, known.end - known.base)
    return CHANGED if crc != known.crc else ""


def _seen(log: LogRead, known: Noted | None, read: SegmentRead | None, now_us: int) -> Noted | None:
    """The note of a segment that was read; None if `known` is the same. Raises OSError."""
    if read is None or (known is not None and read.end <= known.end):
        return None
    crc = log.files.checksum(read.base, read.end - read.base) if read.crc is None else read.crc
    return Noted(log.name, read.base, read.created_us, read.end, crc, now_us)


def _found(log: LogRead, kind: str, differing: Sequence[Noted], reads: dict[int, SegmentRead]) -> Found:
    """One finding for all segments of a log that differ in the same way."""
    first, last = differing[0], differing[-1]
    one, several, why = _WORDS[kind]
    name, at = segment_name(first.base), instant_text(max(known.read_us for known in differing))
    if len(differing) == 1:
        detail = f"segment {name}, as it was read at {at}, {one}: {why}"
    else:
        detail = (
            f"{len(differing)} segments, the first {name} and the last {segment_name(last.base)}, as they were read "
            f"until {at}, {several}: of each, {why}"
        )
    damage = next((reads[known.base].damage for known in differing if known.base in reads), "")
    if kind == CHANGED and damage:
        detail += f"; {damage}"
    evidence = {"position": first.base, "end": last.end, "read_us": first.read_us}
    return Found("CORRUPT", detail=detail, at_us=last.read_us, log=log.name, evidence=evidence)
