"""Reading every frame of the log, also those that a checkpoint made unnecessary to read at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notify.storage.log.recovery import Damage, walk

if TYPE_CHECKING:
    from notify.storage.log.store import LogStore


def verify(store: LogStore) -> list[str]:
    """The damage below the end of the log, in words; empty where every checksum fits."""
    damages: list[Damage] = []
    segments = store.segments.all()
    for segment in segments:
        end = segment.base
        for frame in walk(store.disk, segment, segment.base, segment is segments[-1], damages):
            end = frame.end
        following = next((s.base for s in segments if s.base > segment.base), end)
        if end < following:
            damages.append(Damage(segment.name, end, following, torn=False))
    known = {(d.segment, d.start): d for d in damages}
    return [f"{d.segment}: bytes {d.start} to {d.end} are not what was written" for d in known.values()]
