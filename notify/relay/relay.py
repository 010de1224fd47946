"""The relay: moves committed transactions from a table to a target, each as a whole and once. It serves databases
without a readable binlog: PostgreSQL and SQLite.

It selects rows by state (`relayed = 0`), not by ids above the last one, so that it does not miss a transaction that
commits later with an earlier id. Several relays of one database divide its keys: each holds leases on buckets of key
hashes (leases.py), so that the order per key is kept. Messages that the target will never accept are put on the list of
refused messages (notify/refused.py), and the relay continues with the next ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.backoff import Backoff
from notify.databases import reason_of, shown_url
from notify.errors import Backpressure, Unavailable
from notify.outbox import SERVER
from notify.relay.by_id import ById
from notify.relay.by_position import ByPosition
from notify.relay.leases import LEASE_SECONDS, Leases, leases_of
from notify.relay.mover import Mover, Relayed
from notify.relay.rows import Rows, is_away
from notify.sinks.showing import Showing
from notify.sinks.sink import MayLackQueues, PutsById, open_sink
from notify.storage.sql import registry
from notify.threads import in_thread
from notify.urls import without_secrets
from notify.wire import RefusedReport

log = logging.getLogger("notify.relay")

RETRY_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0
ANNOUNCE_SECONDS = 2.0


class Relay:
    """Moves the waiting messages of one database, in a service's outbox and a server's table, to one target."""

    def __init__(self, engine: Engine, url: str, *, lease_seconds: float = LEASE_SECONDS) -> None:
        """`lease_seconds`: how long this relay may be silent before another relay gets its keys."""
        self._lease_seconds = lease_seconds
        self._engine = engine
        self._url = url
        self._name = f"relay-{os.urandom(4).hex()}"
        self._announced = 0.0
        self._leases: Leases
        self._rows: Rows
        self._may_lack_queues: MayLackQueues | None = None
        """The target, until it is known whether it has queues."""
        self.total = Relayed()
        self.listed = 0
        """How many refused transactions of this database wait for a decision."""

    async def run(self, *, interval: float = 0.2, once: bool = False) -> Relayed:
        """Run until cancelled, or with `once` until the outbox is empty. Waits for an unreachable target or database.

        `interval`: seconds between two looks if no notification arrives. With `once` raises Unavailable if the target
        is away, or if other relays hold all keys. Raises InvalidRequest if there is no table, WrongRole if the table is
        a server's and the target has no queues.
        """
        sink = open_sink(self._url)
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        self._leases = leases_of(self._engine, self._lease_seconds, alone=not isinstance(sink, PutsById))
        self._rows = Rows(self._engine, self._leases, self._name)
        self._may_lack_queues = sink if isinstance(sink, MayLackQueues) else None
        showing = Showing(sink)
        is_at_work = False
        mover: Mover
        if isinstance(sink, PutsById):
            mover = ById(sink, self._rows, self.total)
        else:
            mover = ByPosition(sink, self._rows, self._leases, self.total)
        try:
            while True:
                try:
                    moved = await self._round(mover, showing, once)
                    backoff.reset()
                    if not is_at_work:
                        log.info("moves messages of %s to %s", shown_url(self._engine), without_secrets(self._url))
                        is_at_work = True
                    if not moved and not once:
                        await in_thread(self._leases.wait, interval, stop=self._leases.stop)
                except (Unavailable, sa.exc.SQLAlchemyError) as error:
                    if isinstance(error, sa.exc.SQLAlchemyError) and not is_away(error):
                        raise
                    is_at_work = False
                    if once:
                        raise Unavailable(f"the relay cannot continue: {reason_of(error)}") from error
                    # Not longer than RETRY_MAX_SECONDS, since other topics may have new rows by then.
                    wait = max(backoff.next(), min(getattr(error, "retry_after", 0.0), RETRY_MAX_SECONDS))
                    log.warning("again in %.1f s: %s", wait, reason_of(error))
                    if isinstance(error, sa.exc.SQLAlchemyError):
                        await in_thread(self._lose_sessions)
                    await asyncio.sleep(wait)
                    continue
                if once and not moved:
                    return self.total
        finally:
            await sink.close()
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                await in_thread(self._leases.close)

    def _lose_sessions(self) -> None:
        """Close all sessions: the database may have become a standby, and its address may lead to another server."""
        self._leases.lose()
        self._engine.dispose()

    async def _round(self, mover: Mover, showing: Showing, once: bool) -> bool:
        """Move a part of each table, and announce this relay now and then. False if there was nothing to move.

        With `once` it reports refused messages immediately, and raises Unavailable if other relays hold all keys.
        """
        is_due = time.monotonic() - self._announced >= ANNOUNCE_SECONDS
        if not self._rows.outboxes or is_due:
            await in_thread(self._rows.find)
        if self._may_lack_queues is not None and SERVER in self._rows.outboxes:
            # The target may be a server of this same database: it has these messages, which would be marked as moved.
            await self._may_lack_queues.check_queues()
            self._may_lack_queues = None
        if is_due or (once and self.total.refused > self.listed):
            self._announced = time.monotonic()
            source, report = await in_thread(self._announce)
            if source:
                await showing.show(source, report)
        if not await in_thread(self._leases.renew):
            if once:
                raise Unavailable("other relays of this database hold all of its keys: they move what waits")
            return False
        moved = False
        backpressure: Backpressure | None = None
        for outbox in self._rows.outboxes:
            try:
                moved = await mover.move(outbox) or moved
            except Backpressure as error:
                backpressure = error
        if backpressure is not None and not moved:
            raise backpressure
        return moved

    def _announce(self) -> tuple[str, RefusedReport]:
        """Write a heartbeat to the server's registry, if there is one; the source's name and its refused messages.

        Without a source id ("") the target cannot show the report.
        """
        report = self._rows.listed()
        self.listed = report.waiting
        if SERVER in self._rows.outboxes:
            detail = {"sent": self.total.sent, "refused": self.total.refused, "listed": self.listed}
            with self._rows.begin() as connection:
                registry.heartbeat(connection, registry.Member(self._name, "relay", detail=detail))
        return self._rows.source(), report
