"""The relay: moves committed transactions from tables to a target, each as a whole and once. It serves databases
without a readable binlog: PostgreSQL and SQLite.

It selects rows by state (`relayed = 0`), not by ids above the last one, so that it does not miss a transaction that
commits later with an earlier id. Several relays of a schema divide its keys: each holds leases on buckets of key
hashes (leases.py), so that the order per key is kept. Messages that the target will never accept are put on the list of
refused messages (notify/movers/refused.py), and the relay continues with the next ones.

A relay of many schemas moves one page of a schema and then one of the next schema with waiting rows. A fault
of one schema does not delay the others. While it listens for commits, an idle relay asks its database only once in
LOOK_SECONDS. That look also finds what producers in mode auto have left behind, which is sent at the same time
as the outboxes (notify/movers/left_behind.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.errors import Backpressure, Unavailable
from notify.movers.left_behind import LeftBehindMover
from notify.movers.outbox import LOCAL, SERVER
from notify.movers.relay.by_id import ById
from notify.movers.relay.by_position import ByPosition
from notify.movers.relay.leases import LEASE_SECONDS, Leases, leases_of
from notify.movers.relay.mover import Mover, MovesElsewhere, Relayed
from notify.movers.relay.rows import Rows, is_away
from notify.movers.relay.sources import Sources
from notify.movers.sinks.showing import Showing
from notify.movers.sinks.sink import TRAILER_SECONDS, MayLackQueues, PutsById, Sink, open_sink
from notify.protocol.wire import RefusedReport
from notify.runtime.alive import Progress
from notify.runtime.backoff import Backoff
from notify.runtime.databases import is_lost, reason_of, shown_url
from notify.runtime.threads import in_thread
from notify.runtime.urls import without_secrets
from notify.storage.members import Member

log = logging.getLogger("notify.relay")

RETRY_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0
BROKEN_SECONDS = 60.0
"""How long a relay of many schemas leaves one alone whose table it cannot use."""
ANNOUNCE_SECONDS = 2.0
LOOK_SECONDS = 10.0
"""How often a relay that is woken by commits looks for rows that have woken nobody, and for new tables and schemas."""
DRAIN_SECONDS = 1.0
"""How often notifications are taken while there is enough to move."""
QUIET_SECONDS = 300.0
"""With a longer interval a relay ends its sessions between two looks, so that a database that pauses when nobody uses
it can do so. It is then not woken by commits."""
MOST_SINKS = 16
"""The most sources whose publishers are kept open for a target that knows no ids."""


class Relay:
    """Moves the waiting messages of one database, in services' outboxes and servers' tables, to one target."""

    def __init__(
        self,
        engine: Engine,
        url: str,
        *,
        schema: str | None = None,
        schemas: str | None = None,
        transactions_url: str = "",
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`schema`: the only schema whose tables are read. `schemas`: patterns of schemas, separated by commas
        (`t_*,shop`); those that are made later are found while the relay runs. Without both, the tables that the
        connection finds. `transactions_url`: see LeftBehindMover. `lease_seconds`: how long this relay may be silent
        before another relay gets its keys.
        """
        self._lease_seconds = lease_seconds
        self._engine = engine
        self._url, self._transactions_url = url, transactions_url
        self._schema, self._schemas = schema, schemas
        self._name = f"relay-{os.urandom(4).hex()}"
        self._announced = self._found = self._drained = 0.0
        self._leases: Leases
        self._sources: Sources
        self._sink: Sink
        self._left_behind: LeftBehindMover
        self._may_lack_queues: MayLackQueues | None = None
        """The target, until it is known whether it has queues."""
        self._queue: deque[str] = deque()
        """The schemas to visit: they have waiting rows, or were just named by a commit."""
        self._due: dict[str, float] = {}
        """When the next look into a schema is due; a schema that is missing is due now."""
        self._open_step: dict[str, float] = {}
        """The seconds between looks into a schema with an open transaction, which may wake nobody."""
        self._held: dict[str, float] = {}
        """Until when schemas are left alone that could not be moved."""
        self._backoffs: dict[str, Backoff] = {}
        self._stands_by: dict[str, float] = {}
        """When to try again to publish a schema that another relay publishes, even if no rows wait there: the
        publisher shows the target that it runs."""
        self._elsewhere: set[str] = set()
        """Schemas with waiting rows of which another relay holds all keys, or keys of all that waits."""
        self._publishers: dict[str, tuple[Sink, ByPosition]] = {}
        self._showings: dict[str, tuple[Showing, RefusedReport]] = {}
        """The newest report of each source that has a list of refused messages, by source id."""
        self.progress = Progress()
        """For what supervises the process: whether a round hangs."""
        self.total = Relayed()
        self.listed = 0
        """How many refused transactions wait for a decision, in all schemas."""

    async def run(self, *, interval: float = 0.2, once: bool = False) -> Relayed:
        """Run until cancelled, or with `once` until all is moved that waited when it began. Waits for an unreachable
        target or database.

        `interval`: seconds between two looks where no commit wakes this relay; more than QUIET_SECONDS: it keeps no
        session in between. With `once` raises Unavailable if the target is unreachable, or if other relays hold all
        keys. Raises InvalidRequest if there is no table, or both `schema` and `schemas` are given; WrongRole if a table
        is a server's and the target has no queues.
        """
        self._forget_all()
        self._sink = sink = open_sink(self._url)
        self._left_behind = LeftBehindMover(self._url, self._transactions_url)
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        self._leases = leases_of(
            self._engine,
            self._lease_seconds,
            alone=not isinstance(sink, PutsById),
            among_many=self._schemas is not None,
        )
        self._sources = Sources(self._engine, self._leases, self._name, schema=self._schema, schemas=self._schemas)
        self._may_lack_queues = sink if isinstance(sink, MayLackQueues) else None
        is_at_work = False
        try:
            while True:
                try:
                    self.progress.works()
                    is_busy = await self._round(interval, once)
                    self.progress.rests()
                    backoff.reset()
                    if not is_at_work:
                        log.info("moves messages of %s to %s", shown_url(self._engine), without_secrets(self._url))
                        is_at_work = True
                    if is_busy:
                        continue
                    if once:
                        await self._left_behind.send(self._engine, await self._with_left_behind())
                        await self._report()
                        self._check_all_moved()
                        return self.total
                    await self._wait(interval)
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
                    self._due.clear()  # commits may have woken nobody meanwhile
                    self.progress.rests()
                    await asyncio.sleep(wait)
        finally:
            await self._left_behind.close()
            self.total.sent += self._left_behind.sent
            self.total.refused += self._left_behind.refused
            await sink.close()
            for publisher, _ in self._publishers.values():
                if publisher is not sink:
                    await publisher.close()
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                await in_thread(self._leases.close)

    def _forget_all(self) -> None:
        """Begin a run: what an earlier one knew of the schemas may be so no longer."""
        self._announced = self._found = self._drained = 0.0
        self._queue.clear()
        self._elsewhere.clear()
        self._publishers.clear()
        for known in (self._due, self._open_step, self._held, self._backoffs, self._stands_by):
            known.clear()

    def _lose_sessions(self) -> None:
        """Close all sessions: the database may have become a standby, and its address may lead to another server."""
        self._leases.lose()
        self._engine.dispose()

    def _check_all_moved(self) -> None:
        """Raises Unavailable if rows wait that this relay cannot move."""
        if self._elsewhere:
            raise Unavailable("other relays hold all of the keys: they move what waits")
        if self._sources.unsafe:
            schema, why = next(iter(self._sources.unsafe.items()))
            raise Unavailable(f"rows of {len(self._sources.unsafe)} schemas may wait unseen ({schema}: {why})")
        if self._held:
            some = ", ".join(sorted(self._held)[:3])
            raise Unavailable(f"rows of {len(self._held)} schemas could not be moved ({some}): see the log")

    # --- which schemas ----------------------------------------------------------------------------------------

    async def _round(self, interval: float, once: bool) -> bool:
        """Look where rows wait, and move a page of one schema. False if there is nothing to do now."""
        now = time.monotonic()
        if now - self._found >= LOOK_SECONDS or not self._sources.by_schema:
            await self._find(once)
            self._found = now
        if not self._queue or now - self._drained >= DRAIN_SECONDS:
            self._drained = now
            for schema in await in_thread(self._leases.arrived):
                self._is_due([schema] if schema else self._sources.by_schema)
        await self._announce()
        due = [
            schema
            for schema in self._sources.by_schema
            if self._due.get(schema, 0.0) <= now and schema not in self._queue
        ]
        if due:
            await self._look(due, now, interval)
        if not self._queue:
            return False
        schema = self._queue.popleft()
        rows = self._sources.by_schema.get(schema)
        if rows is not None:
            await self._visit(schema, rows, interval, once)
        return True

    async def _find(self, once: bool) -> None:
        known = set(self._sources.by_schema)
        await in_thread(self._sources.find)
        there = self._sources.by_schema
        for schema in known - there.keys():
            for forgotten in (self._due, self._open_step, self._held, self._backoffs, self._stands_by):
                forgotten.pop(schema, None)
            await self._forget_publisher(schema)
        if not there and not self._sources.unsafe:
            text = f"no schema that matches {self._schemas} has an outbox"
            if once:
                raise Unavailable(f"{text}: run create_tables there, or correct the pattern")
            log.warning("%s yet", text)
        if not known and not self._sources.are_many:
            self._queue.extend(there)  # a target that knows no ids says which rows of theirs only need a mark
        if self._may_lack_queues is not None and any(SERVER in rows.outboxes for rows in there.values()):
            # The target may be a server of this same database: it has these messages, which would be marked as moved.
            await self._may_lack_queues.check_queues()
            self._may_lack_queues = None
        await self._report()
        if not once and (schemas := await self._with_left_behind()):
            self._left_behind.begin(self._engine, schemas)

    async def _with_left_behind(self) -> list[str]:
        """The schemas in which producers in mode auto have left something behind."""
        there = [schema for schema, rows in self._sources.by_schema.items() if LOCAL in rows.outboxes]
        return await in_thread(self._leases.read, partial(self._left_behind.waiting, schemas=there)) if there else []

    def _is_due(self, schemas: Iterable[str]) -> None:
        for schema in schemas:
            self._due[schema] = self._held.get(schema, 0.0)

    async def _look(self, due: list[str], now: float, interval: float) -> None:
        """Put the schemas with waiting rows in the queue, and note when to look again."""
        seen = await in_thread(self._sources.look, due)
        for schema in due:
            self._held.pop(schema, None)
            if schema in seen.polled:
                wait = interval
            elif schema in seen.open:
                wait = min(2 * self._open_step.get(schema, interval / 2), LOOK_SECONDS)
                self._open_step[schema] = wait
            else:
                wait = max(interval, LOOK_SECONDS)
                self._open_step.pop(schema, None)
            self._due[schema] = min(now + wait, self._stands_by.get(schema, now + wait))
        self._queue.extend(seen.waiting)
        for schema in due:
            if self._stands_by.get(schema, now + 1) <= now:
                del self._stands_by[schema]
                if schema not in self._queue:
                    self._queue.append(schema)

    async def _wait(self, interval: float) -> None:
        """Wait until rows may have come, or until something is due."""
        is_quiet = interval > QUIET_SECONDS
        if is_quiet:
            await in_thread(self._lose_sessions)
        elif self._sources.are_many:
            await in_thread(self._leases.leave)
        until = min([self._due.get(schema, 0.0) for schema in self._sources.by_schema], default=self._found + interval)
        if not is_quiet:
            until = min(until, self._found + LOOK_SECONDS)
        if self._beats:
            until = min(until, self._announced + ANNOUNCE_SECONDS)
        woken: set[str] = set()
        while not woken and (seconds := until - time.monotonic()) > 0:
            for schema, (_, mover) in list(self._publishers.items()):
                try:
                    await mover.rest()
                except MovesElsewhere as error:
                    self._hold(schema, RETRY_MAX_SECONDS, error)
            if self._publishers:
                seconds = min(seconds, TRAILER_SECONDS)
            if is_quiet:
                await asyncio.sleep(seconds)
            else:
                woken = await in_thread(self._leases.wait, seconds, self._sources.by_schema, stop=self._leases.stop)
        for schema in woken:
            if not schema:
                self._is_due(self._sources.by_schema)
            elif self._held.get(schema, 0.0) <= time.monotonic() and schema not in self._queue:
                self._queue.append(schema)

    def _hold(self, schema: str, seconds: float, error: Exception) -> None:
        """Leave a schema alone for a while."""
        name = f"schema {schema}: " if self._sources.are_many else ""
        log.warning("%sagain in %.1f s: %s", name, seconds, reason_of(error))
        self._held[schema] = self._due[schema] = time.monotonic() + seconds
        if isinstance(error, MovesElsewhere):
            self._stand_by(schema)

    def _stand_by(self, schema: str) -> None:
        """Let another relay publish a schema for a while. (A relay of many has no publisher before rows wait.)"""
        if not self._sources.are_many and not isinstance(self._sink, PutsById):
            self._stands_by[schema] = time.monotonic() + RETRY_MAX_SECONDS

    def _backoff(self, schema: str) -> float:
        """The seconds to wait after a failure in a schema."""
        return self._backoffs.setdefault(schema, Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)).next()

    # --- one schema -------------------------------------------------------------------------------------------

    async def _visit(self, schema: str, rows: Rows, interval: float, once: bool) -> None:
        """Move a page of each outbox of a schema."""
        self._elsewhere.discard(schema)
        before = self.total.sent + self.total.refused
        refused_before = self.total.refused
        is_left = has_moved = False
        try:
            if not rows.is_prepared:
                await in_thread(rows.find)
            if not await in_thread(self._leases.renew, schema):
                self._elsewhere.add(schema)
                self._stand_by(schema)
                self._due[schema] = float("inf") if once else time.monotonic() + interval
                return
            if once:  # else a service that writes all the time would keep the relay running
                await in_thread(rows.end_here)
            mover = await self._mover(schema, rows)
            backpressure: Backpressure | None = None
            for outbox in rows.outboxes:
                try:
                    is_left = await mover.move(outbox) or is_left
                except Backpressure as error:
                    backpressure = error
            has_moved = self.total.sent + self.total.refused > before
            if backpressure is not None and not has_moved and not is_left:
                raise backpressure
            self._backoffs.pop(schema, None)
        except (Backpressure, MovesElsewhere) as error:
            if once and not self._sources.are_many:
                raise
            retry_after = min(getattr(error, "retry_after", 0.0), RETRY_MAX_SECONDS)
            self._hold(schema, max(self._backoff(schema), retry_after), error)
            return
        except sa.exc.DBAPIError as error:
            if not self._sources.are_many or is_lost(error):
                raise
            self._hold(schema, self._backoff(schema) if is_away(error) else BROKEN_SECONDS, error)
            return
        finally:
            if self.total.refused > refused_before or (rows.has_listed and self.total.sent > before):
                self._sources.has_changed(schema)
        if is_left:
            self._queue.append(schema)
        elif has_moved:
            self._due[schema] = 0.0
        else:  # what waits is another relay's
            self._due[schema] = float("inf") if once else time.monotonic() + interval

    async def _mover(self, schema: str, rows: Rows) -> Mover:
        """The mover of a schema's rows."""
        if isinstance(self._sink, PutsById):
            return ById(self._sink, rows, self.total)
        publisher = self._publishers.pop(schema, None)
        if publisher is None:
            sink = open_sink(self._url) if self._sources.are_many else self._sink
            publisher = sink, ByPosition(sink, rows, self._leases, self.total)
        self._publishers[schema] = publisher  # the newest is the last
        while len(self._publishers) > MOST_SINKS:
            await self._forget_publisher(next(iter(self._publishers)))
        return publisher[1]

    async def _forget_publisher(self, schema: str) -> None:
        publisher = self._publishers.pop(schema, None)
        if publisher is not None and publisher[0] is not self._sink:
            await publisher[0].close()

    # --- reports ----------------------------------------------------------------------------------------------

    @property
    def _beats(self) -> bool:
        """Whether a server's registry shows this relay."""
        return any(SERVER in rows.outboxes for rows in self._sources.by_schema.values())

    async def _announce(self) -> None:
        """Now and then write a heartbeat to servers' registries, and report lists of refused messages that changed."""
        if time.monotonic() - self._announced < ANNOUNCE_SECONDS:
            return
        self._announced = time.monotonic()
        await self._report(changed_only=True)
        detail = {"sent": self.total.sent, "refused": self.total.refused, "listed": self.listed}
        member = Member(self._name, "relay", detail=detail)
        for rows in self._sources.by_schema.values():
            if SERVER in rows.outboxes:
                await in_thread(rows.beat, member)

    async def _report(self, *, changed_only: bool = False) -> None:
        """Read lists of refused messages, and show the target what waits; it may have forgotten older reports."""
        for source, report in await in_thread(self._sources.reports, changed_only):
            if source not in self._showings and report.waiting:
                self._showings[source] = Showing(self._sink), report
            elif source in self._showings:
                self._showings[source] = self._showings[source][0], report
        self.listed = sum(rows.waiting for rows in self._sources.by_schema.values())
        for source, (showing, report) in self._showings.items():
            await showing.show(source, report)
