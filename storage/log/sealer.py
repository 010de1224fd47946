"""Seals full segments: writes the index file and a checkpoint at the segment's end, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from notify.errors import NotifyError
from notify.runtime import faults
from notify.storage import crash_point
from notify.storage.log import index
from notify.storage.log.checkpoints import Checkpoints
from notify.storage.log.disk import Disk
from notify.storage.log.open_part import OpenPart
from notify.storage.log.parts import Parts
from notify.storage.log.sealed import SealedPart
from notify.storage.log.segments import Segment, Segments
from notify.storage.log.state import LogState
from notify.storage.log.threads import Threads

log = structlog.get_logger("notify.log")


def seal(disk: Disk, segments: Segments, part: OpenPart, end: int) -> None:
    """Write the index file of a full segment, and cut the space after its last frame. Raises OSError."""
    assert part.count == part.assigned, "a part is sealed only when every entry of it is published"
    crash_point.reached("seal.before_rename")
    disk.replace(index.index_name(part.base), index.build(part.entries, part.base, end))
    disk.truncate(segments.begun_at(part.base).fd, end - part.base)


def swap_in(disk: Disk, parts: Parts, part: OpenPart) -> None:
    """Replace the part with the index file that `seal` wrote. Raises OSError."""
    ready = SealedPart(disk, index.index_name(part.base), is_fresh=True)
    parts.replace(part, ready)
    if ready.count:
        parts.sealed_id_max = max(parts.sealed_id_max, ready.id_max)


class Sealer:
    """Seals full segments and takes checkpoints, one thing at a time."""

    def __init__(
        self, disk: Disk, segments: Segments, state: LogState, checkpoints: Checkpoints, threads: Threads
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._parts = state.parts
        self._checkpoints = checkpoints
        self._threads = threads
        self._working: asyncio.Task[None] | None = None
        self._snapshots: dict[int, Callable[[], bytes]] = {}
        """The state at the beginning of each segment, by its position."""

    def begin_segment(self, segment: Segment) -> OpenPart:
        """Add the part of a new segment, with the state at its start. The part before it is full."""
        full = self._parts.live
        full.end = segment.base
        self._parts.being_sealed.append(full)
        self._snapshots[segment.base] = self._checkpoints.capture(segment.base)
        part = OpenPart(segment.base)
        self._parts.append(part)
        return part

    def work(self, position: int) -> None:
        """Begin the due work, after everything before `position` has become durable."""
        if self._working is not None and not self._working.done():
            return
        loop = asyncio.get_running_loop()
        if self._parts.being_sealed:
            self._working = loop.create_task(self._seal_waiting())
        elif self._checkpoints.is_due(position):
            self._checkpoints.newest = position
            self._working = loop.create_task(self._take_checkpoint())

    async def idle(self) -> None:
        """Wait until no index or checkpoint is being written."""
        if self._working is not None:
            await asyncio.wait([self._working])  # the work continues if this wait is cancelled

    async def _take_checkpoint(self) -> None:
        try:
            await self._checkpoints.take()
        except (OSError, NotifyError) as error:
            # Such as a full disk: the log continues, and the next start reads more of it.
            log.error("checkpoint_failed", reason=str(error))
        except Exception:
            faults.unexpected("checkpoint_failed")

    async def _seal_waiting(self) -> None:
        waiting = self._parts.being_sealed
        while waiting and waiting[0].is_complete:
            part = waiting[0]
            try:
                await self._threads.in_thread(self._write, part)
                swap_in(self._disk, self._parts, part)
            except OSError as error:
                log.error("seal_failed", reason=str(error), segment=part.base)
                return  # tried again when the next frame is durable
            except Exception:
                faults.unexpected("seal_failed", segment=part.base)
                return  # as above
            del waiting[0]

    def _write(self, part: OpenPart) -> None:
        seal(self._disk, self._segments, part, part.end)
        snapshot = self._snapshots.get(part.end)
        if snapshot is not None:
            self._checkpoints.write(snapshot, part.end)
            del self._snapshots[part.end]
