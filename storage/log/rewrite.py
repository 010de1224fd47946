"""Moves the payloads that are still needed out of a segment before it is dropped, by writing them again.

CARRY records, and every later checkpoint, map old positions to new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from notify.storage.log.entry import ENTRY_HEAD, ENTRY_SIZE, ENTRY_TAIL, EntryKind, Fixed, table_of, tail_of
from notify.storage.log.format import crc32c
from notify.storage.log.journal import Journal
from notify.storage.log.open_part import OpenPart
from notify.storage.log.parts import Part
from notify.storage.log.payloads import Payloads
from notify.storage.log.records import RecordType
from notify.storage.log.sealed import SealedPart
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState
from notify.storage.log.times import FOR_EVER_US

CARRY_BYTES = 4 << 20
CARRY_ENTRIES = 10_000

Places = dict[int, tuple[int, int]]
"""Payload position to (size, CRC32C)."""


class Load(NamedTuple):
    """A payload to move: its position as entries name it, its current position, its size and CRC32C."""

    position: int
    now_at: int
    size: int
    crc: int


def still_delayed(state: LogState, part: Part) -> list[int]:
    """The numbers of a part's delayed entries."""
    return [row[2] for row in part.delayed_after(*state.times.released, FOR_EVER_US, 1 << 32)]


class Rewriter:
    """Moves payloads out of one segment after another."""

    def __init__(self, state: LogState, segments: Segments, journal: Journal, payloads: Payloads) -> None:
        self._state = state
        self._segments = segments
        self._journal = journal
        self._payloads = payloads

    async def carry(self, part: SealedPart, live: NDArray[np.bool_], now_us: int) -> int:
        """Write again, durably, what is needed of a part's segment; returns how many payloads.

        `live`: which of the part's own entries are needed. Others may point into its segment too.
        """
        loads = await self._loads(part, live)
        batch: list[tuple[Load, bytes]] = []
        batch_bytes = 0
        for load in loads:
            payload = self._segments.read(load.now_at, load.size)
            if len(payload) != load.size or crc32c(payload) != load.crc:
                self._payloads.corrupt += 1
                continue
            batch.append((load, payload))
            batch_bytes += load.size
            if batch_bytes >= CARRY_BYTES or len(batch) >= CARRY_ENTRIES:
                self._append(batch, now_us)
                batch, batch_bytes = [], 0
                await self._journal.sync()
        if batch:
            self._append(batch, now_us)
        await self._journal.sync()
        return len(loads)

    def _append(self, batch: list[tuple[Load, bytes]], now_us: int) -> None:
        journal = self._journal
        journal.reserve(4096 + sum(load.size + ENTRY_SIZE for load, _ in batch))
        at = journal.data_position(len(batch))
        entries = []
        for load, _ in batch:
            head = ENTRY_HEAD.pack(EntryKind.CARRY, 0, 0, 0, now_us, load.position)  # its offset is the old position
            entries.append(head + ENTRY_TAIL.pack(at, load.size, 0, 0, 0, bytes(16), 0, load.crc, 0))
            # Readers find the payload in the old segment until that is deleted, so this need not be durable yet.
            self._state.moved[load.position] = at
            at += load.size
        journal.append(RecordType.CARRY, b"".join([payload for _, payload in batch]), entries, point="carry")

    async def _loads(self, part: SealedPart, live: NDArray[np.bool_]) -> list[Load]:
        low, high = part.base, part.end
        state = self._state
        scanned = [other for other in state.parts.sealed if other is not part]
        places: Places = await asyncio.to_thread(_places_below, scanned, high)
        # Later changes are in the parts that were open then, and among the pending and delayed messages.
        for other in state.parts:
            if isinstance(other, OpenPart):
                places |= _below(table_of(bytes(other.entries)), high)
            elif not (other in scanned or other is part):
                places |= _below(other.entries, high)
        places |= _below(part.entries[live], high)
        for frame in self._journal.on_their_way():
            # Decided or released, but not in a part yet: the frame is on its way to the disk.
            if frame.entries:
                places |= _below(table_of(b"".join(frame.entries)), high)
        for fixed in self._undecided_and_delayed():
            if fixed.position < high:
                places[fixed.position] = (fixed.size, fixed.payload_crc)
        state.moved = {old: new for old, new in state.moved.items() if old in places}
        loads = []
        for position, (size, crc) in places.items():
            now_at = position if position >= low else state.moved.get(position, position)
            if low <= now_at < high:
                loads.append(Load(position, now_at, size, crc))
        return loads

    def _undecided_and_delayed(self) -> list[Fixed]:
        state = self._state
        tails = [tail_of(entry) for pending in state.pending.by_id.values() for entry in pending.entries]
        tails += [tail_of(entry) for _, entry in state.times.unpublished.values()]
        tails += state.withdrawals.tails()
        for part in state.parts:
            tails += [tail_of(part.delayed_entry(number)) for number in still_delayed(state, part)]
        return [Fixed.of(tail) for tail in tails]


def _places_below(parts: Iterable[SealedPart], high: int) -> Places:
    places: Places = {}
    for part in parts:
        if part.lowest_payload() < high:
            places |= _below(part.entries, high)
    return places


def _below(entries: NDArray[Any], high: int) -> Places:
    """Payloads below a position that queue entries point at."""
    chosen = entries[(entries["kind"] == EntryKind.QUEUE) & (entries["position"] < np.uint64(high))]
    pairs = zip(chosen["size"].tolist(), chosen["payload_crc"].tolist(), strict=True)
    return dict(zip(chosen["position"].tolist(), pairs, strict=True))
