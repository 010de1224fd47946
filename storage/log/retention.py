"""Dropping segments whose time or room is over, without losing what still waits in them.

A segment expires when each topic in it has no more use for it: its last record is older than the topic keeps messages
(counted from the commit), or newer segments hold as many bytes as the topic keeps. The server may bound the log as a
whole, too. Ids are kept for the server's retention in any case. Live payloads are carried first (carry.py): those of
undecided and delayed messages, of messages that a subscribed group has not settled, of dead letters (unless their topic
has a retention of its own, or they were sent again), and of messages committed later than their half. The segment goes
only after a checkpoint behind that is durable. Its index stays where entries in it are still needed: a husk.
"""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import structlog
from numpy.typing import NDArray

from notify.errors import Unavailable
from notify.storage import crash_point
from notify.storage.log import index
from notify.storage.log.carry import Carrier
from notify.storage.log.checkpoints import Checkpoints
from notify.storage.log.disk import Disk
from notify.storage.log.entry import EntryKind
from notify.storage.log.journal import Journal
from notify.storage.log.needed import Needed
from notify.storage.log.sealed import SealedPart
from notify.storage.log.sealer import Sealer
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState
from notify.storage.log.topics import Topics

log = structlog.get_logger("notify.log")

MOST_CARRIED_SHARE = 0.5
"""A segment with a larger share to be written again is not dropped for want of room: little room would be won."""
MOST_HUSKS = 16


class Retention:
    """Drops what is over, the oldest first."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        state: LogState,
        journal: Journal,
        topics: Topics,
        carrier: Carrier,
        checkpoints: Checkpoints,
        sealer: Sealer,
        keep_us: int,
        most_bytes: int,
    ) -> None:
        """`keep_us` 0 keeps messages for ever, `most_bytes` 0 whatever room they take."""
        self._disk = disk
        self._segments = segments
        self._state = state
        self._parts = state.parts
        self._journal = journal
        self._topics = topics
        self._carrier = carrier
        self._checkpoints = checkpoints
        self._sealer = sealer
        self._needed = Needed(state)
        self._keep_us = keep_us
        self._most_bytes = most_bytes

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        """Another retention from now on."""
        self._keep_us, self._most_bytes = retention_us, retention_bytes

    async def retain(self, now_us: int) -> int:
        """Drop every segment whose time or room is over; how many there were.

        What is carried is looked at by the next call: each ends. Raises Unavailable where the log stays above its bound
        of bytes, since carrying would free little.
        """
        self._trim_by_size()
        self._drop_settled_husks(now_us)
        await self._merge_husks(now_us)
        dropped = 0
        newest = self._segments.last.base
        while (part := self._oldest()) is not None and part.base < newest:
            is_due = self._is_due(part, now_us)
            log_bytes = self._journal.end - part.base
            if not is_due and not (self._most_bytes and log_bytes > self._most_bytes):
                break
            live = self._needed.mask(part, await self._needed.letters(part))
            if not is_due:  # there is only no room for it
                waiting = int(part.entries["size"][live].sum())
                if waiting > MOST_CARRIED_SHARE * (part.end - part.base):
                    raise Unavailable(
                        f"the log takes {log_bytes:,} bytes, its bound is {self._most_bytes:,}, and {waiting:,} of the "
                        f"{part.end - part.base:,} bytes of its oldest segment wait for consumers: let them catch up, "
                        "or raise retention_bytes"
                    )
            await self._drop(part, live, now_us, keep_ids=not self._is_old(part, now_us))
            dropped += 1
        return dropped

    def _trim_by_size(self) -> None:
        """Topics with a bound of bytes keep their newest segments' worth of it, and what a group has not settled."""
        groups = self._needed.groups_by_topic()
        for topic in list(self._state.topics.values()):
            most = topic.policy.retention_bytes
            for queue in topic.queues if most else ():
                kept = 0
                start = queue.start
                for part in reversed(list(self._parts)):
                    if kept >= most:
                        break
                    first = part.first_offset(queue.key)
                    if first is not None:
                        kept += part.bytes_of(queue.key)
                        start = first
                if kept < most:
                    continue
                for group in groups.get(topic.id, ()):
                    start = min(start, self._state.group_progress(group, topic.id, queue.number).floor)
                self._topics.trim(topic.name, queue.number, start)

    # --- which segments ---------------------------------------------------------------------------------------

    def _oldest(self) -> SealedPart | None:
        """The index of the oldest segment; None for the live one, and for one that is not sealed yet."""
        first = self._segments.first_base
        part = next((part for part in self._parts if part.base == first), None)
        return part if isinstance(part, SealedPart) else None

    def _is_old(self, part: SealedPart, now_us: int) -> bool:
        """Whether the time for which ids are kept is over for all of a part."""
        return bool(self._keep_us) and part.time_max + self._keep_us <= now_us

    def _is_due(self, part: SealedPart, now_us: int) -> bool:
        """Whether the time of everything in a part is over."""
        if not len(part.runs) and not self._is_old(part, now_us):
            return False
        return all(self._is_over(part, run, now_us) for run in part.runs)

    def _is_over(self, part: SealedPart, run: np.void, now_us: int) -> bool:
        """Whether nothing of a queue's run needs to be kept for those who might still ask for it."""
        topic = self._state.topics_by_id.get(int(run["key"]) >> 16)
        if topic is None or topic.deleted:
            return True
        last = int(part.entries["offset"][int(run["first_entry"]) + int(run["count"]) - 1])
        if last < topic.queues[int(run["key"]) & 0xFFFF].start:
            return True
        keep_us = topic.policy.retention_us or self._keep_us
        return bool(keep_us) and part.time_max + keep_us <= now_us

    # --- dropping one -----------------------------------------------------------------------------------------

    async def _drop(self, part: SealedPart, live: NDArray[np.bool_], now_us: int, keep_ids: bool) -> None:
        carried = await self._carrier.carry(part, live, now_us)
        await self._sealer.idle()
        await self._checkpoints.take()
        if keep_ids or live.any():
            entries = part.entries.copy()
            if keep_ids:
                # Its ids are still looked for: only what was in queues is gone.
                entries["kind"][~live & (entries["kind"] == EntryKind.QUEUE)] = EntryKind.GONE
            else:
                entries = entries[live]
            data = index.build(entries.tobytes(), part.base, part.end)
            await asyncio.to_thread(self._disk.replace, part.name, data)
            self._parts.replace(part, SealedPart(self._disk, part.name, is_fresh=True))
        else:
            self._parts.remove(part)
            self._disk.unlink(part.name)
        crash_point.reached("retention.before_unlink")
        segment = self._segments.at(part.base)
        assert segment is not None
        assert segment.base == part.base
        self._segments.remove(segment)
        self._disk.sync_directory()
        self._move_starts(part)
        log.info("segment_dropped", base=part.base, carried=carried, kept_entries=int(live.sum()))

    def _move_starts(self, part: SealedPart) -> None:
        """The queues that had messages there begin later now."""
        keys = part.runs["key"].tolist()
        topics = [self._state.topics_by_id.get(key >> 16) for key in keys]
        self._state.move_starts([t.queues[key & 0xFFFF] for t, key in zip(topics, keys, strict=True) if t is not None])

    # --- husks ------------------------------------------------------------------------------------------------

    def _husks(self) -> list[SealedPart]:
        """Indexes of dropped segments, kept for messages that were carried, and for ids before their time; oldest
        first."""
        first = self._segments.first_base
        return [part for part in self._parts.sealed if part.base < first]

    async def _merge_husks(self, now_us: int) -> None:
        """Make one of many husks: dead letters may keep one of every segment, and each takes a file that is open."""
        # Up to the first whose ids are still looked for: the one that is made of them covers all between the ends.
        husks = list(itertools.takewhile(lambda part: self._is_old(part, now_us), self._husks()))
        if len(husks) <= MOST_HUSKS:
            return
        live = [part.entries[self._needed.mask(part, await self._needed.letters(part))] for part in husks]
        kept, *others = husks
        data = index.build(np.concatenate(live).tobytes(), kept.base, husks[-1].end)
        await asyncio.to_thread(self._disk.replace, kept.name, data)
        # From here on a start passes over the others: they lie within the one that was made of them.
        self._parts.replace(kept, SealedPart(self._disk, kept.name, is_fresh=True))
        for part in others:
            self._parts.remove(part)
            self._disk.unlink(part.name)

    def _drop_settled_husks(self, now_us: int) -> None:
        for part in self._husks():
            if not self._is_old(part, now_us) or self._needed.has_letters(part):
                continue
            if not self._needed.mask(part, np.zeros(part.count, bool)).any():
                self._parts.remove(part)
                self._disk.unlink(part.name)
                self._move_starts(part)
