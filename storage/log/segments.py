"""The segment files: lists them, finds positions in them, and reads bytes."""

from __future__ import annotations

from bisect import bisect_right

from notify.storage.log.disk import Disk
from notify.storage.log.format import SEGMENT_HEADER_SIZE, read_segment_header, segment_header

RECENT_BYTES = 16 << 20
RECENT_FRAMES = 4096
FETCH_BYTES = 8 << 20
SET_ASIDE = (".torn", ".damaged", ".unreadable")
"""The endings of the files in which recovery keeps what it could not read."""


class Segment:
    """One file of the log: bytes [base, base + size)."""

    __slots__ = ("base", "created_us", "fd", "fetched_to", "name", "sealed_end")

    def __init__(self, base: int, name: str, fd: int, created_us: int) -> None:
        self.base = base
        self.name = name
        self.fd = fd
        self.created_us = created_us
        self.sealed_end = 0  # position after the last frame, once the segment is finished
        self.fetched_to = base  # the end of what the system was asked to read ahead


def segment_name(base: int) -> str:
    return f"{base:020d}.log"


class Segments:
    """All segments in order of their base position. Only `read` is thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._bases: list[int] = []
        self._all: list[Segment] = []
        self._recent_at: list[int] = []
        self._recent: list[bytes] = []
        self._recent_bytes = 0

    def all(self) -> list[Segment]:
        return list(self._all)

    @property
    def last(self) -> Segment:
        return self._all[-1]

    def open_existing(self) -> list[str]:
        """Open every segment file; returns a complaint for each invalid one."""
        complaints = []
        for name in self._disk.names():
            if not name.endswith(".log"):
                continue
            fd = self._disk.open(name)
            try:
                base, created = read_segment_header(self._disk.read(fd, SEGMENT_HEADER_SIZE, 0))
                if name != segment_name(base):
                    raise ValueError(f"its header says it starts at {base}")
            except ValueError as error:
                self._disk.close(fd)
                complaints.append(f"{name}: {error}")
                continue
            self._insert(Segment(base, name, fd, created))
        return complaints

    def create(self, base: int, created_us: int) -> Segment:
        """Make the next segment, durably. If it raises OSError, no file is left."""
        name = segment_name(base)
        fd = self._disk.open(name, create=True)
        try:
            self._disk.write(fd, segment_header(base, created_us), 0)
            self._disk.sync(fd)
            self._disk.sync_directory()
        except OSError:
            self._disk.close(fd)
            self._disk.unlink(name)
            raise
        segment = Segment(base, name, fd, created_us)
        self._insert(segment)
        return segment

    def _insert(self, segment: Segment) -> None:
        at = bisect_right(self._bases, segment.base)
        self._bases.insert(at, segment.base)
        self._all.insert(at, segment)

    def at(self, position: int) -> Segment | None:
        """The segment with a position; None below the first."""
        i = bisect_right(self._bases, position) - 1
        return self._all[i] if i >= 0 else None

    def following(self, position: int) -> int | None:
        """The beginning of the segment after that of a position; None: the position is in the last one."""
        i = bisect_right(self._bases, position)
        return self._bases[i] if i < len(self._bases) else None

    def begun_at(self, base: int) -> Segment:
        """The segment that begins at a position. Raises LookupError if there is none."""
        segment = self.at(base)
        if segment is None or segment.base != base:
            raise LookupError(f"no segment begins at {base}")
        return segment

    @property
    def first_base(self) -> int:
        """Position of the oldest byte that is retained."""
        return self._bases[0]

    def read(self, position: int, size: int) -> bytes:
        """Bytes at a position, within one segment; fewer at the end of the file."""
        segment = self.at(position)
        if segment is None:
            return b""
        if segment.sealed_end and position + size > segment.fetched_to - FETCH_BYTES // 2:
            # Readers go forward, so let the system read ahead while they use these bytes.
            segment.fetched_to = position + size + FETCH_BYTES
            self._disk.will_need(segment.fd, position - segment.base, size + FETCH_BYTES)
        return self._disk.read(segment.fd, size, position - segment.base)

    def keep(self, position: int, data: bytes) -> None:
        """Remember what was just written at a position, so that consumers at the head read it from memory."""
        if len(data) > RECENT_BYTES // 4:
            return
        self._recent_at.append(position)
        self._recent.append(data)
        self._recent_bytes += len(data)
        if self._recent_bytes > RECENT_BYTES or len(self._recent) > RECENT_FRAMES:
            # Drop half of the list, because dropping one each frame would move the whole list each time.
            keep_from = len(self._recent) // 2
            self._recent_bytes -= sum([len(data) for data in self._recent[:keep_from]])
            del self._recent[:keep_from], self._recent_at[:keep_from]

    def recent(self, position: int, size: int) -> tuple[int, bytes] | None:
        """The position and all bytes of a remembered write that contains these bytes."""
        i = bisect_right(self._recent_at, position) - 1
        if i >= 0 and position + size <= self._recent_at[i] + len(self._recent[i]):
            return self._recent_at[i], self._recent[i]
        return None

    def remove(self, segment: Segment) -> None:
        at = self._all.index(segment)
        del self._all[at], self._bases[at]
        self._disk.close(segment.fd)
        self._disk.unlink(segment.name)

    def close(self) -> None:
        for segment in self._all:
            self._disk.close(segment.fd)
        self._recent.clear()
        self._recent_at.clear()
        self._all.clear()
        self._bases.clear()
