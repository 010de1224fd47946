"""Reads the log's frames in order, and tells a torn tail from damage.

An invalid frame is a torn tail if no valid frame follows it: the machine stopped while it was being written, and
no caller learned that it is durable. It is copied aside and cut. If a valid frame follows, its base position
proves that the invalid one was durable once: it is damaged. It is copied aside, reported, and left in place, and
reading continues after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from notify.storage.log.disk import Disk
from notify.storage.log.format import FRAME_HEADER_SIZE, FRAME_MAGIC, SEGMENT_HEADER_SIZE, FrameHeader, frame_is_sound
from notify.storage.log.segments import Segment

_WINDOW = 8 << 20

_ZEROS = bytes(_WINDOW)


@dataclass(slots=True)
class SoundFrame:
    """A valid frame: its place, its time and its records."""

    base: int
    end: int
    time_us: int
    records: int
    body: memoryview


@dataclass(slots=True)
class Damage:
    """Bytes [start, end) that are not what was written. `torn`: after everything durable, so they are cut."""

    segment: str
    start: int
    end: int
    torn: bool
    copy: str = ""


class SegmentReader:
    """Walks one segment file."""

    def __init__(self, disk: Disk, segment: Segment) -> None:
        self._disk = disk
        self._segment = segment
        self._size = disk.size(segment.fd)
        self._window = b""
        self._window_at = 0

    def _bytes(self, position: int, size: int) -> memoryview:
        """Bytes from a position on; fewer at the end of the file."""
        at = position - self._segment.base
        if not (self._window_at <= at and at + size <= self._window_at + len(self._window)):
            self._window = self._disk.read(self._segment.fd, max(size, _WINDOW), at)
            self._window_at = at
        start = at - self._window_at
        return memoryview(self._window)[start : start + size]

    def frame_at(self, position: int) -> SoundFrame | None:
        """The frame at a position, if it is valid."""
        raw = self._bytes(position, FRAME_HEADER_SIZE)
        if len(raw) < FRAME_HEADER_SIZE or raw[:4] != FRAME_MAGIC:
            return None
        header = FrameHeader.of(raw)
        end = position + FRAME_HEADER_SIZE + header.length
        if header.base != position or end - self._segment.base > self._size:
            return None
        body = self._bytes(position + FRAME_HEADER_SIZE, header.length)
        if not frame_is_sound(header, body):
            return None
        return SoundFrame(position, end, header.time_us, header.records, body)

    def frames(self, position: int) -> Iterator[SoundFrame]:
        """Valid frames from a position on, up to the first invalid one."""
        while (found := self.frame_at(position)) is not None:
            position = found.end
            yield found

    def is_blank_from(self, position: int) -> bool:
        """Whether only zeros (reserved space) or nothing follows."""
        at = position
        while chunk := self._bytes(at, _WINDOW).tobytes():
            # One memcmp: a start checks up to 16 MiB of reserved space.
            if chunk != _ZEROS[: len(chunk)]:
                return False
            at += len(chunk)
        return True

    def next_sound(self, position: int) -> SoundFrame | None:
        """The first valid frame after a position, however far away."""
        at = position
        while True:
            chunk = self._bytes(at, _WINDOW).tobytes()
            hit = chunk.find(FRAME_MAGIC)
            while hit >= 0:
                found = self.frame_at(at + hit)
                if found is not None:
                    return found
                hit = chunk.find(FRAME_MAGIC, hit + 1)
            if len(chunk) < _WINDOW:
                return None
            at += len(chunk) - len(FRAME_MAGIC) + 1

    @property
    def end(self) -> int:
        return self._segment.base + self._size


def walk(disk: Disk, segment: Segment, start: int, is_last: bool, damages: list[Damage]) -> Iterator[SoundFrame]:
    """Valid frames of a segment from `start` on. Appends to `damages`; a torn tail is reported, not yet cut."""
    reader = SegmentReader(disk, segment)
    position = max(start, segment.base + SEGMENT_HEADER_SIZE)
    while True:
        for found in reader.frames(position):
            position = found.end
            yield found
        if reader.is_blank_from(position):
            if not is_last and segment.sealed_end and position < segment.sealed_end:
                damages.append(Damage(segment.name, position, segment.sealed_end, torn=False))
            return
        following = reader.next_sound(position + 1)
        if following is None:
            damages.append(Damage(segment.name, position, reader.end, torn=is_last))
            return
        damages.append(Damage(segment.name, position, following.base, torn=False))
        position = following.base


def verify(disk: Disk, segments: list[Segment]) -> list[str]:
    """The damage in all segments, in words; empty if every checksum matches. It reads every frame,
    including those that a start skips because of a checkpoint."""
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
