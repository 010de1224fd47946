"""Deletes rows of a service's outbox that a bridge has moved.

The rows do not say whether they were moved, but the queue's position does. First rows are read, then the end of the
source's log; once the bridge has reached that end, it has moved those rows. Rows on the list of refused messages
stay.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.sql import ColumnElement

from notify.binlog_bridge.kinds import end_of_log, foreign_to, position_of
from notify.binlog_bridge.log import Position
from notify.binlog_bridge.unfinished import Filling, is_of_relay
from notify.client.tables.definitions import PURGES, half_message, is_waiting, notify_refused, notify_source
from notify.client.tables.old_rows import delete_transactions, instant_before, note_purged
from notify.errors import Forbidden, InvalidRequest, NotFound, Unavailable, WrongRole
from notify.movers.outbox import source_name
from notify.movers.sinks.sink import Sink, open_sink
from notify.runtime.databases import has_table
from notify.runtime.guarantees import verify
from notify.runtime.schemas import by_key
from notify.runtime.threads import in_thread

log = logging.getLogger("notify.binlog_bridge")

BATCH = 1000
WAIT_SECONDS = 30.0
"""How long to wait for the bridge; an idle bridge writes its position every 10 s."""
LOOK_SECONDS = 0.2


async def purge_moved(engine: Engine, url: str, *, older_than: float, name: str | None = None) -> int:
    """Delete outbox rows older than `older_than` seconds that a bridge has moved to `url`; the number of rows.

    `name`: the source's name that the bridge was given; by default the schema's source id.

    It is 0 if no bridge has written for this database's source, or this user may not read the position. Raises
    Unavailable if the bridge has not moved the rows after WAIT_SECONDS, InvalidRequest if its position is from another
    history.
    """
    sink = open_sink(url)
    rows = 0
    try:
        if name is None:
            name = await in_thread(_source, engine)
        cutoff = await in_thread(_instant_before, engine, older_than)
        while True:
            transaction_ids, end = await in_thread(_old, engine, cutoff)
            if not transaction_ids or not await _has_passed(sink, name, end, engine):
                return rows
            rows += await in_thread(_delete, engine, transaction_ids, cutoff)
            if len(transaction_ids) < BATCH:
                return rows
    except (Forbidden, NotFound, WrongRole) as error:
        log.info("rows that a bridge moved are not purged: %s", error)
        return rows
    finally:
        await sink.close()


async def _has_passed(sink: Sink, name: str, end: Position, engine: Engine) -> bool:
    """Wait until the bridge has read up to `end`; False if there is no bridge."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        text = await sink.position(name)
        if is_of_relay(text):
            return False  # a relay marks what it has moved
        if Filling.of(text) is not None:
            raise Unavailable(f"a backfill of source {name!r} is under way: purge when it is done")
        position = position_of(text)
        if position is None:
            return False
        await in_thread(_check_history, engine, position)
        if position.reaches(end):
            return True
        if time.monotonic() > until:
            raise Unavailable(
                f"the bridge of source {name!r} stands at {position.shown}, and the log ends at "
                f"{end.shown}: is it running? Nothing that it has not read was deleted"
            )
        await asyncio.sleep(LOOK_SECONDS)


def _check_history(engine: Engine, position: Position) -> None:
    """Raises InvalidRequest if the source's own log contradicts the position."""
    with engine.connect() as connection:
        end = foreign_to(connection, position)
        if end is not None:
            raise InvalidRequest(
                f"the queue stands at {position.shown} for this source, whose log has another history (it ends at "
                f"{end.shown}): start the bridge with --backfill first"
            )


def _source(engine: Engine) -> str:
    with engine.connect() as connection:
        verify(connection, PURGES)
        return source_name(connection)


def _instant_before(engine: Engine, seconds: float) -> datetime:
    with engine.connect() as connection:
        return instant_before(connection, seconds)


def _old(engine: Engine, cutoff: datetime) -> tuple[list[str], Position]:
    """Ids of waiting rows from before an instant, without those on the list; and the end of the log after that."""
    columns = half_message.c
    with engine.connect() as connection:
        wanted = sa.select(columns.transaction_id).where(
            is_waiting,
            columns.message_no == 0,
            columns.created_at < cutoff,
            _is_not_listed(connection),
        )
        transaction_ids = [
            str(transaction_id)
            for transaction_id in connection.scalars(wanted.order_by(columns.created_at).limit(BATCH))
        ]
        return transaction_ids, end_of_log(connection)


def _delete(engine: Engine, transaction_ids: list[str], cutoff: datetime) -> int:
    with engine.begin() as connection:
        note_purged(connection, notify_source.c.rows_from, cutoff)
        # Since the rows were read, the bridge may have listed one of them, and an operator may want it retried.
        columns = half_message.c
        waiting = sa.select(columns.transaction_id).where(
            is_waiting, columns.message_no == 0, columns.transaction_id.in_(transaction_ids), _is_not_listed(connection)
        )
        return delete_transactions(
            connection, [str(name) for name in connection.scalars(by_key(waiting.with_for_update(), half_message))]
        )


def _is_not_listed(connection: Connection) -> ColumnElement[bool]:
    """The SQL condition for rows that are not on the list of refused messages."""
    if not has_table(connection, notify_refused.name):
        return sa.true()
    return half_message.c.transaction_id.not_in(sa.select(notify_refused.c.transaction_id))
