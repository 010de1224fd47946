"""Taking from the tables what the binlog no longer has: what was not moved, by its time; then on from now.

Tables and position are read in one snapshot: what committed before it is in the tables, what commits after it is in the
binlog behind the position, and nothing is in neither. Which rows a bridge has moved, no row says. The
position that the queue keeps says when it was written, and whatever was written longer before that than a transaction
stays open lies behind it. What was written between is sent again, and the queue knows it by its id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime

from sqlalchemy.engine import Connection, Engine

from notify.binlog_bridge import source
from notify.binlog_bridge.position import Position
from notify.binlog_bridge.refusals import Readable
from notify.outbox import present
from notify.pages import cut, readable
from notify.refused import Refusal
from notify.wire import Bridged, PackedBridgeBatch, instant

log = logging.getLogger("notify.bridge")

TRANSACTIONS = 500
BATCH_BYTES = 2 << 20
LONGEST_TRANSACTION_US = 3_600_000_000
"""A transaction that stayed open for longer after its row was written, and was cut off by the loss of the binlog, is
taken for one that was moved: then give the time from which on to look."""


async def backfill(
    engine: Engine,
    post: Callable[[PackedBridgeBatch], Awaitable[Bridged]],
    note: Callable[[list[Refusal]], Awaitable[None]],
    epoch: int,
    position: str,
    since_us: int | None = None,
) -> int:
    """Send what was not moved, then set the position to where the source was; how many transactions were sent.

    `post` appends a batch, `note` lists those whose rows are no message. `position`: where the queue stands.
    `since_us`: from when on to look, by the source's clock; None: from there.
    """
    if since_us is None:
        known = Position.of(position)
        since_us = max(0, known.newest_us - LONGEST_TRANSACTION_US) if known is not None and known.newest_us else 0
    if since_us:
        log.warning("what was written before %s is taken for moved", instant(since_us))
    snapshot = Snapshot(engine)
    sent = 0
    try:
        behind = await asyncio.to_thread(snapshot.open)
        pages = snapshot.pages(since_us)
        while (page := await asyncio.to_thread(next, pages, None)) is not None:
            some, unreadable = page
            await note(unreadable)
            if some:
                await post(
                    PackedBridgeBatch(epoch=epoch, expected_position=position, position=position, transactions=some)
                )
            sent += len(some)
    finally:
        await asyncio.to_thread(snapshot.close)
    await post(PackedBridgeBatch(epoch=epoch, expected_position=position, position=behind.text))
    log.warning("backfilled %d transactions; going on from %s", sent, behind.gtids)
    return sent


class Snapshot:
    """The tables of a source as they were at one moment."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None

    def open(self) -> Position:
        """Begin; the position behind everything that is in it. Raises InvalidRequest where the source cannot say it."""
        self._connection = self._engine.connect()
        return source.begin_snapshot(self._connection)

    def pages(self, since_us: int) -> Iterator[Readable]:
        """Transactions that wait and were written since then, the oldest first, a request's worth at a time."""
        assert self._connection is not None
        since = datetime.fromtimestamp(since_us / 1e6, UTC).replace(tzinfo=None)
        for outbox in present(self._engine):
            behind = None
            while places := outbox.oldest(self._connection, TRANSACTIONS, outbox.at >= since, behind):
                behind = places[-1]
                for page in cut(places, BATCH_BYTES):
                    yield readable(self._connection, outbox, [place.id for place in page])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.rollback()
            self._connection.close()
