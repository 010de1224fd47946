"""A frame while records are gathered in it and until it is on the disk: one group commit."""

from __future__ import annotations

import asyncio

from notify.storage.log.open_part import OpenPart
from notify.storage.log.queues import Queue
from notify.storage.log.segments import Segment


class Frame:
    """Records on their way to the disk, and who waits for them."""

    __slots__ = (
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
        self.commits: list[tuple[int, int, int]] = []
        """(time of a commit, first and end of the numbers of its entries in this frame)."""
        self.waiters: list[asyncio.Future[None]] = []
        self.handed_over: list[asyncio.Future[None]] = []
        """Who waits until the operating system has it, and no longer."""
        self.is_handed_over = False
        self.points: set[str] = set()
        self.written = b""
        """Its bytes, once they are on their way to the disk."""
