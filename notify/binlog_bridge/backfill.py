"""A backfill: sends messages from the tables that the log no longer has; then the bridge continues with the log.

Tables and position are read in one snapshot. A transaction that committed before the snapshot is in the tables, and one
that commits later is in the log after the position, so that no transaction is missed. The rows do not say whether a
bridge has moved them. But the queue's position has a time: rows that are older than it by more than a transaction may
stay open were moved. Rows after that may be sent a second time, and the queue recognises their ids.

For a target that knows no ids, each page is stored with the progress of the backfill (`Filling`). A backfill that was
interrupted continues in a new snapshot, without the transactions that committed since the first snapshot. The bridge
reads those in the end from the log, since it continues after the first snapshot's position.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.binlog_bridge.errors import Purged
from notify.binlog_bridge.kinds import position_of
from notify.binlog_bridge.log import DatabaseLog, LogSnapshot, Position
from notify.binlog_bridge.read_ahead import ReadAhead
from notify.binlog_bridge.scope import Scope
from notify.binlog_bridge.unfinished import Filling
from notify.client.tables.definitions import notify_refused
from notify.client.tables.outbox import Outbox, Place
from notify.errors import InvalidRequest
from notify.movers import refused
from notify.movers.outbox import present
from notify.movers.pages import cut, readable
from notify.movers.refused import Refusal
from notify.protocol.wire import Bridged, BridgedTransaction, PackedBridgeBatch, instant
from notify.runtime.databases import has_table, within_schema
from notify.runtime.threads import in_thread

log = logging.getLogger("notify.binlog_bridge")

TRANSACTIONS = 500
LONGEST_TRANSACTION_US = 3_600_000_000
"""The longest time that a transaction may stay open after its row was written. A longer one whose part of the log is
lost is assumed to be moved, unless the operator gives an earlier start of the backfill."""


class Backfill:
    """One attempt to send messages from a source's tables to a target."""

    def __init__(
        self,
        engine: Engine,
        log_of_source: DatabaseLog,
        epoch: int,
        post: Callable[[PackedBridgeBatch], Awaitable[Bridged]],
        note: Callable[[list[Refusal]], Awaitable[None]],
        reading: Callable[[Position], ReadAhead],
        scope: Scope,
        most_bytes: Callable[[], int],
    ) -> None:
        """`log_of_source`: the source's log. `epoch`: the bridge's epoch. `post` appends a batch; `note` lists
        transactions whose rows are not a message;
        `reading` reads the log from a position on; `scope`: the source's schemas. `most_bytes` tells how large
        batches become."""
        self._engine = engine
        self._log = log_of_source
        self._epoch = epoch
        self._post = post
        self._note = note
        self._reading = reading
        self._scope = scope
        self._most_bytes = most_bytes

    async def run(self, position: str, since_us: int | None = None) -> str:
        """Send unmoved messages to a target that knows ids, then set its position to that of the snapshot.

        Returns the new position. `position`: the queue's position. `since_us`: the time from which rows are sent, by
        the source's clock; None: LONGEST_TRANSACTION_US before the time of the queue's position.
        """
        snapshot = Snapshot(self._engine, self._log, self._scope, self._most_bytes)
        try:
            end = await in_thread(snapshot.open)
            if since_us is None:
                moved = position_of(position)
                newest_us = moved.newest_us if moved is not None else 0
                # A future time is useless: the source's clock was set back, or an older bridge stored it.
                since_us = max(0, newest_us - LONGEST_TRANSACTION_US) if newest_us <= end.newest_us else 0
            await self._send(snapshot, position, Filling(since_us, end), set(), noted=False)
        finally:
            await in_thread(snapshot.close)
        await self._post(PackedBridgeBatch(self._epoch, position, end.text))
        return end.text

    async def run_noted(self, position: str, since_us: int | None = None) -> str:
        """`run` for a target that knows no ids: continues an attempt that was interrupted, if there is one.

        With another `since_us` than that attempt it starts over. Raises InvalidRequest if `since_us` is needed, Purged
        if the log no longer has the transactions since the first attempt.
        """
        filling = Filling.of(position)
        if filling is None and position and since_us is None:
            raise InvalidRequest(
                "--backfill to Kafka would publish again what was written in the hour before the position, since Kafka "
                "knows no ids: say with --backfill-from from which instant on nothing was published"
            )
        if filling is not None and since_us not in (None, filling.since_us):
            filling = None
        snapshot = Snapshot(self._engine, self._log, self._scope, self._most_bytes)
        try:
            end = await in_thread(snapshot.open)
            if filling is not None:
                log.warning("the backfill from %s on was interrupted, and continues", instant(filling.since_us))
            filling = filling or Filling(since_us or 0, end)
            in_both = await self._overlap(filling.goes_on, snapshot.until)
            position = await self._send(snapshot, position, filling, in_both, noted=True)
        finally:
            await in_thread(snapshot.close)
        await self._post(PackedBridgeBatch(self._epoch, position, filling.goes_on.text))
        return filling.goes_on.text

    async def _overlap(self, begin: Position, until: Position) -> set[str]:
        """Ids of the transactions that both the log after `begin` and a snapshot at `until` have."""
        if begin.reaches(until):
            return set()
        try:
            return await overlap(self._reading(begin), until)
        except Purged as error:
            raise Purged(
                "a backfill of this source was interrupted, and the source no longer has the transactions since then: "
                "it cannot continue. Start with --backfill-from another instant; everything written from then on is "
                "published, even if the target has it already"
            ) from error

    async def _send(
        self, snapshot: Snapshot, position: str, filling: Filling, left_out: set[str], *, noted: bool
    ) -> str:
        """Send the pages of a snapshot without the transactions in `left_out`; the position of the last page.

        `noted`: whether each page stores the backfill's progress as its position; else the position stays unchanged.
        """
        if filling.since_us:
            log.warning("what was written before %s is assumed to be moved", instant(filling.since_us))
        sent = 0
        pages = snapshot.pages(filling)
        while (page := await in_thread(next, pages, None)) is not None:
            await self._note([refusal for refusal in page.unreadable if refusal.id not in left_out])
            transactions = [t for t in page.transactions if t.id not in left_out]
            if transactions:
                next_position = filling.behind(page.table, page.end).text if noted else position
                await self._post(PackedBridgeBatch(self._epoch, position, next_position, transactions=transactions))
                position = next_position
            sent += len(transactions)
        log.warning("backfilled %d transactions; continuing from %s", sent, filling.goes_on.shown)
        return position


class Page(NamedTuple):
    """Transactions of a table, those whose rows are not a message, and the last transaction's place. `table` has the
    schema before its name if the source has several."""

    table: str
    transactions: list[BridgedTransaction]
    unreadable: list[Refusal]
    end: Place


class Snapshot:
    """The tables of a source at one moment."""

    def __init__(self, engine: Engine, log_of_source: DatabaseLog, scope: Scope, most_bytes: Callable[[], int]) -> None:
        self._engine = engine
        self._log = log_of_source
        self._scope = scope
        self._most_bytes = most_bytes
        self._schemas: list[str] = []
        self._opened: LogSnapshot | None = None

    @property
    def until(self) -> Position:
        """A position after all transactions in the snapshot."""
        assert self._opened is not None
        return self._opened.until

    def open(self) -> Position:
        """Begin the snapshot; a position that has no transactions before it that the snapshot lacks.

        Raises Unfit if the source does not tell the position.
        """
        with self._engine.connect() as connection:
            self._schemas = self._scope.schemas(connection)  # before the snapshot, which lacks later tables
        self._opened = self._log.snapshot(self._engine)
        return self._opened.position

    def pages(self, filling: Filling) -> Iterator[Page]:
        """Transactions that a backfill has not sent yet, the oldest first, in pages that fit into a request.

        Refused transactions that an operator wants to retry are left out: they are sent from the list.
        """
        assert self._opened is not None
        connection = self._opened.connection
        since = datetime.fromtimestamp(filling.since_us / 1e6, UTC).replace(tzinfo=None)
        tables: list[tuple[str, str, Outbox, bool]] = []
        for schema in self._schemas:
            engine = within_schema(self._engine, schema)
            has_list = has_table(engine, notify_refused.name)
            before = f"{schema}." if self._scope.is_many else ""
            tables += [(before + outbox.table.name, schema, outbox, has_list) for outbox in present(engine)]
        while filling.table and tables and tables[0][0] != filling.table:
            tables = tables[1:]
        last = filling.place
        for name, schema, outbox, has_list in tables:
            connection.execution_options(schema_translate_map={None: schema})
            wanted = outbox.at >= since
            if has_list:
                wanted = sa.and_(wanted, outbox.table.c.transaction_id.not_in(refused.retried))
            while places := outbox.oldest(connection, TRANSACTIONS, wanted, last):
                last = places[-1]
                for page in cut(places, self._most_bytes()):
                    messages = readable(connection, outbox, [place.id for place in page])
                    yield Page(name, *messages, page[-1])
            last = None

    def close(self) -> None:
        if self._opened is not None:
            self._opened.connection.rollback()
            self._opened.connection.close()


MOST_SHARED = 1_000_000
"""The most ids of transactions in both log and snapshot that are held in memory, 150 bytes each."""


async def overlap(reading: ReadAhead, until: Position) -> set[str]:
    """The ids of the transactions that the log has up to a position, which a snapshot of the tables has too. Closes the
    reading.

    Raises the errors of the reading, and InvalidRequest for more than MOST_SHARED ids.
    """
    transaction_ids: set[str] = set()
    try:
        while True:
            read = await reading.next()
            if read is None:
                if reading.caught_up_us:
                    return transaction_ids
                continue
            batch, _ = read
            transaction_ids.update(t.id for t in batch.transactions)
            if len(transaction_ids) > MOST_SHARED:
                raise InvalidRequest(
                    f"more than {MOST_SHARED:,} transactions committed since the backfill was cut off: it cannot "
                    "continue; start with --backfill-from another instant; everything written from then on is "
                    "published, even if the target has it already"
                )
            reached = position_of(batch.position)
            if reached is not None and reached.reaches(until):
                return transaction_ids
    finally:
        await reading.close()
