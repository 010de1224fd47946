"""Reads a range of a queue's offsets: from the server, and what it no longer has from the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from notify.errors import NotFound
from notify.spark.messages.columns import of_pulled
from notify.spark.messages.options import Options
from notify.spark.messages.server import MOST_PULLED, Server, TopicState
from notify.spark.messages.shipped import ShippedMessages

log = logging.getLogger("notify.spark")

DATA_LOSS = "data_loss"


class Piece(InputPartition):
    """The offsets [first, end) of one queue: what one task reads."""

    def __init__(self, topic: str, number: int, queue: int, first: int, end: int, known: int) -> None:
        """`number`: the topic's; `known`: below it offsets may be missing because retention left them out."""
        super().__init__(f"{topic}/{queue}[{first},{end})")
        self.topic, self.number, self.queue = topic, number, queue
        self.first, self.end, self.known = first, end, known


def lost(topic: str, queue: int, first: int, end: int, has_store: bool) -> NotFound:
    """The error for messages that existed and cannot be found any more."""
    where = "neither the server nor the store has" if has_store else "the server no longer has"
    what = f"offset {first}" if end == first + 1 else f"offsets {first} to {end - 1}"
    return NotFound(
        f"{where} {what} of queue {queue} of topic {topic!r}: retention dropped them before they were read, or they "
        "cannot be read. Name the store that the server ships to (option store), give the topic a longer retention, "
        "or set failOnDataLoss to false to continue without them",
        DATA_LOSS,
        410,
    )


def made_anew(topic: str, number: int, now: int) -> NotFound:
    """The error for a topic that is not the one that the offsets are of."""
    return NotFound(
        f"topic {topic!r} was deleted and recreated (it was number {number}, now it is {now}): its offsets begin at 0 "
        "again. Begin with another checkpointLocation, or set failOnDataLoss to false to read the new topic from its "
        "beginning",
        DATA_LOSS,
        410,
    )


def cut(topic: str, queue: int, at: int, end: int) -> NotFound:
    """The error for a queue that ends before what was read of it."""
    return NotFound(
        f"queue {queue} of topic {topic!r} ends at {end}, and was read up to {at}: its server has another log, or was "
        "restored without its last messages. Begin with another checkpointLocation, or set failOnDataLoss to false to "
        f"continue at {end}",
        DATA_LOSS,
        410,
    )


class Reading:
    """Reads pieces, in a worker. Use it in a `with` statement."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._open = ExitStack()
        self._server = self._open.enter_context(closing(Server(options)))
        self._store: ShippedMessages | None = None

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def rows(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """The messages of a piece in order, as rows of columns.BASE. Raises NotFound where some are lost."""
        at = piece.first
        while at < piece.end:
            pulled = self._server.pull(piece.topic, piece.queue, at, min(piece.end - at, MOST_PULLED))
            if pulled is None:
                start = self._state(piece).bounds.get(piece.queue, (piece.end, 0))[0]
                end = min(max(start, at + 1), piece.end)
                # It existed when the query was planned, unless it was to come from the store.
                yield from self._elsewhere(piece, at, end, piece.known if self._options.store else 0)
                at = end
                continue
            messages, following = pulled
            if following <= at:  # the server has nothing from here on any more
                following = piece.end
            messages = [m for m in messages if m.offset < piece.end]
            following = min(following, piece.end)
            if messages:
                batch = of_pulled(messages, piece.number)
                yield from self._filled(piece, at, following, batch)
            else:
                yield from self._elsewhere(piece, at, following, piece.known)
            at = following
        # Numbers rise, so one that is the same afterwards has never changed.
        self._state(piece)

    def _state(self, piece: Piece) -> TopicState:
        state = self._server.topic(piece.topic)
        if state.number != piece.number:
            raise made_anew(piece.topic, piece.number, state.number)
        return state

    def _filled(self, piece: Piece, first: int, end: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """A batch of [first, end), with what is missing in it from the store."""
        for row, following, (a, b) in gaps(batch, first, end):
            if following > row:
                yield batch.slice(row, following - row)
            if b > a:
                yield from self._elsewhere(piece, a, b, piece.known)

    def _elsewhere(self, piece: Piece, first: int, end: int, known: int) -> Iterator[pa.RecordBatch]:
        """Messages of [first, end) that the server does not have.

        Raises NotFound for those from `known` on that are lost.
        """
        at = first
        if self._options.store:
            for batch in self._shipped().rows(piece.topic, piece.number, piece.queue, first, end):
                offsets = batch.column("offset")
                for row, following, (a, b) in gaps(batch, at, int(offsets[-1].as_py()) + 1):
                    if following > row:
                        yield batch.slice(row, following - row)
                    self._miss(piece, max(a, known), b)
                at = int(offsets[-1].as_py()) + 1
        self._miss(piece, max(at, known), end)

    def _miss(self, piece: Piece, first: int, end: int) -> None:
        if first >= end:
            return
        error = lost(piece.topic, piece.queue, first, end, bool(self._options.store))
        if self._options.fails_on_loss:
            raise error
        log.warning("%s", error)

    def _shipped(self) -> ShippedMessages:
        if self._store is None:
            self._store = self._open.enter_context(closing(ShippedMessages(self._options)))
        return self._store


def gaps(batch: pa.RecordBatch, first: int, end: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """The runs of a batch without a gap, each as its rows [a, b) and the missing offsets after it.

    `batch` holds offsets of [first, end), which rise. What is missing in front of its first row comes behind no row.
    """
    offsets = batch.column("offset").to_numpy()
    yield 0, 0, (first, int(offsets[0]))
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(offsets)]
    for a, b in zip(starts, ends, strict=True):
        yield a, b, (int(offsets[b - 1]) + 1, int(offsets[b]) if b < len(offsets) else end)
