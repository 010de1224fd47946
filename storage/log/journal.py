"""Group commit: waiting records go into one frame, which is written and synced once; then all waiters are answered.

The event loop appends records to the open frame. If no frame is being written, the open one is written; while it
is synced, the next one fills. So a slower disk gets larger frames, without a timer. No frame is written before
the previous one is synced, so a frame's base position is also a durable mark.

If a write or a sync fails, the journal stops: nothing that waited is acknowledged, and the sync is never
repeated, because the kernel may have dropped the dirty pages (https://lwn.net/Articles/752063/).
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from notify.errors import DiskFull, StorageFailed, Unavailable
from notify.runtime.clock import Clock
from notify.storage import crash_point
from notify.storage.log.disk import Disk
from notify.storage.log.entry import ENTRY_SIZE
from notify.storage.log.format import FRAME_HEADER_SIZE, SEGMENT_HEADER_SIZE, frame
from notify.storage.log.frame import Frame
from notify.storage.log.meta import Meta, encoded
from notify.storage.log.open_part import OpenPart
from notify.storage.log.queues import Queue
from notify.storage.log.records import RECORD_HEADER, RECORD_HEADER_SIZE, RecordType
from notify.storage.log.segments import Segment, Segments
from notify.storage.log.threads import Threads, Way
from notify.storage.topics import Flush

RESERVE_BYTES = 16 << 20
OPEN_FRAME_BYTES = 64 << 20
IDLE_MARK_SECONDS = 0.010
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Errors that pass once there is space (or a file descriptor) again; after any other the journal stops."""

# These decide what waits for the sync of a frame (threads.py): the loop if little waits and the disk is fast, a thread
# if little waits and the disk is slow, the kernel if there is more to do meanwhile.
LOOP_SYNC_SECONDS = 0.002
LOOP_WAITERS = 2
EARLY_ENTRIES = 16
"""A frame with this many entries goes to the kernel as soon as a caller waits for it: handling another request of that
size takes longer than the sync. A smaller frame first takes the requests that the loop has already read."""


class Journal:
    """The write side of the log. Call all methods in the event loop's thread."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        segment_bytes: int,
        on_durable: Callable[[Frame], None],
        on_roll: Callable[[Segment], OpenPart],
        on_failure: Callable[[StorageFailed], None],
        clock: Clock,
        threads: Threads,
    ) -> None:
        """`clock`: the time that is written into frames and segments, in microseconds."""
        self._disk = disk
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._on_durable = on_durable
        self._on_roll = on_roll
        self._on_failure = on_failure
        self._clock = clock
        self._threads = threads
        self._loop: asyncio.AbstractEventLoop
        self.in_flight: Frame | None = None
        self._kick_scheduled = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._marked = True
        self.failed: StorageFailed | None = None
        self.on_take: list[Callable[[int], None]] = []
        """Callbacks for the next frame: each gets the position after it, at a moment when state and log agree."""
        self.end = 0
        self.durable = 0
        self.open: Frame
        self._reserved = 0
        self.is_blank = True
        """Whether the open segment has no record yet."""
        self._segment_is_asked_for = False
        self._sync_average = 0.0

    def start(self, end: int, part: OpenPart) -> None:
        """Begin to write at `end`, the position after the last valid frame. Call it on the running event loop."""
        self._loop = asyncio.get_running_loop()
        segment = self._segments.last
        self.durable = end
        self.is_blank = end == segment.base + SEGMENT_HEADER_SIZE
        self._reserved = segment.base + self._disk.size(segment.fd)
        self.open = Frame(end, segment, part)
        self.end = end + FRAME_HEADER_SIZE
        self._threads.start(self, self._disk)

    def reserve(self, size: int) -> None:
        """Make sure that `size` more bytes can be written.

        Raises DiskFull if there is no space, Unavailable if too much already waits for the disk, StorageFailed
        if the disk fails. Call it before any state changes, so that an error has no effect.
        """
        if self.failed is not None:
            raise self.failed
        need = self.end + size + 2 * FRAME_HEADER_SIZE + SEGMENT_HEADER_SIZE
        if need - self.open.base > OPEN_FRAME_BYTES:
            raise Unavailable("the disk cannot keep up: too many writes are waiting; try again")
        if need <= self._reserved:
            return
        segment = self.open.segment
        for target in (need + RESERVE_BYTES, need):
            try:
                self._disk.reserve(segment.fd, self._reserved - segment.base, target - self._reserved)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise self.fail(error) from error
            else:
                self._reserved = target
                return
        raise DiskFull("the server's disk is full: nothing was stored; writes resume when there is room")

    def append(
        self,
        kind: RecordType,
        data: bytes,
        entries: list[bytes] | None = None,
        queues: list[Queue | None] | None = None,
        point: str = "",
    ) -> int:
        """Add a record to the open frame; returns its position. Call `reserve` for its size first.

        `entries` are the record's index entries; `queues` has the queue of each, or None.
        `point` names the crash points before and after the frame's sync (storage/crash_point.py).
        """
        position = self.end
        opened = self.open
        length = RECORD_HEADER_SIZE + len(data)
        if entries:
            length += ENTRY_SIZE * len(entries)
            opened.chunks.append(RECORD_HEADER.pack(length, kind, 0, len(entries)))
            opened.chunks += entries
            opened.entries += entries
            opened.queues += queues if queues is not None else [None] * len(entries)
            opened.part.assigned += len(entries)
        else:
            opened.chunks.append(RECORD_HEADER.pack(length, kind, 0, 0))
        opened.chunks.append(data)
        opened.records += 1
        self.is_blank = False
        if point:
            opened.points.add(point)
        self.end = position + length
        if not self._kick_scheduled and self.in_flight is None:
            self._kick_scheduled = True
            self._loop.call_soon(self._kick_next_turn)
        return position

    def data_position(self, entries: int) -> int:
        """The position of the next record's data, if the record has `entries` entries."""
        return self.end + RECORD_HEADER_SIZE + entries * ENTRY_SIZE

    def append_meta(self, meta: Meta) -> None:
        """Add a META record. Raises what `reserve` raises, so call it before the state changes that it records."""
        data = encoded(meta)
        self.reserve(len(data) + 512)
        self.append(RecordType.META, data)

    def on_their_way(self) -> list[Frame]:
        """The frames whose entries are not in a part yet, in log order."""
        return [self.open] if self.in_flight is None else [self.in_flight, self.open]

    async def sync(self, flush: Flush = Flush.SYNC, *, more_comes: bool = False) -> None:
        """Wait until everything appended so far is durable, or as safe as `flush` says.

        `more_comes`: the same request may append more before the loop's next turn. Raises StorageFailed if it cannot
        become so.
        """
        if self.failed is not None:
            raise self.failed
        waiting = self.open if self.open.records else self.in_flight
        if waiting is None or flush is Flush.MEMORY:
            return
        future = self._loop.create_future()
        if flush is Flush.SYNC:
            waiting.waiters.append(future)
        elif waiting.is_handed_over:
            return
        else:
            waiting.handed_over.append(future)
        if self.in_flight is None and self._threads.has_kernel and len(waiting.entries) >= EARLY_ENTRIES:
            if more_comes:
                self._loop.call_soon(self._kick)
            else:
                self._take()
        await future

    def begin_segment(self) -> int:
        """Begin another segment at the next frame, if the open one has a record.

        Returns the position that ends everything appended so far: no later segment will contain any of it.
        Raises what `reserve` raises.
        """
        if self.is_blank:
            return self.open.segment.base
        self.reserve(0)
        self._segment_is_asked_for = True
        position = self.end
        if self.in_flight is None:
            self._take()
        return position

    def _kick_next_turn(self) -> None:
        """The loop reads its connections once more before the frame is closed. A producer sends the outcome of one
        transaction and the half of its next one within microseconds: so both share a sync."""
        self._loop.call_soon(self._kick)

    def _kick(self) -> None:
        """Hand the open frame to the writer if it is idle and there is something to write."""
        self._kick_scheduled = False
        if self.in_flight is None and self.open.records and self.failed is None:
            self._take()

    def _take(self) -> None:
        taken = self.open
        end = self.end
        segment = taken.segment
        part = taken.part
        if end - segment.base >= self._segment_bytes or self._segment_is_asked_for:
            self._segment_is_asked_for = False  # if there is no space, the caller asks again
            try:
                segment = self._segments.create(end, self._clock())
            except OSError as error:
                if error.errno not in NO_ROOM:
                    # The sync failed: the disk's content is unknown now, and repeating the sync would hide that.
                    self.fail(error)
                    return
                # No space for another file: this one keeps growing, and `reserve` refuses what does not fit.
            else:
                taken.segment.sealed_end = end
                part = self._on_roll(segment)
                self._reserved = end + SEGMENT_HEADER_SIZE
                self.is_blank = True
        base = end if segment is taken.segment else end + SEGMENT_HEADER_SIZE
        self.open = Frame(base, segment, part)
        self.end = base + FRAME_HEADER_SIZE
        self.in_flight = taken
        if self.on_take:
            calls, self.on_take = self.on_take, []
            for call in calls:
                call(base)
        self._marked = not taken.records
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._threads.hand_over(taken, self._way(taken))

    def _way(self, taken: Frame) -> Way:
        if len(taken.waiters) > LOOP_WAITERS or len(taken.entries) >= EARLY_ENTRIES or taken.handed_over:
            return Way.KERNEL
        return Way.LOOP if self._sync_average < LOOP_SYNC_SECONDS else Way.THREAD

    # Called for each frame, in this order (threads.py).

    def write_frame(self, taken: Frame) -> None:
        """Hand a frame to the operating system. Raises OSError."""
        if self.failed is not None:
            return
        segment = taken.segment
        data = frame(b"".join(taken.chunks), taken.records, taken.base, self.durable, self._clock())
        for point in taken.points:
            crash_point.reached(point + ".before_sync")
        self._disk.write(segment.fd, data, taken.base - segment.base)
        taken.written = data
        taken.is_handed_over = True
        if taken.handed_over:
            self._threads.tell(self._release, taken.handed_over)

    def sync_frame(self, taken: Frame) -> None:
        """Wait until a frame is on the disk. Raises OSError."""
        if self.failed is None:
            self._disk.sync(taken.segment.fd)

    def synced_frame(self, taken: Frame, seconds: float) -> None:
        """A frame is on the disk; `seconds`: how long the sync took."""
        # Rises immediately with a slow sync and falls slowly, so that an unsteady disk keeps the thread.
        self._sync_average = max(seconds, self._sync_average * 0.98 + seconds * 0.02)
        for point in taken.points:
            crash_point.reached(point + ".after_sync")

    def written(self, taken: Frame) -> None:
        """A frame is durable: answer its waiters. Called on the loop."""
        if self.failed is not None:
            return
        self.in_flight = None
        # If a new segment has begun, its header is between the two frames.
        self.durable = self.open.base
        if self.open.records or self._segment_is_asked_for:
            self._take()
        elif not self._marked:
            self._idle_timer = self._loop.call_later(IDLE_MARK_SECONDS, self._mark)
        self._segments.keep(taken.base, taken.written)
        try:
            self._on_durable(taken)
        finally:  # whatever a callback raises: the frame is on the disk
            self._release(taken.waiters)
            self._release(taken.handed_over)

    def _release(self, waiters: list[asyncio.Future[None]]) -> None:
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def _mark(self) -> None:
        """Write an empty frame after a pause, so that the durable mark passes the last frame."""
        self._idle_timer = None
        if self.in_flight is None and not self.open.records and self.failed is None:
            try:
                self.reserve(0)
            except (Unavailable, StorageFailed):
                return
            self._take()

    def fail(self, error: BaseException) -> StorageFailed:
        """Stop the journal: fail all waiters, and return the error for later callers."""
        self.failed = (
            error
            if isinstance(error, StorageFailed)
            else StorageFailed(
                f"the disk failed ({error}); the server stops and acknowledges nothing that was not synced"
            )
        )
        for waiting in self.on_their_way():
            for future in waiting.waiters + waiting.handed_over:
                if not future.done():
                    future.set_exception(self.failed)
        self._on_failure(self.failed)
        return self.failed

    def let_go(self) -> None:
        """Start no more writing: the closed file's descriptor may belong to another file by then."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    async def close(self) -> None:
        """Write what waits and a durable mark, stop the thread, and release the reserved space."""
        if self.failed is None:
            await self.sync()
            self.let_go()
            if not self._marked:
                self._mark()
                await self.sync()
        await self._threads.close()
        if self.failed is None:
            segment = self.open.segment
            self._disk.truncate(segment.fd, self.open.base - segment.base)
            self._disk.sync(segment.fd)
