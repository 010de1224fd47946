"""The embedded log as a storage: opening and recovering, sealing full segments, checkpoints, closing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from notify.errors import Corrupt, DiskFull, NotifyError, StorageFailed
from notify.storage import crash_point
from notify.storage.log import checkpoint, retention, sealed
from notify.storage.log.ballast import Ballast
from notify.storage.log.disk import Disk
from notify.storage.log.format import ENTRY_SIZE, SEGMENT_HEADER_SIZE, RecordType
from notify.storage.log.frame import Frame
from notify.storage.log.groups import LogGroups
from notify.storage.log.journal import NO_ROOM, Journal
from notify.storage.log.live import LivePart
from notify.storage.log.messages import LogMessages
from notify.storage.log.parts import Part
from notify.storage.log.recovery import Damage, walk
from notify.storage.log.sealed import SealedPart
from notify.storage.log.segments import Segment, Segments
from notify.storage.log.state import LogState
from notify.storage.log.topics import LogTopics
from notify.storage.log.transactions import LogTransactions

log = structlog.get_logger("notify.log")

SEGMENT_BYTES = 256 << 20
CHECKPOINT_EVERY_BYTES = 64 << 20


class LogStore(LogTransactions, LogTopics, LogMessages, LogGroups):
    """Transactions and queues in one log under a directory. One process at a time; methods belong to one loop."""

    def __init__(
        self,
        directory: Path | str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk | None = None,
        write_delay: Callable[[], float] | None = None,
        on_failure: Callable[[StorageFailed], None] | None = None,
        retention_us: int = 0,
        retention_bytes: int = 0,
    ) -> None:
        """`retention_us` 0 keeps messages for ever, `retention_bytes` 0 whatever room they take; see `retain`."""
        self.disk = disk or Disk(Path(directory))
        self.segments = Segments(self.disk)
        self.ballast = Ballast(self.disk)
        self.state = LogState()
        self.damages: list[Damage] = []
        self.corrupt_messages = 0
        self.recovery_seconds = 0.0
        self.replayed_bytes = 0
        self._segment_bytes = segment_bytes
        self._write_delay = write_delay
        self._on_failure = on_failure
        self._retention_us = retention_us
        self._retention_bytes = retention_bytes
        self._visible_callbacks: list[Callable[[set[str]], None]] = []
        self._sealing: asyncio.Task[None] | None = None
        self._snapshots: dict[int, Callable[[], bytes]] = {}
        self._places = {}
        self._checkpointed = 0
        """Position of the newest checkpoint, or of the one that is being made."""
        self._checkpoint_bytes = 0
        self._checkpointing = threading.Lock()
        """Held while one is written: retention takes its own while a sealing thread may be at another."""
        self._lock_fd: int | None = None
        self.journal: Journal

    def shards(self) -> Sequence[str]:
        return ()

    def queues(self) -> LogStore:
        return self

    # --- opening ----------------------------------------------------------------------------------------------

    async def open(self, now_us: int) -> None:
        """Recover the log and be ready to write.

        Raises StorageFailed if another process has it, Corrupt if it cannot be read safely.
        """
        started = time.perf_counter()
        self.disk.make()
        self._lock()
        self._recover(now_us)
        self.journal = Journal(
            self.disk,
            self.segments,
            self._segment_bytes,
            self._durable,
            self._roll,
            self._failed,
            self._write_delay,
        )
        self.journal.start(self._end, self.state.live)
        self.ballast.take()
        self.recovery_seconds = time.perf_counter() - started

    def _lock(self) -> None:
        fd = os.open(self.disk.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise StorageFailed(
                f"another process uses {self.disk.directory}; stop it, or give this one another --data-dir"
            ) from None
        self._lock_fd = fd

    def _recover(self, now_us: int) -> None:
        self._drop_unfinished()
        for complaint in self.segments.open_existing():
            self._set_aside(complaint)
        saved = checkpoint.load(self.disk)
        segments = self.segments.all()
        position = 0
        if saved is not None:
            position, state = saved
            self.state.restore(state)
        self._checkpointed = position
        if segments and position < segments[0].base:
            raise Corrupt(
                f"the newest checkpoint stands at {position}, and the log begins at {segments[0].base}: segments "
                "between them are missing; restore a backup"
            )
        if not segments:
            if saved is not None:
                raise Corrupt("there is a checkpoint but no segment: the log's files are missing; restore a backup")
            segments = [self.segments.create(0, now_us)]
        elif saved is None and segments[0].base != 0:
            raise Corrupt("the first segments are gone and there is no checkpoint; restore a backup")
        self._open_husks(segments[0].base)
        for segment, following in zip(segments, segments[1:], strict=False):
            segment.sealed_end = following.base
        self._end = segments[0].base + SEGMENT_HEADER_SIZE
        for segment in segments:
            if segment.sealed_end and segment.sealed_end <= position:
                self._open_sealed(segment)
            else:
                self._replay(segment, position)
        self._drop_empty_tail()
        ahead = self._end < position
        if ahead:
            self._note_lost_end(position)
        self._repair_torn_tail()
        if ahead:
            self._checkpoint_at_the_end()
        self.state.sealed_id_max = max(
            (p.id_max for p in self.state.parts if isinstance(p, SealedPart) and p.count), default=0
        )
        live = [p for p in self.state.parts if isinstance(p, LivePart)]
        for part, behind in zip(live, live[1:], strict=False):
            # Sealed in the background, as if it had just become full.
            part.end = behind.base
            part.is_complete = True
            self.state.being_sealed.append(part)
        if segments[0].base:
            self._find_starts()
        self.state.times.load()

    def _note_lost_end(self, position: int) -> None:
        """The log ends before the position of its newest checkpoint: what lay between was durable, and is damaged."""
        torn = next((d for d in self.damages if d.torn), None)
        if torn is not None:
            torn.torn = False
        else:
            self.damages.append(Damage(self.segments.last.name, self._end, position, torn=False))

    def _checkpoint_at_the_end(self) -> None:
        """Have a checkpoint where the log ends now. The one ahead of it would hide what is appended from now on: a
        start applies only what comes behind the newest checkpoint."""
        data = self._snapshot(self._end)()
        self.disk.replace(checkpoint.checkpoint_name(self._end), [data])
        for name in checkpoint.names_behind(self.disk, self._end):
            self.disk.unlink(name)
        self.disk.sync_directory()
        self._checkpointed = self._end

    def complaints(self) -> list[str]:
        """The damage that recovery met, in a sentence each."""
        return [
            f"bytes {d.start} to {d.end} of segment {d.segment} were durable and are damaged; what is left of them is "
            f"in {d.copy or 'no file'}. Compare with a backup (notify backup verify), and run notify audit"
            for d in self.damages
            if not d.torn
        ]

    def _open_husks(self, first_base: int) -> None:
        """Indexes of dropped segments whose unsettled messages were carried."""
        merged_to = 0
        for name in self.disk.names():
            if not name.endswith(".idx") or int(name.partition(".")[0]) >= first_base:
                continue
            part = SealedPart(self.disk, name)
            if part.base < merged_to:  # it was merged into the one before, just as the process ended
                part.close()
                self.disk.unlink(name)
                continue
            merged_to = part.end
            self.state.parts.append(part)

    def _find_starts(self) -> None:
        """The first retained offset of each queue, where segments were dropped."""
        queues = [queue for topic in self.state.topics_by_id.values() for queue in topic.queues]
        self.state.move_starts(queues)

    def _drop_unfinished(self) -> None:
        for name in self.disk.names():
            if name.endswith(".tmp"):
                self.disk.unlink(name)

    def _set_aside(self, complaint: str) -> None:
        """A file that is no segment: a creation that was cut short, or damage. Kept under another name."""
        name = complaint.partition(":")[0]
        self.disk.rename(name, name + ".unreadable")
        log.error("segment_unreadable", complaint=complaint, kept_as=name + ".unreadable")
        self.damages.append(Damage(name, 0, 0, torn=False, copy=name + ".unreadable"))

    def _open_sealed(self, segment: Segment) -> None:
        name = sealed.index_name(segment.base)
        try:
            self.state.parts.append(SealedPart(self.disk, name))
        except (OSError, ValueError) as error:
            log.warning("index_rebuilt", name=name, reason=str(error))
            part = LivePart(segment.base)
            for found in walk(self.disk, segment, 0, False, self.damages):
                self.state.index_only(part, found.body)
            part.index()
            self.state.parts.append(part)
            self._write_sealed(part, segment.sealed_end)
            self._swap_in(part)

    def _replay(self, segment: Segment, position: int) -> None:
        """Apply a segment's frames; of those before the checkpoint's position only the index is needed."""
        part = LivePart(segment.base)
        self.state.parts.append(part)
        has_more = any(s.base > segment.base and self._has_frames(s) for s in self.segments.all())
        applied_from = 0
        for found in walk(self.disk, segment, 0, not has_more, self.damages):
            if found.base < position:
                self.state.index_only(part, found.body)
                applied_from = len(part.entries) // ENTRY_SIZE
            else:
                self.state.apply(part, found.body)
                self.replayed_bytes += found.end - found.base
            self._end = found.end
        self.state.indexed(part, applied_from)
        if not has_more:
            self._end = max(self._end, segment.base + SEGMENT_HEADER_SIZE)

    def _has_frames(self, segment: Segment) -> bool:
        return next(walk(self.disk, segment, 0, True, []), None) is not None

    def _drop_empty_tail(self) -> None:
        """A segment made just before a crash may follow a torn frame: it is empty, and the one before goes on."""
        while len(self.segments.all()) > 1 and not self._has_frames(self.segments.last):
            segment = self.segments.last
            before = self.segments.all()[-2]
            if self._end == segment.base + SEGMENT_HEADER_SIZE and not any(d.torn for d in self.damages):
                return
            self.state.parts.remove(self.state.live)
            self.segments.remove(segment)
            before.sealed_end = 0

    def _repair_torn_tail(self) -> None:
        """Copy what follows the last sound frame aside, then cut it; reserved but unused room is cut silently."""
        segment = self.segments.last
        for damage in self.damages:
            if damage.copy:
                continue
            where = self.segments.at(damage.start)
            assert where is not None
            data = self.disk.read(where.fd, damage.end - damage.start, damage.start - where.base)
            kind = "torn" if damage.torn else "damaged"
            damage.copy = f"{damage.start:020d}.{kind}"
            self.disk.replace(damage.copy, [data.rstrip(b"\0") if damage.torn else data])
            report = log.warning if damage.torn else log.error
            report(f"log_{kind}", segment=damage.segment, start=damage.start, end=damage.end, kept_as=damage.copy)
        if self.disk.size(segment.fd) > self._end - segment.base:
            self.disk.truncate(segment.fd, self._end - segment.base)
            self.disk.sync(segment.fd)

    # --- while it runs ----------------------------------------------------------------------------------------

    def on_visible(self, callback: Callable[[set[str]], None]) -> None:
        self._visible_callbacks.append(callback)

    def _durable(self, frame: Frame) -> None:
        """A frame is on the disk: its entries become visible."""
        if frame.entries:
            frame.part.publish(frame.entries, frame.queues, frame.delayed)
            for _, position, _ in frame.delayed:
                self.state.times.unpublished.pop(position, None)
            topics = {queue.topic.name for queue in set(frame.queues) if queue is not None}
            if topics:
                for callback in self._visible_callbacks:
                    callback(topics)
        # The next frame may be on its way already, and the last one of this part.
        following = self.journal.in_flight
        if frame.part is not self.journal.open.part and (following is None or frame.part is not following.part):
            frame.part.is_complete = True
        if self._sealing is None or self._sealing.done():
            if self.state.being_sealed:
                self._sealing = asyncio.get_running_loop().create_task(self._seal_waiting())
            elif frame.base - self._checkpointed >= self._checkpoint_every():
                self._checkpointed = frame.base
                self._sealing = asyncio.get_running_loop().create_task(self._checkpoint_now_and_then())

    def _checkpoint_every(self) -> int:
        """Bytes of log between checkpoints: few enough that a start is quick, and many against the checkpoint's own."""
        return max(CHECKPOINT_EVERY_BYTES, 16 * self._checkpoint_bytes)

    def _roll(self, segment: Segment) -> LivePart:
        """A new segment begins: the state now is the state at its start."""
        old = self.state.live
        old.end = segment.base
        self.state.being_sealed.append(old)
        self._snapshots[segment.base] = self._snapshot(segment.base)
        self._checkpointed = segment.base
        part = LivePart(segment.base)
        self.state.parts.append(part)
        return part

    def _snapshot(self, position: int) -> Callable[[], bytes]:
        """Copies of the state as it is at a position; the function that is returned encodes them, in any thread."""
        values = self.state.snapshot()
        return lambda: checkpoint.encoded(values(), position, time.time_ns() // 1000)

    async def _checkpoint_now_and_then(self) -> None:
        try:
            await self.checkpoint()
        except (OSError, NotifyError) as error:
            # A full disk, say: the log goes on, and the next start reads more of it.
            log.error("checkpoint_failed", reason=str(error))

    async def checkpoint(self) -> None:
        """Take a checkpoint behind the next frame, and wait until it is durable. Raises StorageFailed or OSError."""
        taken: list[tuple[int, Callable[[], bytes]]] = []
        self.journal.on_take.append(lambda position: taken.append((position, self._snapshot(position))))
        self.journal.reserve(4096)
        self.journal.append(RecordType.CARRY, [], b"")
        await self.journal.sync()
        position, encoded = taken[0]
        if self._write_delay is None:
            await asyncio.to_thread(self._write_checkpoint, encoded, position)
        else:
            self._write_checkpoint(encoded, position)

    def _write_checkpoint(self, encoded: Callable[[], bytes], position: int) -> None:
        data = encoded()
        with self._checkpointing:
            self._checkpoint_bytes = len(data)
            checkpoint.write(self.disk, data, position)

    def _failed(self, error: StorageFailed) -> None:
        log.critical("storage_failed", reason=str(error))
        if self._on_failure is not None:
            self._on_failure(error)

    async def _seal_waiting(self) -> None:
        """Write the index and the checkpoint of full segments, one after the other, off the loop."""
        while self.state.being_sealed and self.state.being_sealed[0].is_complete:
            part = self.state.being_sealed[0]
            try:
                if self._write_delay is None:
                    await asyncio.to_thread(self._write_sealed, part, part.end)
                else:
                    self._write_sealed(part, part.end)
                self._swap_in(part)
            except OSError as error:
                log.error("seal_failed", reason=str(error), segment=part.base)
                return  # tried again when the next frame is durable
            del self.state.being_sealed[0]

    def _write_sealed(self, part: LivePart, end: int) -> None:
        assert part.count == part.assigned, "a part is sealed only when every entry of it is published"
        crash_point.reached("seal.before_rename")
        self.disk.replace(sealed.index_name(part.base), sealed.build(part.entries, part.base, end))
        segment = self.segments.at(part.base)
        assert segment is not None
        self.disk.truncate(segment.fd, end - part.base)
        snapshot = self._snapshots.pop(end, None)
        if snapshot is not None:
            self._write_checkpoint(snapshot, end)

    def _swap_in(self, part: LivePart) -> None:
        ready = SealedPart(self.disk, sealed.index_name(part.base), is_fresh=True)
        self.replace_part(part, ready)
        if ready.count:
            self.state.sealed_id_max = max(self.state.sealed_id_max, ready.id_max)

    def replace_part(self, part: Part, by: Part) -> None:
        """Another index of the same segment takes a part's place."""
        self.state.parts.replace(part, by)
        self._places.clear()

    def remove_part(self, part: Part) -> None:
        self.state.parts.remove(part)
        self._places.clear()

    async def sealed_up(self) -> None:
        """Wait until no index or checkpoint is being written."""
        if self._sealing is not None:
            await self._sealing

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        """Another retention from now on; `retain` follows it."""
        self._retention_us, self._retention_bytes = retention_us, retention_bytes

    async def retain(self, now_us: int) -> int:
        """Drop segments whose time or room is over, carrying what still waits; how many there were.

        On a full disk it first gives back the ballast: what it writes before it drops a segment needs room.
        """
        try:
            dropped = await self._retain(now_us)
        except (DiskFull, OSError) as error:
            if isinstance(error, OSError) and error.errno not in NO_ROOM:
                raise
            if not self.ballast.drop():
                raise
            dropped = await self._retain(now_us)
        self.ballast.take()
        return dropped

    async def _retain(self, now_us: int) -> int:
        return await retention.retain(self, now_us, self._retention_us, self._retention_bytes)

    # --- closing ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Everything durable, a checkpoint, then let go. A failed log is only let go of.

        Raises StorageFailed if the disk fails at this; the log is let go of then, too.
        """
        try:
            await self.sealed_up()
            await self.journal.close()
            await self.sealed_up()  # the last frames may have filled a segment
            if self.journal.failed is None:
                position = self.journal.open.base
                self._write_checkpoint(self._snapshot(position), position)
        except OSError as error:
            raise StorageFailed(f"the disk failed at closing: {error}") from error
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.segments.close()
        for part in self.state.parts:
            if isinstance(part, SealedPart):
                part.close()
        self.state.parts.clear()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
