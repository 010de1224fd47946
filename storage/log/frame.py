"""A frame from its first record until it is on the disk: one group commit."""

from __future__ import annotations

import asyncio

from notify.storage.log.entry import EntryKind, message_key_of
from notify.storage.log.open_part import OpenPart
from notify.storage.log.queues import Queue
from notify.storage.log.segments import Segment


class Frame:
    """Records on their way to the disk, and the futures that wait for them."""

    __slots__ = (
        "_by_message",
        "_indexed",
        "base",
        "chunks",
        "commits",
        "delayed",
        "entries",
        "handed_over",
        "is_handed_over",
        "part",
        "points",
        "queues",
        "records",
        "segment",
        "waiters",
        "written",
    )

    def __init__(self, base: int, segment: Segment, part: OpenPart) -> None:
        self.base = base
        self.segment = segment
        self.part = part
        self.chunks: list[bytes] = []
        self.records = 0
        self.entries: list[bytes] = []
        self.queues: list[Queue | None] = []
        self.delayed: list[tuple[int, int, int]] = []
        """(due, payload position, number of the entry in this frame) of messages that are delayed."""
        self._by_message: tuple[dict[bytes, bytes], dict[bytes, bytes]] = ({}, {})
        self._indexed = 0
        self.commits: list[tuple[int, int, int]] = []
        """(time of a commit, first and end of the numbers of its entries in this frame)."""
        self.waiters: list[asyncio.Future[None]] = []
        self.handed_over: list[asyncio.Future[None]] = []
        """Futures that wait only until the operating system has the frame."""
        self.is_handed_over = False
        self.points: set[str] = set()
        self.written = b""
        """Its bytes, once they are on their way to the disk."""

    def delayed_of(self, key: bytes, following: list[bytes]) -> tuple[bytes, bytes]:
        """The last entries here of a message (`message_key`) as delayed and as withdrawn; each empty if there is none.

        `following`: the entries of the record that is appended next. They are indexed by message when one is first
        asked for, and from then on only those that are new.
        """
        count = len(self.entries)
        while self._indexed < len(self.delayed):
            place = self.delayed[self._indexed][2]
            if place >= count + len(following):
                break
            raw = self.entries[place] if place < count else following[place - count]
            self._by_message[raw[0] == EntryKind.WITHDRAWN][message_key_of(raw)] = raw
            self._indexed += 1
        delayed, withdrawn = self._by_message
        return delayed.get(key, b""), withdrawn.get(key, b"")
