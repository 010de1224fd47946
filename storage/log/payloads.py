"""Payloads: reading them back by the positions that entries name, the neighbours of one queue together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from notify.storage.log.entry import ENTRY, FLAG_TTL, Entry, place_of
from notify.storage.log.format import crc32c
from notify.storage.log.queues import Queue
from notify.storage.log.segments import Segments
from notify.storage.log.state import LogState
from notify.storage.records import StoredMessage

READ_AHEAD_BYTES = 1 << 20
READ_GAP_BYTES = 16 << 10
"""Between two payloads of one read: copying so much costs as much as another call to the system."""


class _Ttl(msgspec.Struct):
    """The part of a payload that says when it expires."""

    ttl: float = 0


_decode_ttl = msgspec.msgpack.Decoder(_Ttl).decode


class Payloads:
    """Read through the segment files, and checked."""

    def __init__(self, state: LogState, segments: Segments) -> None:
        self._state = state
        self._segments = segments
        self.corrupt = 0
        """How many did not have their checksum."""

    def read(self, position: int, size: int, crc: int) -> bytes | None:
        """A payload, None where the bytes are not on the disk yet or not what was written."""
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
        """Entries of one queue with their payloads: as many as fit, and one at least. Reads of neighbours are one."""
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

    def _where_it_is_now(self, entry: Entry) -> Entry:
        """An entry with the position of its payload, which may have been carried out of a dropped segment."""
        if entry.position >= self._segments.first_base:
            return entry
        return entry._replace(position=self._state.moved.get(entry.position, entry.position))

    def _reach(self, rows: Sequence[tuple[Any, ...]], first: int) -> int:
        """How far one read goes that starts at a row's payload: over neighbours with small gaps, within bounds."""
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
    """When a message expires, 0 for never: by its topic's TTL or its own, whichever is shorter."""
    if flags & FLAG_TTL and payload:
        own_us = round(_decode_ttl(payload).ttl * 1_000_000)
        ttl_us = min(ttl_us, own_us) if ttl_us else own_us
    return committed_us + ttl_us if ttl_us else 0
