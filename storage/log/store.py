"""The embedded log as a storage: composes its parts, opens and closes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import structlog

from notify.errors import DiskFull, InvalidRequest, StorageFailed
from notify.runtime.clock import Clock, steady_clock
from notify.storage.log.ballast import Ballast
from notify.storage.log.bridges import Bridges
from notify.storage.log.checkpoints import Checkpoints
from notify.storage.log.checks import Checks
from notify.storage.log.delays import Delays
from notify.storage.log.disk import Disk
from notify.storage.log.dropping import Dropper
from notify.storage.log.frame import Frame
from notify.storage.log.groups import Groups
from notify.storage.log.halves import Halves
from notify.storage.log.history import History
from notify.storage.log.journal import NO_ROOM, Journal
from notify.storage.log.lock import DirectoryLock
from notify.storage.log.mentions import Mentions
from notify.storage.log.meta import Restored
from notify.storage.log.open_part import OpenPart
from notify.storage.log.opening import Opening
from notify.storage.log.orphan_indexes import OrphanIndexes
from notify.storage.log.outcomes import Outcomes
from notify.storage.log.payloads import Payloads
from notify.storage.log.queues import Queue
from notify.storage.log.reader import Reader
from notify.storage.log.recovery import Damage, verify
from notify.storage.log.retention import Retention
from notify.storage.log.rewrite import Rewriter
from notify.storage.log.sealer import Sealer
from notify.storage.log.segments import Segment, Segments
from notify.storage.log.settling import Settling
from notify.storage.log.snapshot import snapshot
from notify.storage.log.state import LogState
from notify.storage.log.threads import Threads
from notify.storage.log.topics import Topics
from notify.storage.log.withdrawn import Withdrawn

log = structlog.get_logger("notify.log")

SEGMENT_BYTES = 256 << 20
LOOK_US = 1_000_000
"""How often the log looks whether its directory is still in its place."""


@final
class LogStore:
    """Transactions and queues in one log under a directory. One process at a time; methods belong to one loop.

    It holds the parts of the log and exposes their methods as its own. By itself it only opens, closes,
    and passes the journal's events on to each part.
    """

    def __init_subclass__(cls) -> None:
        raise TypeError("LogStore exposes the methods of its parts: an override in a subclass would be bypassed")

    def __init__(
        self,
        directory: Path | str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk | None = None,
        clock: Clock = steady_clock,
        threads: Threads | None = None,
        on_failure: Callable[[StorageFailed], None] | None = None,
        retention_us: int = 0,
        retention_bytes: int = 0,
    ) -> None:
        """`retention_us`, `retention_bytes`: 0 means no bound; see `retain`.

        `clock`: the time (microseconds since 1970) of frames, segments and checkpoints; stored data
        has the times that callers pass. `disk` and `threads` are replaced in tests of faults.
        """
        self.disk = disk or Disk(Path(directory))
        self.damages: list[Damage] = []
        self.written_us = 0
        self._on_failure = on_failure
        self._visible_callbacks: list[Callable[[set[str]], None]] = []
        self._placed_callbacks: list[Callable[[int, Mapping[str, int]], None]] = []
        self._lock = DirectoryLock(self.disk.directory)
        self._looked_us = 0
        self._ballast = Ballast(self.disk)

        threads = threads or Threads()
        self.state = state = LogState()
        self.segments = segments = Segments(self.disk)
        self.journal = journal = Journal(
            self.disk, segments, segment_bytes, self._durable, self._begin_segment, self._failed, clock, threads
        )
        self.payloads = payloads = Payloads(state, segments)
        self._checkpoints = Checkpoints(self.disk, state, journal, clock, threads)
        self._sealer = Sealer(self.disk, segments, state, self._checkpoints, threads)
        topics = Topics(state, journal)
        groups = Groups(state, journal)
        settling = Settling(state, journal, topics)
        halves = Halves(state, journal, payloads)
        outcomes = Outcomes(state, journal)
        self._checks = checks = Checks(state, journal, payloads)
        bridges = Bridges(state, journal, halves, outcomes)
        reader = Reader(state, payloads)
        delays = Delays(state, journal)
        withdrawn = Withdrawn(state, journal, payloads)
        history = History(state, journal, self.disk, segments, payloads, reader)
        carrier = Rewriter(state, segments, journal, payloads)
        dropper = Dropper(self.disk, segments, state, carrier, self._checkpoints, self._sealer)
        husks = OrphanIndexes(self.disk, segments, state)
        self._retention = Retention(state, segments, journal, topics, dropper, husks)
        self._retention.keep(retention_us, retention_bytes)

        # Exposed: TransactionStore.
        self.put = halves.put
        self.decide = outcomes.decide
        self.states = outcomes.states
        self.producer_groups = outcomes.producer_groups
        self.claim_checks = checks.claim
        self.release_checks = checks.release
        self.answer_check = checks.answer
        self.checking = checks.checking
        self.resume_checks = checks.resume
        self.half_contents = checks.half_contents
        self.next_check_us = checks.next_us
        self.transaction = history.transaction
        self.undecided = history.undecided
        self.in_doubt = history.in_doubt

        # Exposed: topics, and QueueStore.
        self.topics = topics.all
        self.topic = topics.one
        self.has_topic = topics.has
        self.create_topic = topics.create
        self.create_topic_soon = topics.create_soon
        self.delete_topic = topics.delete
        self.delete_topic_soon = topics.delete_soon
        self.trim = topics.trim
        self.bounds = reader.bounds
        self.count = reader.count
        self.gaps = reader.gaps
        self.read = reader.read
        self.read_run = reader.read_run
        self.read_tagged = reader.read_tagged
        self.read_hashes = reader.read_hashes
        self.read_ids = reader.read_ids
        self.keyed = reader.keyed
        self.offset_at = reader.offset_at
        self.messages = reader.messages
        self.settlements = history.settlements
        self.delayed = delays.delayed
        self.release_due = delays.release_due
        self.next_due_us = delays.next_due_us
        self.withdrawable = withdrawn.withdrawable
        self.withdrawal = withdrawn.withdrawal
        self.withdrawals = withdrawn.counts
        self.collapsed = withdrawn.collapsed
        self.is_full_of_keys = withdrawn.is_full_of_keys
        self.subscriptions = groups.subscriptions
        self.subscription = groups.subscription
        self.subscribe_soon = groups.subscribe_soon
        self.subscribe = groups.subscribe
        self.unsubscribe = groups.unsubscribe
        self.patterns = groups.patterns
        self.set_pattern = groups.set_pattern
        self.drop_pattern = groups.drop_pattern
        self.priorities = groups.priorities
        self.set_priorities = groups.set_priorities
        self.pause = groups.pause
        self.paused = groups.paused
        self.progress = settling.progress
        self.settle = settling.settle
        self.settle_soon = settling.settle_soon
        self.attempted = settling.attempted
        self.hold = settling.hold
        self.dead_letter_soon = settling.dead_letter_soon
        self.bridges = bridges.all
        self.bridge_base = bridges.base
        self.append_from_bridge = bridges.append

        # Exposed: further capabilities.
        self.keep = self._retention.keep
        self.hold_from = self._retention.hold_from
        self.checkpoint = self._checkpoints.take
        self.sealed_up = self._sealer.idle
        self.stored_bodies = Mentions(self.disk, segments, journal).stored_bodies

    # --- opening and closing ----------------------------------------------------------------------------------

    async def open(self, now_us: int) -> None:
        """Recover the log and be ready to write.

        Raises StorageFailed if another process has it, Corrupt if it cannot be read safely.
        """
        self.disk.make()
        self._lock.take()
        try:
            opened = Opening(self.disk, self.segments, self.state).run(now_us)
        except BaseException:
            self.let_go()
            raise
        self.damages = opened.damages
        self.written_us = opened.written_us
        self._checkpoints.newest = opened.checkpoint
        self.journal.start(opened.end, self.state.parts.live)
        self._sealer.work(opened.end)
        self._ballast.take()

    async def close(self) -> None:
        """Make everything durable, take a checkpoint, and release the log. A failed log is only released.

        Raises StorageFailed if the disk fails meanwhile; the log's lock and files are released even then.
        """
        try:
            await self._sealer.idle()
            await self.journal.close()
            await self._sealer.idle()  # the last frames may have filled a segment
            if self.journal.failed is None:
                position = self.journal.open.base
                self._checkpoints.write(self._checkpoints.capture(position), position)
        except OSError as error:
            raise StorageFailed(
                f"the disk failed while the log was closed: {error}; free space or repair it, and start again"
            ) from error
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close every file as it is, and release the lock. Call nothing after that."""
        self.journal.let_go()
        self.segments.close()
        for part in self.state.parts.sealed:
            part.close()
        self.state.parts.clear()
        self._lock.release()

    # --- while it runs ----------------------------------------------------------------------------------------

    def on_visible(self, callback: Callable[[set[str]], None]) -> None:
        self._visible_callbacks.append(callback)

    def on_placed(self, callback: Callable[[int, Mapping[str, int]], None]) -> None:
        self._placed_callbacks.append(callback)

    async def sync(self) -> None:
        await self.journal.sync()

    def tend(self, now_us: int) -> None:
        """Ripen checks; and look, once in LOOK_US, whether the log's directory is still where it was opened.

        What is written to a deleted file is synced without an error, and gone with the process; the next start would
        find nothing, or another directory, where this one was renamed or something was mounted over it.
        """
        if abs(now_us - self._looked_us) >= LOOK_US:
            self._looked_us = now_us
            if self.journal.failed is None and not self._lock.is_in_place():
                self.journal.fail(
                    StorageFailed(
                        f"the directory {self.disk.directory} is not the one that this server has opened: it was "
                        "deleted or renamed, or something was mounted over it. The server stops; put the directory "
                        "back before the next start, or restore a backup"
                    )
                )
        self._checks.ripen(now_us)

    async def begin_generation(self, generation: int, known_to_us: int) -> None:
        """Record that the log is a restored one from here on. Its queues continue after every offset that may be lost.

        `generation`: higher than that of any earlier log; `known_to_us`: when the last known record was written. Raises
        InvalidRequest otherwise, and if the last segment is not empty, because a gap must not be within a segment.
        """
        if generation <= self.state.generation:
            raise InvalidRequest(f"generation {generation} is not above that of the log, {self.state.generation}")
        if self.state.parts.live.count:
            raise InvalidRequest("a generation of a log begins with a segment of its own")
        self.journal.append_meta(Restored(generation, known_to_us))
        self.state.begin_generation(generation)
        await self.journal.sync()

    def complaints(self) -> list[str]:
        return [
            f"bytes {d.start} to {d.end} of segment {d.segment} were durable and are damaged; what is left of them is "
            f"in {d.copy or 'no file'}. `notify audit run` names the messages that are missing"
            for d in self.damages
            if not d.torn
        ]

    async def retain(self, now_us: int) -> int:
        """Drop expired segments, after moving what is still needed; returns how many.

        On a full disk it first deletes the ballast, because it must write before it drops a segment.
        """
        try:
            dropped = await self._retention.retain(now_us)
        except (DiskFull, OSError) as error:
            if isinstance(error, OSError) and error.errno not in NO_ROOM:
                raise
            if not self._ballast.drop():
                raise
            dropped = await self._retention.retain(now_us)
        self._ballast.take()
        return dropped

    async def snapshot(self, directory: Path) -> int:
        """Copy the log as it is now to a new directory on the same file system; returns the size in bytes.

        Raises StorageFailed if that fails; then nothing is left.
        """
        return await snapshot(self.disk.directory, self.segments, self.journal, directory)

    def begin_segment(self) -> int:
        """Have the open segment finished soon, if it is not empty; returns a position that ends all of it.

        Segments that could not be sealed are tried again. Raises DiskFull, Unavailable or StorageFailed.
        """
        position = self.journal.begin_segment()
        self._sealer.work(self.journal.durable)
        return position

    def behind(self, position: int) -> tuple[int, int]:
        """How many finished segments, and how many durable bytes, follow a position."""
        segments = self.segments.all()
        finished = sum(1 for segment in segments[:-1] if segment.base >= position)
        end = segments[-1].base if self.journal.is_blank else self.journal.durable
        return finished, max(0, end - max(position, segments[0].base))

    def verify(self) -> list[str]:
        """Read every frame; returns the damage in words. Call it in any thread."""
        return verify(self.disk, self.segments.all())

    # --- called by the journal --------------------------------------------------------------------------------

    def _durable(self, frame: Frame) -> None:
        """A frame is on the disk: its entries become visible."""
        if frame.entries:
            frame.part.publish(frame.entries, frame.queues, frame.delayed)
            for _, position, number in frame.delayed:
                self.state.times.published(frame.entries[number][0], position)
            placed = Counter(frame.queues)
            del placed[None]
            if self._placed_callbacks:
                self._report_placed(frame, placed)
            if topics := {queue.topic.name for queue in placed if queue is not None}:
                for callback in self._visible_callbacks:
                    callback(topics)
        # The next frame may already be on its way, and may be the last one of this part.
        following = self.journal.in_flight
        if frame.part is not self.journal.open.part and (following is None or frame.part is not following.part):
            frame.part.is_complete = True
        self._sealer.work(frame.base)

    def _report_placed(self, frame: Frame, placed: Counter[Queue | None]) -> None:
        """Report how many messages of each commit got into the queues of each topic. `placed`: those of the frame."""
        total = placed.total()
        for committed_us, first, end in frame.commits:
            queues = frame.queues[first:end]
            # Mostly these are all messages of the frame, which need not be counted again.
            its = placed if len(queues) - queues.count(None) == total else Counter(queues)
            counts: dict[str, int] = {}
            for queue, count in its.items():
                if queue is not None:
                    counts[queue.topic.name] = counts.get(queue.topic.name, 0) + count
            if counts:
                for callback in self._placed_callbacks:
                    callback(committed_us, counts)

    def _begin_segment(self, segment: Segment) -> OpenPart:
        return self._sealer.begin_segment(segment)

    def _failed(self, error: StorageFailed) -> None:
        log.critical("storage_failed", reason=str(error))
        if self._on_failure is not None:
            self._on_failure(error)
