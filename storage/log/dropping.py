"""Drops a segment: moves its needed payloads first, and keeps its index if entries in it are still looked up."""

from __future__ import annotations

import asyncio

import numpy as np
import structlog
from numpy.typing import NDArray

from notify.storage import crash_point
from notify.storage.log import index
from notify.storage.log.checkpoints import Checkpoints
from notify.storage.log.disk import Disk
from notify.storage.log.entry import EntryKind
from notify.storage.log.rewrite import Rewriter
from notify.storage.log.sealed import SealedPart
from notify.storage.log.sealer import Sealer
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState

log = structlog.get_logger("notify.log")


class Dropper:
    """Drops segments one by one."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        state: LogState,
        carrier: Rewriter,
        checkpoints: Checkpoints,
        sealer: Sealer,
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._state = state
        self._carrier = carrier
        self._checkpoints = checkpoints
        self._sealer = sealer

    async def drop(self, part: SealedPart, live: NDArray[np.bool_], now_us: int, keep_ids: bool) -> None:
        """`live`: the entries of it that are needed. With `keep_ids` all its ids are found as before."""
        carried = await self._carrier.carry(part, live, now_us)
        await self._sealer.idle()
        self._state.dropped_to = part.end  # durable with the checkpoint, which comes before the segment is deleted
        await self._checkpoints.take()
        if keep_ids or live.any():
            entries = part.entries.copy()
            if keep_ids:
                # Its ids can still be looked up; only its messages in queues are gone.
                entries["kind"][~live & (entries["kind"] == EntryKind.QUEUE)] = EntryKind.GONE
            else:
                entries = entries[live]
            data = index.build(entries.tobytes(), part.base, part.end)
            await asyncio.to_thread(self._disk.replace, part.name, data)
            self._state.parts.replace(part, SealedPart(self._disk, part.name, is_fresh=True))
        else:
            self._state.parts.remove(part)
            self._disk.unlink(part.name)
        crash_point.reached("retention.before_unlink")
        self._segments.remove(self._segments.begun_at(part.base))
        self._disk.sync_directory()
        self._state.move_starts_of(part.runs["key"].tolist())
        log.info("segment_dropped", base=part.base, carried=carried, kept_entries=int(live.sum()))
