"""Deleting rows of a service's outbox that a bridge has moved.

No row says that it was moved. The queue's position does: rows are read, then where the source's binlog ends; once the
bridge stands there or behind it, it has passed those rows. What no queue took is on the list of refused messages, and
stays.
"""

from __future__ import annotations

import asyncio
import logging
import time

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.sql import ColumnElement

from notify.binlog_bridge import source
from notify.binlog_bridge.position import MariaDbSet, Position, parse
from notify.binlog_bridge.unfinished import Filling
from notify.client.old_rows import delete_transactions, instant_before, note_purged
from notify.client.table import half_message, is_waiting, notify_refused, notify_source
from notify.errors import Forbidden, InvalidRequest, NotFound, Unavailable, WrongRole
from notify.outbox import source_name
from notify.sinks.sink import Sink, open_sink
from notify.threads import in_thread

log = logging.getLogger("notify.bridge")

BATCH = 1000
WAIT_SECONDS = 30.0
"""A bridge that has nothing to do notes its position every 10 s."""
LOOK_SECONDS = 0.2


async def purge_moved(engine: Engine, url: str, *, older_than: float) -> int:
    """Delete outbox rows older than `older_than` seconds that a bridge has moved to `url`; how many rows.

    0 where no bridge has written for this database's source, or this user may not ask. Raises Unavailable where the
    bridge has not read so far after half a minute, InvalidRequest where its position is of another history.
    """
    sink = open_sink(url)
    rows = 0
    try:
        name = await in_thread(_source, engine)
        while True:
            names, end = await in_thread(_old, engine, older_than)
            if not names or not await _has_passed(sink, name, end, engine):
                return rows
            rows += await in_thread(_delete, engine, names, older_than)
            if len(names) < BATCH:
                return rows
    except (Forbidden, NotFound, WrongRole) as error:
        log.info("rows that a bridge moved are not purged: %s", error)
        return rows
    finally:
        await sink.close()


async def _has_passed(sink: Sink, name: str, end: str, engine: Engine) -> bool:
    """Wait until the bridge has read up to `end`; False where there is no bridge."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        text = await sink.position(name)
        if Filling.of(text) is not None:
            raise Unavailable(f"a backfill of source {name!r} is under way: purge when it is done")
        known = Position.of(text)
        if known is None:
            return False
        await in_thread(_check_history, engine, known)
        if parse(known.gtids).reaches(end):
            return True
        if time.monotonic() > until:
            raise Unavailable(
                f"the bridge of source {name!r} stands at {known.gtids}, and the binlog ends at {end}: is it running? "
                "Nothing was deleted that it has not read"
            )
        await asyncio.sleep(LOOK_SECONDS)


def _check_history(engine: Engine, known: Position) -> None:
    """Raises InvalidRequest for a position that the source's own binlog contradicts."""
    with engine.connect() as connection:
        now = source.current_position(connection).gtids
        is_foreign = not parse(now).reaches(known.gtids)
        if not is_foreign and source.is_mariadb(connection) and known.server == _server_id(connection):
            here = connection.execute(sa.select(sa.func.binlog_gtid_pos(known.file, known.offset))).scalar()
            is_foreign = bool(here) and not MariaDbSet.parse(str(here)).has(known.gtids)
    if is_foreign:
        raise InvalidRequest(
            f"the queue stands at {known.gtids} for this source, whose binlog has another history (it ends at {now}): "
            "start the bridge with --backfill first"
        )


def _server_id(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT @@server_id").scalar() or 0)


def _source(engine: Engine) -> str:
    with engine.connect() as connection:
        return source_name(connection)


def _old(engine: Engine, older_than: float) -> tuple[list[str], str]:
    """Ids of old rows that wait, none of which is on the list; and where the binlog ended after they were read."""
    t = half_message.c
    with engine.connect() as connection:
        wanted = sa.select(t.transaction_id).where(
            is_waiting,
            t.message_no == 0,
            t.created_at < instant_before(connection, older_than),
            _is_not_listed(connection),
        )
        names = [str(name) for name in connection.scalars(wanted.order_by(t.created_at).limit(BATCH))]
        return names, source.current_position(connection).gtids


def _delete(engine: Engine, names: list[str], older_than: float) -> int:
    with engine.begin() as connection:
        note_purged(connection, notify_source.c.rows_from, older_than)
        # Since they were read the bridge may have put one of them on the list, and a person had it tried again.
        t = half_message.c
        waiting = sa.select(t.transaction_id).where(
            is_waiting, t.message_no == 0, t.transaction_id.in_(names), _is_not_listed(connection)
        )
        return delete_transactions(connection, [str(name) for name in connection.scalars(waiting.with_for_update())])


def _is_not_listed(connection: Connection) -> ColumnElement[bool]:
    """The condition for rows that are not on the list of refused messages."""
    if not sa.inspect(connection).has_table(notify_refused.name):
        return sa.true()
    return half_message.c.transaction_id.not_in(sa.select(notify_refused.c.transaction_id))
