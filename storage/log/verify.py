"""Reading every frame of the log, also those that a checkpoint made unnecessary to read at the start."""

from __future__ import annotations

from notify.storage.log.disk import Disk
from notify.storage.log.recovery import Damage, walk
from notify.storage.log.segments import Segment


def verify(disk: Disk, segments: list[Segment]) -> list[str]:
    """The damage in all segments, in words; empty where every checksum fits."""
    damages: list[Damage] = []
    for segment in segments:
        end = segment.base
        for frame in walk(disk, segment, segment.base, segment is segments[-1], damages):
            end = frame.end
        following = next((s.base for s in segments if s.base > segment.base), end)
        if end < following:
            damages.append(Damage(segment.name, end, following, torn=False))
    known = {(d.segment, d.start): d for d in damages}
    return [f"{d.segment}: bytes {d.start} to {d.end} are not what was written" for d in known.values()]
