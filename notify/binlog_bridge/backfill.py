"""Taking from the tables what the binlog no longer has: what was not moved, by its time; then on from now.

Tables and position are read in one snapshot: what committed before it is in the tables, what commits after it is in the
binlog behind the position, and nothing is in neither. Which rows a bridge has moved, no row says. The
position that the queue keeps says when it was written, and whatever was written longer before that than a transaction
stays open lies behind it. What was written between is sent again, and the queue knows it by its id.

A target that knows no ids keeps with each page how far the backfill is (`Filling`). One that was cut off goes on in a
new snapshot, without what committed since the first one: that is in the binlog behind the first one's position, from
where the bridge goes on in the end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify import refused
from notify.binlog_bridge import source
from notify.binlog_bridge.history import Purged
from notify.binlog_bridge.overlap import overlap
from notify.binlog_bridge.position import Position, reaches
from notify.binlog_bridge.read_ahead import ReadAhead
from notify.binlog_bridge.unfinished import Filling
from notify.client.table import notify_refused
from notify.errors import InvalidRequest
from notify.outbox import Place, present
from notify.pages import cut, readable
from notify.refused import Refusal
from notify.threads import in_thread
from notify.wire import Bridged, BridgedTransaction, PackedBridgeBatch, instant

log = logging.getLogger("notify.bridge")

TRANSACTIONS = 500
BATCH_BYTES = 2 << 20
LONGEST_TRANSACTION_US = 3_600_000_000
"""A transaction that stayed open for longer after its row was written, and was cut off by the loss of the binlog, is
taken for one that was moved: then give the time from which on to look."""


class Backfill:
    """One attempt to fill a target from the tables of a source."""

    def __init__(
        self,
        engine: Engine,
        epoch: int,
        post: Callable[[PackedBridgeBatch], Awaitable[Bridged]],
        note: Callable[[list[Refusal]], Awaitable[None]],
        reading: Callable[[Position], ReadAhead],
    ) -> None:
        """`epoch`: the bridge's. `post` appends a batch, `note` lists those whose rows are no message, `reading` reads
        the binlog from a position on."""
        self._engine = engine
        self._epoch = epoch
        self._post = post
        self._note = note
        self._reading = reading

    async def run(self, position: str, since_us: int | None = None) -> str:
        """Send what was not moved to a target that knows ids, then set its position to where the source was; that.

        `position`: where the queue stands. `since_us`: from when on to look, by the source's clock; None: from there.
        """
        snapshot = Snapshot(self._engine)
        try:
            behind = await in_thread(snapshot.open)
            if since_us is None:
                known = Position.of(position)
                newest_us = known.newest_us if known is not None else 0
                # A time to come says nothing: the source's clock was set back since, or an older bridge noted it.
                since_us = max(0, newest_us - LONGEST_TRANSACTION_US) if newest_us <= behind.newest_us else 0
            await self._send(snapshot, position, Filling(since_us, behind), set(), noted=False)
        finally:
            await in_thread(snapshot.close)
        await self._post(PackedBridgeBatch(self._epoch, position, behind.text))
        return behind.text

    async def run_noted(self, position: str, since_us: int | None = None) -> str:
        """The same for a target that knows no ids: it goes on where the last attempt was cut off, if one was.

        With another `since_us` than that one's it begins anew. Raises InvalidRequest where `since_us` is needed, Purged
        where the binlog does not tell any more what committed since the first attempt.
        """
        filling = Filling.of(position)
        if filling is None and position and since_us is None:
            raise InvalidRequest(
                "--backfill to Kafka would publish again what was written in the hour before the position, since Kafka "
                "knows no ids: say with --backfill-from from which instant on nothing was published"
            )
        if filling is not None and since_us not in (None, filling.since_us):
            filling = None
        snapshot = Snapshot(self._engine)
        try:
            behind = await in_thread(snapshot.open)
            if filling is not None:
                log.warning("the backfill from %s on was cut off, and goes on", instant(filling.since_us))
            filling = filling or Filling(since_us or 0, behind)
            both = await self._overlap(filling.goes_on, snapshot.until)
            position = await self._send(snapshot, position, filling, both, noted=True)
        finally:
            await in_thread(snapshot.close)
        await self._post(PackedBridgeBatch(self._epoch, position, filling.goes_on.text))
        return filling.goes_on.text

    async def _overlap(self, behind: Position, until: Position) -> set[str]:
        """Ids that the binlog has behind a position, and a snapshot at another one has, too."""
        if reaches(behind.gtids, until.gtids):
            return set()
        try:
            return await overlap(self._reading(behind), until)
        except Purged as error:
            raise Purged(
                "a backfill of this source was cut off, and the source does not have any more what committed since: it "
                "cannot go on. Start with --backfill-from another instant; what was written from then on is "
                "published, also what the target has already"
            ) from error

    async def _send(
        self, snapshot: Snapshot, position: str, filling: Filling, left_out: set[str], *, noted: bool
    ) -> str:
        """Send the pages of a snapshot; the position of the last.

        `noted`: whether each has a position that says how far the backfill is. The others keep the one that there is.
        """
        if filling.since_us:
            log.warning("what was written before %s is taken for moved", instant(filling.since_us))
        sent = 0
        pages = snapshot.pages(filling)
        while (page := await in_thread(next, pages, None)) is not None:
            await self._note([refusal for refusal in page.unreadable if refusal.id not in left_out])
            some = [t for t in page.transactions if t.id not in left_out]
            if some:
                stands = filling.behind(page.table, page.end).text if noted else position
                await self._post(PackedBridgeBatch(self._epoch, position, stands, transactions=some))
                position = stands
            sent += len(some)
        log.warning("backfilled %d transactions; going on from %s", sent, filling.goes_on.gtids)
        return position


class Page(NamedTuple):
    """Transactions of a table, those of them whose rows are no message, and where the next page begins."""

    table: str
    transactions: list[BridgedTransaction]
    unreadable: list[Refusal]
    end: Place


class Snapshot:
    """The tables of a source as they were at one moment."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self.until: Position
        """Behind everything that is in it."""

    def open(self) -> Position:
        """Begin; a position behind nothing that is not in it. Raises InvalidRequest where the source cannot say it."""
        self._connection = self._engine.connect()
        behind = source.begin_snapshot(self._connection)
        self.until = behind if source.is_mariadb(self._connection) else source.current_position(self._connection)
        return behind

    def pages(self, filling: Filling) -> Iterator[Page]:
        """Transactions that a backfill has not sent yet, the oldest first, a request's worth at a time.

        Without those of the list of refused messages that are to be tried again: they are sent from there.
        """
        assert self._connection is not None
        since = datetime.fromtimestamp(filling.since_us / 1e6, UTC).replace(tzinfo=None)
        has_list = sa.inspect(self._engine).has_table(notify_refused.name)
        tables = present(self._engine)
        while filling.table and tables and tables[0].table.name != filling.table:
            tables = tables[1:]
        behind = filling.place
        for outbox in tables:
            wanted = outbox.at >= since
            if has_list:
                wanted = sa.and_(wanted, outbox.table.c.transaction_id.not_in(refused.retried))
            while places := outbox.oldest(self._connection, TRANSACTIONS, wanted, behind):
                behind = places[-1]
                for page in cut(places, BATCH_BYTES):
                    messages = readable(self._connection, outbox, [place.id for place in page])
                    yield Page(outbox.table.name, *messages, page[-1])
            behind = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.rollback()
            self._connection.close()
