"""`notify topic tail` finds the newest messages also where offsets have gaps, with few requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import pytest

from notify.cli.tail import _messages
from notify.client import AsyncReader, ReceivedMessage
from notify.client.consumer.reader import QueueBounds

GENERATION = 2**32
"""How far the offsets of a log continue that was restored from a store."""


class Queue:
    """Stands for a reader of one queue whose messages have these offsets; restores left the others free."""

    def __init__(self, offsets: Sequence[int], end: int) -> None:
        self.offsets, self.end = offsets, end
        self.reads = 0

    async def shards(self) -> Sequence[str]:
        return []

    async def bounds(self, topic: str, *, shard: str | None = None) -> dict[int, QueueBounds]:
        starts, ends = [0, *(offset + 1 for offset in self.offsets)], [*self.offsets, self.end]
        gaps = [(first, end) for first, end in zip(starts, ends, strict=True) if first < end]
        return {0: QueueBounds(0, 0, self.end, gaps)}

    async def read(
        self, topic: str, queue: int = 0, *, offset: int = 0, shard: str | None = None
    ) -> AsyncGenerator[ReceivedMessage, None]:
        self.reads += 1
        for at in self.offsets:
            if at >= offset:
                yield ReceivedMessage("i", topic, queue, at, b"", None, None, {}, 1, f"{at:020}")


def newest(queue: Queue, last: int) -> list[int]:
    async def read() -> list[int]:
        reader = cast(AsyncReader, queue)
        return [message.offset async for _, message in _messages(reader, "t", last, False)]

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("offsets", "last", "shown"),
    [
        ([], 3, []),
        ([0, 1], 3, [0, 1]),
        ([0, 1, 2, 3], 3, [1, 2, 3]),
        ([0, 1, GENERATION], 3, [0, 1, GENERATION]),
        ([0, 1, GENERATION, GENERATION + 1], 3, [1, GENERATION, GENERATION + 1]),
        ([0, 1, 7 * GENERATION], 2, [1, 7 * GENERATION]),
    ],
)
def test_the_newest_messages_are_shown(offsets: list[int], last: int, shown: list[int]) -> None:
    assert newest(Queue(offsets, offsets[-1] + 1 if offsets else 0), last) == shown


def test_messages_before_the_gap_of_a_restored_log_are_shown() -> None:
    """The end of the gap was looked for by halving it, with a request for each step."""
    queue: Any = Queue(range(3), GENERATION)
    assert newest(queue, 10) == [0, 1, 2]
    assert queue.reads == 1


@pytest.mark.parametrize(
    ("start", "gaps", "spans"),
    [
        (0, [], [(0, 9)]),
        (9, [], []),
        (0, [(2, 5)], [(0, 2), (5, 9)]),
        (3, [(2, 5)], [(5, 9)]),
        (5, [(2, 5)], [(5, 9)]),
        (1, [(0, 3), (4, 9)], [(3, 4)]),
    ],
)
def test_spans_are_what_is_retained_between_gaps(
    start: int, gaps: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    assert QueueBounds(0, start, 9, gaps).spans() == spans
