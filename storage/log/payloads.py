"""Reads payloads at the positions that entries name; neighbours in one queue are read together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from notify.storage.log.entry import ENTRY, FLAG_TTL, Entry, place_of, table_of
from notify.storage.log.format import crc32c
from notify.storage.log.queues import Queue
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState
from notify.storage.message_run import CommitTimes, MessageRun, encoded_run, total_of
from notify.storage.records import StoredMessage

READ_AHEAD_BYTES = 1 << 20
READ_GAP_BYTES = 16 << 10
"""The largest gap between two payloads of one read: copying this much costs as much as another system call."""


# RUN_HEAD of notify/protocol/wire.py, as an array.
_RUN_HEAD = np.dtype([("id_high", ">u8"), ("id_low", ">u8"), ("message_no", ">u2"), ("time_us", ">u8")])


class _Ttl(msgspec.Struct):
    """The part of a payload that says when it expires."""

    ttl: float = 0


_decode_ttl = msgspec.msgpack.Decoder(_Ttl).decode


class Payloads:
    """Reads payloads from the segment files and checks them."""

    def __init__(self, state: LogState, segments: Segments) -> None:
        self._state = state
        self._segments = segments
        self.corrupt = 0
        """How many payloads failed their checksum."""

    def read(self, position: int, size: int, crc: int) -> bytes | None:
        """A payload; None if its bytes are not on the disk yet, or damaged."""
        if position < self._segments.first_base:
            position = self._state.moved.get(position, position)
        payload = self._segments.read(position, size)
        return payload if len(payload) == size and crc32c(payload) == crc else None

    def message(self, raw: bytes) -> StoredMessage:
        """One entry with its payload."""
        entry = Entry.of(raw)
        topic = self._state.topics_by_id.get(entry.topic)
        payload = self.read(entry.position, entry.size, entry.payload_crc)
        return StoredMessage(
            topic.name if topic is not None else f"#{entry.topic}",
            entry.queue,
            entry.offset,
            entry.transaction_id,
            entry.message_no,
            entry.time_us,
            payload or b"",
            entry.tag_hash,
            payload is None,
            entry.key_hash,
        )

    def messages(self, queue: Queue, entries: bytes, max_bytes: int) -> list[StoredMessage]:
        """Entries of one queue with their payloads: at least one, and as many as fit. Neighbours are read together."""
        segments = self._segments
        rows = list(ENTRY.iter_unpack(entries))
        if self._state.moved:
            rows = [self._where_it_is_now(Entry._make(row)) for row in rows]
        messages: list[StoredMessage] = []
        name, number = queue.topic.name, queue.number
        window, window_at, window_end = b"", 0, 0
        total = 0
        ttl_us = queue.topic.policy.ttl_us
        for i, row in enumerate(rows):
            (_, flags, _, _, time_us, offset, position, size, no, _, _, transaction_id, tag_hash, crc, key_hash) = row
            total += size
            if total > max_bytes and messages:
                break
            if not (window_at <= position and position + size <= window_end):
                recent = segments.recent(position, size)
                if recent is not None:
                    window_at, window = recent
                    window_end = window_at + len(window)
                else:
                    window_at, window_end = position, self._reach(rows, i)
                    window = segments.read(window_at, window_end - window_at)
            start = position - window_at
            payload = window[start : start + size]
            corrupt = len(payload) != size or crc32c(payload) != crc
            if corrupt:
                self.corrupt += 1
                payload = b""
            expires_us = _expiry(flags, time_us, payload, ttl_us) if ttl_us or flags else 0
            messages.append(
                StoredMessage(
                    name, number, offset, transaction_id, no, time_us, payload, tag_hash, corrupt, key_hash, expires_us
                )
            )
        return messages

    def run(self, queue: Queue, entries: bytes, offset: int, max_bytes: int) -> MessageRun | None:
        """Entries of one queue from an offset on with their payloads, as `messages` reads them, in one run.

        None if some are missing or damaged, have their own TTL, or are in a dropped segment: then call `messages`.
        """
        table = table_of(entries)
        sizes, positions = table["size"].astype(np.int64), table["position"].astype(np.int64)
        total = sizes.cumsum()
        if not len(table) or int(positions[0]) < self._segments.first_base:
            return None
        if total[-1] > max_bytes:
            count = max(1, int(np.searchsorted(total, max_bytes, side="right")))
            table, sizes, positions = table[:count], sizes[:count], positions[:count]
        count = len(table)
        ends = positions + sizes
        gaps = positions[1:] - ends[:-1]
        offsets = table["offset"]
        if (
            int(offsets[0]) != offset
            or int(offsets[-1]) != offset + count - 1
            or (count > 1 and gaps.min() < 0)
            or (table["flags"] & FLAG_TTL).any()
        ):
            return None
        payloads = self._neighbours(positions, ends, np.flatnonzero(gaps > READ_GAP_BYTES) + 1)
        if list(map(crc32c, payloads)) != table["payload_crc"].tolist():
            return None
        ttl_us = queue.topic.policy.ttl_us
        expires_us = int(table["time_us"].min()) + ttl_us if ttl_us else 0
        heads = np.empty(count, _RUN_HEAD)
        for name in _RUN_HEAD.fields or ():
            heads[name] = table[name]
        encoded = encoded_run(queue.number, [(offset, count)], heads.tobytes(), count, payloads)
        times_us = array("Q", table["time_us"].tobytes())
        times = CommitTimes(times_us, total_of(times_us))
        return MessageRun(offset, count, int(total[count - 1]), expires_us, encoded, times)

    def _neighbours(
        self, positions: NDArray[np.int64], ends: NDArray[np.int64], after_gaps: NDArray[np.intp]
    ) -> list[bytes]:
        """Payloads in order of position, which begin and end there. `after_gaps`: the numbers of those after a gap
        that is not read."""
        segments = self._segments
        payloads: list[bytes] = []
        i, count = 0, len(positions)
        while i < count:
            start = int(positions[i])
            recent = segments.recent(start, int(ends[i]) - start)
            if recent is not None:
                at, window = recent
                until = int(np.searchsorted(ends, at + len(window), side="right"))
            else:
                following = segments.following(start)
                reach = start + READ_AHEAD_BYTES if following is None else min(following, start + READ_AHEAD_BYTES)
                until = max(i + 1, int(np.searchsorted(ends, reach, side="right")))
                gap = int(np.searchsorted(after_gaps, i, side="right"))
                if gap < len(after_gaps):
                    until = min(until, int(after_gaps[gap]))
                at, window = start, segments.read(start, int(ends[until - 1]) - start)
            begins, stops = (positions[i:until] - at).tolist(), (ends[i:until] - at).tolist()
            payloads += [window[a:b] for a, b in zip(begins, stops, strict=True)]
            i = until
        return payloads

    def _where_it_is_now(self, entry: Entry) -> Entry:
        """An entry with the position of its payload, which may have been carried out of a dropped segment."""
        if entry.position >= self._segments.first_base:
            return entry
        return entry._replace(position=self._state.moved.get(entry.position, entry.position))

    def _reach(self, rows: Sequence[tuple[Any, ...]], first: int) -> int:
        """The end of a read that starts at a row's payload: over neighbours with small gaps, within bounds."""
        start, size = place_of(rows[first])
        end = start + size
        segment = self._segments.at(start)
        if segment is None:
            return end
        for i in range(first + 1, len(rows)):
            position, size = place_of(rows[i])
            if not end <= position <= end + READ_GAP_BYTES or position + size - start > READ_AHEAD_BYTES:
                break
            if self._segments.at(position) is not segment:
                break
            end = position + size
        return end


def _expiry(flags: int, committed_us: int, payload: bytes, ttl_us: int) -> int:
    """When a message expires, by its topic's TTL or its own, whichever is shorter; 0: never."""
    if flags & FLAG_TTL and payload:
        own_us = round(_decode_ttl(payload).ttl * 1_000_000)
        ttl_us = min(ttl_us, own_us) if ttl_us else own_us
    return committed_us + ttl_us if ttl_us else 0
