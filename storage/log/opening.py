"""Opens a log: loads the newest checkpoint and the indexes of full segments, and replays everything after them."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from notify.errors import Corrupt
from notify.storage.log import checkpoint, index
from notify.storage.log.disk import Disk
from notify.storage.log.entry import ENTRY_SIZE
from notify.storage.log.format import SEGMENT_HEADER_SIZE
from notify.storage.log.open_part import OpenPart
from notify.storage.log.recovery import Damage, walk
from notify.storage.log.replay import Replay
from notify.storage.log.sealed import SealedPart
from notify.storage.log.sealer import seal, swap_in
from notify.storage.log.segments import Segment, Segments
from notify.storage.log.state import LogState

log = structlog.get_logger("notify.log")


@dataclass(slots=True)
class Opened:
    """The result of recovery: what it found when it opened the log."""

    end: int = 0
    """The position after the last valid frame, where writing continues."""
    checkpoint: int = 0
    """The position of the newest checkpoint; 0: there is none."""
    damages: list[Damage] = field(default_factory=list)
    written_us: int = 0
    """The time of the last frame, or of the newest checkpoint if no frame follows it."""


class Opening:
    """Opens one directory once: `run` fills an empty state from the log."""

    def __init__(self, disk: Disk, segments: Segments, state: LogState) -> None:
        self._disk = disk
        self._segments = segments
        self._state = state
        self._replay = Replay(state)
        self._opened = Opened()

    def run(self, now_us: int) -> Opened:
        """Raises Corrupt if the log cannot be read safely, OSError as the file system does."""
        opened, parts = self._opened, self._state.parts
        self._drop_unfinished()
        for complaint in self._segments.open_existing():
            self._set_aside(complaint)
        saved = checkpoint.load(self._disk)
        segments = self._segments.all()
        if saved is not None:
            opened.checkpoint, opened.written_us = saved.position, saved.time_us
            checkpoint.restore(self._state, saved.state)
        position = opened.checkpoint
        if segments and position < segments[0].base:
            raise Corrupt(
                f"the newest checkpoint is at {position}, and the log begins at {segments[0].base}: segments "
                "between them are missing; restore a backup"
            )
        if not segments:
            if saved is not None:
                raise Corrupt("there is a checkpoint but no segment: the log's files are missing; restore a backup")
            segments = [self._segments.create(0, now_us)]
        elif saved is None and segments[0].base != 0:
            raise Corrupt("the first segments are missing and there is no checkpoint; restore a backup")
        self._open_husks(segments[0].base)
        for segment, following in zip(segments, segments[1:], strict=False):
            segment.sealed_end = following.base
        opened.end = segments[0].base + SEGMENT_HEADER_SIZE
        for segment in segments:
            if segment.sealed_end and segment.sealed_end <= position:
                self._open_sealed(segment)
            else:
                self._apply(segment, position)
        self._drop_empty_tail()
        ahead = opened.end < position
        if ahead:
            self._note_lost_end(position)
        self._repair_torn_tail()
        if ahead:
            self._checkpoint_at_the_end(opened.end, now_us)
        elif (
            opened.checkpoint < self._segments.last.base
            and opened.end == self._segments.last.base + SEGMENT_HEADER_SIZE
        ):
            # The process ended just after it began this segment, whose checkpoint would now come only with the next
            # one's. Finished segments are shipped with a checkpoint.
            self._checkpoint_at_the_end(self._segments.last.base, now_us)
        parts.sealed_id_max = max((part.id_max for part in parts.sealed if part.count), default=0)
        live = [part for part in parts if isinstance(part, OpenPart)]
        for part, behind in zip(live, live[1:], strict=False):
            # It is sealed in the background, as if it had just become full.
            part.end = behind.base
            part.is_complete = True
            parts.being_sealed.append(part)
        if segments[0].base:
            if saved is not None and saved.state.dropped_to is None:
                self._state.dropped_to = segments[0].base  # an older version dropped segments without recording it
            self._find_starts()
        self._state.times.load()
        self._state.pending.bring_forward(now_us)
        return opened

    # --- files that are not valid segments --------------------------------------------------------------------

    def _drop_unfinished(self) -> None:
        for name in self._disk.names():
            if name.endswith(".tmp"):
                self._disk.unlink(name)

    def _set_aside(self, complaint: str) -> None:
        """Rename a file that is not a valid segment: its creation was interrupted, or it is damaged."""
        name = complaint.partition(":")[0]
        self._disk.rename(name, name + ".unreadable")
        log.error("segment_unreadable", complaint=complaint, kept_as=name + ".unreadable")
        self._opened.damages.append(Damage(name, 0, 0, torn=False, copy=name + ".unreadable"))

    # --- segments ---------------------------------------------------------------------------------------------

    def _open_husks(self, first_base: int) -> None:
        """Indexes of dropped segments whose unsettled messages were carried."""
        merged_to = 0
        for name in self._disk.names():
            if not name.endswith(".idx") or int(name.partition(".")[0]) >= first_base:
                continue
            part = SealedPart(self._disk, name)
            if part.base < merged_to:  # it was merged into the previous one just before the process ended
                part.close()
                self._disk.unlink(name)
                continue
            merged_to = part.end
            self._state.parts.append(part)

    def _open_sealed(self, segment: Segment) -> None:
        name = index.index_name(segment.base)
        try:
            self._state.parts.append(SealedPart(self._disk, name))
        except (OSError, ValueError) as error:
            log.warning("index_rebuilt", name=name, reason=str(error))
            part = OpenPart(segment.base)
            for frame in walk(self._disk, segment, 0, False, self._opened.damages):
                self._replay.index_only(part, frame.body)
            part.index()
            self._state.parts.append(part)
            seal(self._disk, self._segments, part, segment.sealed_end)
            swap_in(self._disk, self._state.parts, part)

    def _apply(self, segment: Segment, position: int) -> None:
        """Apply a segment's frames; frames before the checkpoint's position only fill the index."""
        opened = self._opened
        part = OpenPart(segment.base)
        self._state.parts.append(part)
        has_more = any(s.base > segment.base and self._has_frames(s) for s in self._segments.all())
        applied_from = 0
        for frame in walk(self._disk, segment, 0, not has_more, opened.damages):
            if frame.base < position:
                self._replay.index_only(part, frame.body)
                applied_from = len(part.entries) // ENTRY_SIZE
            else:
                self._replay.apply(part, frame.body)
                opened.written_us = frame.time_us
            opened.end = frame.end
        self._replay.indexed(part, applied_from)
        if not has_more:
            opened.end = max(opened.end, segment.base + SEGMENT_HEADER_SIZE)

    def _has_frames(self, segment: Segment) -> bool:
        return next(walk(self._disk, segment, 0, True, []), None) is not None

    def _find_starts(self) -> None:
        """Set the first retained offset of each queue after segments were dropped."""
        topics = self._state.topics_by_id.values()
        self._state.move_starts([queue for topic in topics for queue in topic.queues])

    # --- the end of the log -----------------------------------------------------------------------------------

    def _drop_empty_tail(self) -> None:
        """Remove an empty segment that was made just before a crash, after a torn frame: the previous one continues."""
        segments, opened = self._segments, self._opened
        while len(segments.all()) > 1 and not self._has_frames(segments.last):
            segment = segments.last
            before = segments.all()[-2]
            if opened.end == segment.base + SEGMENT_HEADER_SIZE and not any(d.torn for d in opened.damages):
                return
            self._state.parts.remove(self._state.parts.live)
            segments.remove(segment)
            before.sealed_end = 0

    def _note_lost_end(self, position: int) -> None:
        """Report that the log ends before its newest checkpoint: the part between them was durable, and is damaged."""
        torn = next((d for d in self._opened.damages if d.torn), None)
        if torn is not None:
            torn.torn = False
        else:
            name, end = self._segments.last.name, self._opened.end
            self._opened.damages.append(Damage(name, end, position, torn=False))

    def _repair_torn_tail(self) -> None:
        """Copy the bytes after the last valid frame aside, then cut them; reserved but unused space is cut silently."""
        disk, end = self._disk, self._opened.end
        for damage in self._opened.damages:
            if damage.copy:
                continue
            where = self._segments.at(damage.start)
            assert where is not None
            data = disk.read(where.fd, damage.end - damage.start, damage.start - where.base)
            kind = "torn" if damage.torn else "damaged"
            damage.copy = f"{damage.start:020d}.{kind}"
            disk.replace(damage.copy, [data.rstrip(b"\0") if damage.torn else data])
            report = log.warning if damage.torn else log.error
            report(f"log_{kind}", segment=damage.segment, start=damage.start, end=damage.end, kept_as=damage.copy)
        segment = self._segments.last
        if disk.size(segment.fd) > end - segment.base:
            disk.truncate(segment.fd, end - segment.base)
            disk.sync(segment.fd)

    def _checkpoint_at_the_end(self, end: int, now_us: int) -> None:
        """Take a checkpoint where the log ends now. A checkpoint ahead of it would hide later appends, because a start
        applies only what follows the newest checkpoint."""
        data = checkpoint.encoded(checkpoint.capture(self._state)(), end, now_us)
        self._disk.replace(checkpoint.checkpoint_name(end), [data])
        for name in checkpoint.names_behind(self._disk, end):
            self._disk.unlink(name)
        self._disk.sync_directory()
        self._opened.checkpoint = end
