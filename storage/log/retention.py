"""Drops expired segments without losing messages that still wait in them.

A segment expires when no topic in it needs it any more: its last record is older than the topic keeps messages
(counted from the commit), or newer segments hold as many bytes as the topic keeps. The server may bound the log as a
whole, too. Ids are kept for the server's retention in any case. Live payloads are carried first (rewrite.py): those of
undecided, delayed and unsettled messages, of dead letters (unless their topic
has a retention of its own, or they were redriven), and of messages committed later than their half. The segment is
deleted after a later checkpoint is durable. Its index stays while entries in it are needed (orphan_indexes.py).
"""

from __future__ import annotations

import numpy as np

from notify.errors import Unavailable
from notify.storage.log.dropping import Dropper
from notify.storage.log.journal import Journal
from notify.storage.log.needed import Needed
from notify.storage.log.orphan_indexes import OrphanIndexes
from notify.storage.log.sealed import SealedPart
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState
from notify.storage.log.topics import Topics

MOST_CARRIED_SHARE = 0.5
"""A segment with a larger share to move is not dropped to free space, because it would free little."""


class Retention:
    """Drops expired segments, the oldest first."""

    def __init__(
        self,
        state: LogState,
        segments: Segments,
        journal: Journal,
        topics: Topics,
        dropper: Dropper,
        husks: OrphanIndexes,
    ) -> None:
        """Keeps everything until `keep` is called."""
        self._state = state
        self._segments = segments
        self._journal = journal
        self._topics = topics
        self._dropper = dropper
        self._husks = husks
        self._needed = Needed(state)
        self._keep_us = 0
        self._most_bytes = 0
        self._held_from: int | None = None

    def hold_from(self, position: int | None) -> None:
        """Drop no segment that ends after a position; None: any segment may be dropped."""
        self._held_from = position

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        """Change the retention; 0: no bound in time, or in bytes."""
        self._keep_us, self._most_bytes = retention_us, retention_bytes

    async def retain(self, now_us: int) -> int:
        """Drop every expired segment; returns how many.

        Moved payloads are considered by the next call, so each call ends. Raises Unavailable if the log stays above its
        bound of bytes because moving payloads would free little.
        """
        self._trim_by_size()
        if self._keep_us:
            self._husks.drop_settled(now_us - self._keep_us)
            await self._husks.merge(now_us - self._keep_us)
        dropped = 0
        newest = self._segments.last.base
        while (part := self._oldest()) is not None and part.base < newest:
            if self._held_from is not None and part.end > self._held_from:
                break
            is_due = self._is_due(part, now_us)
            log_bytes = self._journal.end - part.base
            if not is_due and not (self._most_bytes and log_bytes > self._most_bytes):
                break
            live = self._needed.mask(part, await self._needed.letters(part))
            if not is_due:  # it is dropped only to free space
                waiting = int(part.entries["size"][live].sum())
                if waiting > MOST_CARRIED_SHARE * (part.end - part.base):
                    raise Unavailable(
                        f"the log takes {log_bytes:,} bytes, its bound is {self._most_bytes:,}, and {waiting:,} of the "
                        f"{part.end - part.base:,} bytes of its oldest segment wait for consumers: let them catch up, "
                        "or raise retention_bytes"
                    )
            await self._dropper.drop(part, live, now_us, keep_ids=not self._is_old(part, now_us))
            dropped += 1
        return dropped

    def _trim_by_size(self) -> None:
        """Topics with a bound in bytes keep that many of their newest bytes, and unsettled messages."""
        groups = self._needed.groups_by_topic()
        for topic in list(self._state.topics.values()):
            most = topic.policy.retention_bytes
            for queue in topic.queues if most else ():
                kept = 0
                start = queue.start
                for part in reversed(list(self._state.parts)):
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
        """The index of the oldest segment; None if it is open or not sealed yet."""
        first = self._segments.first_base
        part = next((part for part in self._state.parts if part.base == first), None)
        return part if isinstance(part, SealedPart) else None

    def _is_old(self, part: SealedPart, now_us: int) -> bool:
        """Whether the retention of ids is over for all of a part."""
        return bool(self._keep_us) and part.time_max + self._keep_us <= now_us

    def _is_due(self, part: SealedPart, now_us: int) -> bool:
        """Whether the retention of everything in a part is over."""
        if not len(part.runs) and not self._is_old(part, now_us):
            return False
        return all(self._is_over(part, run, now_us) for run in part.runs)

    def _is_over(self, part: SealedPart, run: np.void, now_us: int) -> bool:
        """Whether the topic's retention no longer needs a queue's run."""
        topic = self._state.topics_by_id.get(int(run["key"]) >> 16)
        if topic is None or topic.deleted:
            return True
        last = int(part.entries["offset"][int(run["first_entry"]) + int(run["count"]) - 1])
        if last < topic.queues[int(run["key"]) & 0xFFFF].start:
            return True
        keep_us = topic.policy.retention_us or self._keep_us
        return bool(keep_us) and part.time_max + keep_us <= now_us
