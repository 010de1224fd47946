"""The part of a log's directory that can be shipped: segments with an index, and the checkpoints at their ends.

It only reads files, so it works while a server has the log open. A segment is sealed once its index file
exists; the segment's own file may be longer for a moment, by reserved space that is about to be cut.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from notify.errors import Corrupt
from notify.protocol.limits import digits
from notify.storage.log import checkpoint
from notify.storage.log.disk import Disk
from notify.storage.log.format import SEGMENT_HEADER_SIZE, read_segment_header
from notify.storage.log.index import index_name
from notify.storage.log.sealed import SealedPart
from notify.storage.log.segments import segment_name


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A finished segment of a log's directory."""

    base: int
    end: int
    created_us: int
    first_us: int
    """Times of the first and the last entry, 0 for a segment without entries."""
    last_us: int
    messages: int
    """Messages that it put into queues."""


class LocalLog:
    """The files of one log. One thread at a time."""

    def __init__(self, directory: Path) -> None:
        """`directory` contains the segments: `log` in a data directory."""
        self.directory = directory
        self.disk = Disk(directory)

    def bases(self) -> list[int]:
        """The positions at which the segments begin."""
        bases = [digits(path.stem, 20) for path in self.directory.glob("*.log")]
        return sorted(base for base in bases if base is not None)

    def sealed_at(self, base: int) -> SealedSegment | None:
        """The segment that begins at a position; None if it is not sealed yet. Raises Corrupt if it cannot be read."""
        try:
            with self.index(base) as part:
                end, first_us, last_us = part.end, part.time_min, part.time_max
                messages = int(part.runs["count"].sum())
        except FileNotFoundError:
            return None
        with (self.directory / segment_name(base)).open("rb") as file:
            _, created_us = read_segment_header(file.read(SEGMENT_HEADER_SIZE))
        return SealedSegment(base, end, created_us, first_us, last_us, messages)

    @contextlib.contextmanager
    def index(self, base: int) -> Iterator[SealedPart]:
        """The index file of a segment. Raises FileNotFoundError, and Corrupt if it cannot be read."""
        name = index_name(base)
        try:
            part = SealedPart(self.disk, name)
        except ValueError as error:
            raise Corrupt(f"{name}: {error}. Restart the server: it is built again from the segment") from None
        try:
            yield part
        finally:
            with contextlib.suppress(BufferError):  # a pending exception refers to a part of it
                part.close()

    def waiting(self, position: int) -> list[tuple[int, int]]:
        """(base, bytes) of the finished segments from a position on: those that another one follows."""
        bases = self.bases()
        at = bisect_right(bases, position - 1)
        return [(one, following - one) for one, following in zip(bases[at:], bases[at + 1 :], strict=False)]

    def checkpoint_at(self, position: int) -> bytes | None:
        """The file of the checkpoint at a position; None if there is none."""
        try:
            return (self.directory / checkpoint.checkpoint_name(position)).read_bytes()
        except FileNotFoundError:
            return None

    def topic_names(self, position: int) -> dict[int, str] | None:
        """The names of topics by their numbers, from a checkpoint at or after a position; None while there is none.

        Raises Corrupt if the newest checkpoints cannot be read.
        """
        try:
            newest = checkpoint.load(self.disk)
        except FileNotFoundError:
            return None  # a newer one has just replaced it
        if newest is None or newest.position < position:
            return None
        return {topic.number: topic.name for topic in newest.state.topics}
