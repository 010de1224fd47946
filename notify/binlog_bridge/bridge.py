"""The bridge: from a database's log to a queue server, exactly once, in commit order.

The queue's log is the bridge's only memory: each batch has the position after it, and both become durable in one
frame. After any failure the bridge asks the queue for its position and continues there. Two bridges of one source
cannot both write: each bridge first claims a higher epoch, and the queue refuses the lower epoch.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine

from notify.binlog_bridge import source
from notify.binlog_bridge.announcing import Announcing, mover_of
from notify.binlog_bridge.backfill import Backfill
from notify.binlog_bridge.batching import BATCH_BYTES
from notify.binlog_bridge.candidates import PURGED_SECONDS, Candidates
from notify.binlog_bridge.errors import Damaged, Purged, SameServerId, Superseded, TargetAway, Unfit, Unreadable
from notify.binlog_bridge.kinds import end_of_log, log_of, position_of
from notify.binlog_bridge.left_behind import LeftBehindRows
from notify.binlog_bridge.listed import Listed, Retrying
from notify.binlog_bridge.log import Position
from notify.binlog_bridge.read_ahead import ReadAhead
from notify.binlog_bridge.refusals import Refusals
from notify.binlog_bridge.rows import Returned
from notify.binlog_bridge.scope import OWN, Scope
from notify.binlog_bridge.totals import Totals
from notify.binlog_bridge.unfinished import Filling, is_of_relay, published_by_relay, sent_again, taken_over, without
from notify.client.tables.purge import IDS_RETENTION_SECONDS
from notify.errors import Conflict, InvalidRequest, NotifyError, Unavailable
from notify.movers.left_behind import LeftBehindMover
from notify.movers.refused import Refusal
from notify.movers.returned import OPEN_SECONDS, is_old, returned
from notify.movers.sinks.order import is_for_now
from notify.movers.sinks.showing import Showing
from notify.movers.sinks.sink import TRAILER_SECONDS, PutsById, Sink, open_sink, pace_of
from notify.protocol.wire import Bridged, Item, PackedBridgeBatch
from notify.runtime.alive import Progress
from notify.runtime.backoff import Backoff
from notify.runtime.databases import (
    CLIENT_KEEPALIVE,
    MOVER_SETTINGS,
    is_denied,
    reason_of,
    set_in_session,
    shown_url,
    within_schema,
)
from notify.runtime.threads import in_thread
from notify.runtime.urls import without_secrets
from notify.storage.sql.engines import make_engine

T = TypeVar("T")
log = logging.getLogger("notify.binlog_bridge")

IDLE_SECONDS = 1.0
"""How often the position is written while the log has only transactions without messages."""
RETRY_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0
SWITCH_SECONDS = 0.0002
"""How long the reading thread may keep the interpreter while an answer waits: Python's 5 ms would delay each post."""
SAME_ID_SECONDS, SAME_ID_TIMES, SAME_ID_WAIT_SECONDS = 60.0, 10, 1.5
"""How often in a time the server id may be in use, and the wait after each refusal. This bridge's own lost connection
may linger at the source, and a superseded bridge stops within 10 s; beyond this bound another reader has the id."""
DAMAGED_TIMES = 5
"""A wrong checksum may come from the network. After this many without a batch in between, the source's file is damaged.
"""
CAUGHT_UP_US = 10_000_000
"""The margin before the time of a heartbeat or row: all that was committed before it is certain to be read."""


class Bridge:
    """Moves one source to one queue server."""

    def __init__(
        self,
        urls: Sequence[str],
        queue_url: str,
        *,
        name: str = "",
        server_id: int = 0,
        schema: str | None = None,
        schemas: str | None = None,
        accept_unbounded_wal: bool = False,
        transactions_url: str = "",
        purged_seconds: float = PURGED_SECONDS,
    ) -> None:
        """`urls`: the database, and replicas to continue with when it fails. `name`: by default the source id.
        `schema`: the schema (MySQL: the database) with the tables, by default that of the URL. `schemas`: patterns of
        schemas, separated by commas (`t_*,shop`), also for those that are made later; their source needs a name.
        `server_id`: the bridge's id as a replica of MySQL or MariaDB; 0: it is made from the name.
        `accept_unbounded_wal`: read a PostgreSQL whose disk would fill while this bridge is stopped.
        `transactions_url`: see LeftBehindMover.
        `purged_seconds`: how long to wait for a replica that is behind, if every candidate lacks the position.

        Raises InvalidRequest for a database without a log, or candidates of several kinds.
        """
        engines = [_engine(url) for url in urls]
        if len({engine.dialect.name in ("mysql", "mariadb") for engine in engines}) > 1:
            raise InvalidRequest("the candidates of a source are one database and its replicas: all of one kind")
        self._candidates = Candidates(engines, purged_seconds=purged_seconds)
        self._log = log_of(engines[0].url, server_id=server_id, accept_unbounded_wal=accept_unbounded_wal)
        self._queue_url = queue_url
        self._target = without_secrets(queue_url)
        self._left_behind = LeftBehindMover(queue_url, transactions_url)
        self.name = name
        self.totals = Totals()
        self.progress = Progress()
        """For what supervises the process: whether a step hangs."""
        self._schema, self._schemas = schema, schemas
        self._source_ids: set[str] = set()
        """The source ids in the schemas of the first candidate that could be read."""
        self._scope = OWN
        self._showing: Showing
        self._same_id: list[float] = []
        self._refusals = Refusals()
        self._returned: dict[str, Refusal] = {}
        """Refusals of transactions that came back with a dump, and whose parts were read, but not their commit yet."""
        self._clock_offset_us = 0
        self._most_bytes: Callable[[], int] = lambda: BATCH_BYTES
        """Tells how large batches become, in bytes of rows."""
        self._end: Position | None = None
        """Where a run with `once` ends: the end of the log when it began; None: unknown."""
        self._is_behind = False
        """Whether this candidate lacks what the one that noted the end had."""

    @property
    def _engine(self) -> Engine:
        return self._candidates.engine

    # --- the whole --------------------------------------------------------------------------------------------

    async def run(self, *, once: bool = False, fill: bool = False, fill_since_us: int | None = None) -> Totals:
        """Run until cancelled, or with `once` until all is moved that was committed when it began.

        `fill`: backfill first. `fill_since_us`: the start of the backfill, by the source's clock; None: the queue's
        position decides it.
        Raises Superseded or InvalidRequest; once every candidate was refused, Purged, Unreadable or Unfit: an operator
        has to resolve them.
        """
        sys.setswitchinterval(SWITCH_SECONDS)
        sink = open_sink(self._queue_url)
        self._known_seconds = IDS_RETENTION_SECONDS if isinstance(sink, PutsById) else OPEN_SECONDS
        self._showing = Showing(sink)
        self._most_bytes = pace_of(sink, BATCH_BYTES)
        self._end, self._is_behind = None, False
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        try:
            while True:
                batches_before = self.totals.batches
                wait: float | None = None
                try:
                    self.progress.works()
                    await self._prepare(fill)
                    epoch, position = await self._begin(sink, fill, fill_since_us)
                    fill = False
                    log.info("source %s: reads %s, writes to %s", self.name, shown_url(self._engine), self._target)
                    await self._session(sink, epoch, position, once)
                    break
                except (Purged, Unreadable, Unfit) as error:
                    self._candidates.refuse(error)
                except (Superseded, InvalidRequest):
                    raise
                except SameServerId as error:
                    wait = self._wait_for_the_other(error)
                except (Unavailable, Conflict, sa.exc.OperationalError, sa.exc.InterfaceError, OSError) as error:
                    if isinstance(error, Conflict) and error.code == "stale_epoch":
                        raise Superseded(str(error)) from error
                    wait = backoff.next()
                    log.warning("again in %.1f s: %s", wait, reason_of(error))
                    if isinstance(error, Damaged) and self._candidates.damaged() >= DAMAGED_TIMES:
                        self._candidates.refuse(_damaged_file(error))
                    elif not isinstance(error, Conflict | TargetAway):
                        self._candidates.does_not_answer()
                self.progress.rests()
                await asyncio.sleep(backoff.next() if wait is None else wait)
                if self.totals.batches > batches_before:
                    backoff.reset()
            self.progress.rests()
            await self._send_left_behind()
            return self.totals
        finally:
            self.totals.left_behind_sent = self._left_behind.sent
            self.totals.left_behind_refused = self._left_behind.refused
            self.progress.rests()
            await sink.close()
            self._candidates.dispose()

    async def _send_left_behind(self) -> None:
        """Send what producers left behind, at the end of a run with `once`. Raises Unavailable if some of it waits."""
        left_behind = LeftBehindRows(self._engine, self._scope, self._left_behind)
        try:
            await left_behind.send()
        except (NotifyError, sa.exc.SQLAlchemyError, RuntimeError, OSError) as error:
            raise Unavailable(
                f"messages that producers left behind wait in the database: {reason_of(error)}"
            ) from error

    def _wait_for_the_other(self, error: SameServerId) -> float:
        """Seconds to wait. If the server id was in use more than SAME_ID_TIMES times, the candidate is refused."""
        now = time.monotonic()
        self._same_id = [at for at in self._same_id if now - at < SAME_ID_SECONDS] + [now]
        if len(self._same_id) > SAME_ID_TIMES:
            self._same_id = []
            self._candidates.refuse(Unfit(f"{error}: give this bridge another one with --server-id"))
        log.warning("again in %g s: %s", SAME_ID_WAIT_SECONDS, error)
        return SAME_ID_WAIT_SECONDS

    async def _prepare(self, fill: bool) -> None:
        """Check a candidate before reading it. `fill`: whether a backfill comes first.

        Raises Unfit with all remedies if it cannot be bridged.
        """

        def look() -> None:
            with self._engine.connect() as connection:
                scope = Scope.of(connection, self._schema, self._schemas)
                there = scope.schemas(connection)
                source_ids = _source_ids(self._engine, there)
                if scope.is_many and not self.name:
                    raise InvalidRequest("the source of several schemas needs a name: write --dsn NAME=URL")
                name = self.name or next(iter(source_ids), "")
                if not name:
                    raise Unfit(
                        "the database has no source id: run create_tables or `notify storage upgrade`, or name it"
                    )
                if self._source_ids and source_ids and self._source_ids.isdisjoint(source_ids):
                    raise Unfit(
                        f"its source id is {min(source_ids)}, but the database read before has "
                        f"{min(self._source_ids)}: it is another database and not a replica; give each source its "
                        "own name (--dsn name=URL)"
                    )
                named = there if self._schema or self._schemas else None
                self._log.check(connection, name, scope, named, fill=fill)
                self._clock_offset_us = source.clock_offset_us(connection, _now_us)
            self._scope = self._refusals.scope = scope
            self.name = name
            self._source_ids = self._source_ids | source_ids if scope.is_many else self._source_ids or source_ids

        try:
            await in_thread(look)
        except (sa.exc.DBAPIError, RuntimeError) as error:
            why = self._log.denied(error)
            if why is None:
                raise
            raise Unfit(f"--dsn {shown_url(self._engine)}: {why}") from None

    # --- the queue's side -------------------------------------------------------------------------------------

    async def _post(self, sink: Sink, batch: PackedBridgeBatch) -> Bridged:
        """Append a batch. A refused message is listed in the source before the position moves past it.

        The result names all refused messages. Raises Unavailable if they cannot be listed in the source.
        """
        refused: list[Item] = []
        while (answer := await _of_target(sink.append(self.name, batch))).refused:
            for_now = next((item for item in answer.refused if is_for_now(item)), None)
            if for_now is not None:
                raise TargetAway(f"the target does not take {for_now.id} for now: {for_now.detail}")
            by_id = {t.id: t for t in batch.transactions}
            refused_here = [by_id[item.id] for item in answer.refused if item.id in by_id]
            await in_thread(self._refusals.keep, self._engine, refused_here)
            await self._note([Refusal.of(by_id[item.id], item) for item in answer.refused if item.id in by_id])
            refused += answer.refused
            refused_ids = {item.id for item in answer.refused}
            rest = [t for t in batch.transactions if t.id not in refused_ids]
            if len(rest) == len(batch.transactions):
                raise TargetAway(f"the target refuses what is not in the batch: {', '.join(sorted(refused_ids)[:3])}")
            batch = msgspec.structs.replace(batch, transactions=rest, position=without(batch.position, refused_ids))
        self.progress.works()
        totals = self.totals
        totals.stored += answer.stored
        totals.known += answer.known
        totals.refused += len(refused)
        totals.batches += 1
        return msgspec.structs.replace(answer, refused=refused)

    async def _note(self, refusals: list[Refusal]) -> None:
        """Put transactions on the source's list of refused messages. Raises Unavailable."""
        if refusals:
            await in_thread(self._refusals.note, self._engine, mover_of(self.name), refusals)

    async def _without_returned(self, batch: PackedBridgeBatch) -> PackedBridgeBatch:
        """A batch without transactions that came back with a dump: they are listed, since the target may have them.

        Their rows were written long before their events. (A bridge that is behind reads old events, too, but these are
        as old as their rows.) One that is read in parts is listed when it is committed.
        """
        refusals = {
            t.id: returned(
                t.id,
                t.producer_group,
                t.messages[0].topic,
                len(t.messages),
                knows_ids=self._known_seconds > OPEN_SECONDS,
            )
            for t in batch.transactions
            if isinstance(t, Returned) and is_old(t.id, self._known_seconds)
        }
        if not refusals and not self._returned:
            return batch
        decided = [self._returned.pop(each) for each in batch.commit if each in self._returned]
        left_out = {refusal.id for refusal in decided} | refusals.keys()
        left_out |= {each for each in batch.rollback if self._returned.pop(each, None) is not None}
        if batch.prepare:
            self._returned |= refusals
        else:
            decided += refusals.values()
        await self._note(decided)
        self.totals.refused += len(decided)
        return msgspec.structs.replace(
            batch,
            transactions=[t for t in batch.transactions if t.id not in left_out],
            commit=[each for each in batch.commit if each not in left_out],
            rollback=[each for each in batch.rollback if each not in left_out],
        )

    async def _begin(self, sink: Sink, fill: bool, since_us: int | None) -> tuple[int, str]:
        """Claim the source, and finish the work of an earlier bridge; the epoch, and the position to continue from.

        `fill`, `since_us`: see `run`.
        """
        # If this bridge lost its connection because another bridge reads now, it must not take the source back.
        epoch, text = await _of_target(sink.claim(self.name, take_back=False))
        if since_us is None:
            self._check_same(text)
        if ids_sent_again := sent_again(text):
            await in_thread(self._refusals.settle, self._engine, ids_sent_again)
        if not text and self._log.takes_tables_first:
            if not isinstance(sink, PutsById):
                await self._take_over_from_relays()
            log.warning("source %s has no position yet: its tables are read first", self.name)
            fill = True
        if fill or Filling.of(text) is not None:
            await in_thread(self._log.prepare_backfill, self._engine)
            backfill = Backfill(
                self._engine,
                self._log,
                epoch,
                lambda batch: self._post(sink, batch),
                self._note,
                self._reading,
                self._scope,
                self._most_bytes,
            )
            run = backfill.run if isinstance(sink, PutsById) else backfill.run_noted
            text = await run(text, since_us)
        self._log.check_kind(position_of(text))
        return epoch, text

    def _check_same(self, text: str) -> None:
        """Check that a stored position is one of these schemas: what others wrote before it was passed over, and a
        backfill begins shortly before it. Raises InvalidRequest."""
        filling = Filling.of(text)
        position = filling.goes_on if filling is not None else position_of(text)
        if position is None or not position.scope or self._scope.is_within(position.scope):
            return
        try:
            self._log.check_kind(position)
        except Unfit:  # the source moved to another kind of database, whose tables a backfill reads
            return
        raise InvalidRequest(
            f"the bridge of source {self.name} has read {position.scope} so far, and now is to read {self._scope.text}:"
            " it has passed over what was written to the others. Start it with --backfill-from the time of the oldest "
            "message that may be missing (the present time, if none is), or give them another name (--dsn NAME=URL)"
        )

    async def _take_over_from_relays(self) -> None:
        """Stop relays that published this source's rows to a target that knows no ids, and mark what they published.

        A relay that still runs finds that it has lost its claim, and why.
        """
        for source_id in sorted(self._source_ids):
            relay = f"relay-{source_id}"
            sink = open_sink(self._queue_url)  # one for each source: a producer of Kafka writes for one
            try:
                if not is_of_relay(await _of_target(sink.position(relay))):
                    continue
                epoch, text = await _of_target(sink.claim(relay))
                await in_thread(self._refusals.published, self._engine, published_by_relay(text))
                await _of_target(sink.append(relay, PackedBridgeBatch(epoch, text, taken_over(self.name))))
            finally:
                await sink.close()
            log.warning("source %s: took over from its relay", self.name)

    def _reading(self, position: Position | None) -> ReadAhead:
        reader = self._log.reader(
            self._engine,
            position,
            scope=self._scope,
            source_us=self._source_us,
            known_seconds=self._known_seconds,
            most_bytes=self._most_bytes,
        )
        return ReadAhead(reader)

    # --- one connection to the source -------------------------------------------------------------------------

    async def _session(self, sink: Sink, epoch: int, text: str, once: bool) -> None:
        """Move messages from a position on until the connection ends, or with `once` up to the end of the log."""
        if once:
            await in_thread(self._note_end)
        reading = self._reading(position_of(text))
        self._returned = {}
        self._has_read(self._newest_us(text))
        self.totals.connections += 1
        knows_ids = isinstance(sink, PutsById)
        retrying = Retrying(self._engine, self._refusals, lambda batch: self._post(sink, batch), self._note, knows_ids)
        listed = Listed(self._engine, self._refusals, knows_ids=knows_ids)
        waiting = ""
        posted = time.monotonic()
        has_parts_open = False
        announcing = asyncio.get_running_loop().create_task(
            Announcing(self._engine, self._log, self.name, self.totals, self._refusals, self._showing).run()
        )
        background = [announcing]
        if not once:
            left_behind = LeftBehindRows(self._engine, self._scope, self._left_behind)
            background.append(asyncio.get_running_loop().create_task(left_behind.run()))
        try:
            await listed.begin()
            while True:
                self.progress.works()
                try:
                    read = await reading.next()
                except NotifyError:
                    if waiting:  # else an error that comes again each time would hold the position up
                        await self._append(sink, PackedBridgeBatch(epoch, text, waiting), 0)
                    raise
                for task in background:
                    if task.done():
                        await self._note_stop(sink, epoch, text, task.exception())
                        task.result()  # raises: it ends only by a fault of the bridge or of the source
                batch, newest_us = read or (None, 0)
                listed.read(text, is_caught_up=batch is None and bool(reading.caught_up_us))
                may_retry = not has_parts_open and listed.is_passed
                if may_retry:
                    text = await retrying.send(epoch, text)
                if batch is None:
                    caught_up_us = reading.caught_up_us
                    if caught_up_us:
                        self._has_read(caught_up_us + self._clock_offset_us)
                    if once and caught_up_us and not waiting:
                        if self._is_behind and not self._is_at_end(text):
                            raise Unavailable(
                                f"{shown_url(self._engine)} lacks what an earlier candidate had when this run began; "
                                "the run ends once it has caught up (if that was lost, start the run again)"
                            )
                        return
                elif once and not waiting and may_retry and self._is_at_end(text):
                    return  # what was read now is later, and a source that is written all the time is never silent
                elif not _has_content(batch):
                    waiting = batch.position
                    if time.monotonic() - posted < IDLE_SECONDS:
                        continue
                idle = batch is None or not _has_content(batch)
                if idle and not waiting and time.monotonic() - posted < TRAILER_SECONDS:
                    continue
                if idle or batch is None:
                    batch = PackedBridgeBatch(epoch=epoch, expected_position=text, position=waiting)
                batch.epoch, batch.expected_position, batch.position = epoch, text, batch.position or text
                batch = await self._without_returned(await listed.without(batch))
                await self._append(sink, batch, newest_us)
                text, has_parts_open = batch.position, batch.prepare or (idle and has_parts_open)
                if not batch.prepare:
                    reading.confirm(text)
                waiting, posted = "", time.monotonic()
                self._candidates.works()
        finally:
            for task in background:
                task.cancel()
            await reading.close()
            # Else the engine would be disposed of while a thread of it still reads.
            await asyncio.wait(background)

    async def _note_stop(self, sink: Sink, epoch: int, text: str, error: BaseException | None) -> None:
        """Store at the target that rows were passed over which the log lacks, if that is the error."""
        position = self._log.stopped_at(text) if isinstance(error, Unfit) else text
        if position != text:
            await self._post(sink, PackedBridgeBatch(epoch, text, position))

    def _note_end(self) -> None:
        """Note where a run with `once` ends, and whether this candidate is behind an earlier one that noted it.

        Where the end is unknown, since a role may not ask or a PostgreSQL has become a standby, the run ends once the
        source is silent.
        """
        end: Position | None = None
        try:
            with self._engine.connect() as connection:
                end = end_of_log(connection)
        except sa.exc.DBAPIError as error:
            if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) and not is_denied(error.orig):
                raise
        noted, self._is_behind = self._end, False
        if noted is None:
            self._end = end
        elif end is not None and not end.reaches(noted):
            self._is_behind = noted.reaches(end)
            if not self._is_behind:
                self._end = end  # of another history, after a failover, which never comes to the earlier end

    def _is_at_end(self, text: str) -> bool:
        """Whether a stored position is at the end that the log had, or beyond it."""
        position = position_of(text)
        return position is not None and self._end is not None and position.reaches(self._end)

    async def _append(self, sink: Sink, batch: PackedBridgeBatch, newest_us: int) -> None:
        """Post a batch, and update the totals."""
        batch.lag = max(0, self._source_us() - newest_us) / 1e6 if newest_us else 0.0
        if self.totals.retained is not None:
            batch.retained, batch.retained_left, batch.slot_age = self.totals.retained
        refused = {item.id for item in (await self._post(sink, batch)).refused}
        self.totals.rows += sum([len(t.messages) for t in batch.transactions if t.id not in refused])
        self._has_read(newest_us or self._newest_us(batch.position))
        if newest_us:
            self.totals.lag_us = self._source_us() - newest_us

    def _has_read(self, until_us: int) -> None:
        """Record that all commits until then are read; their rows may have been written a little earlier."""
        self.totals.read_through_us = max(self.totals.read_through_us, until_us - CAUGHT_UP_US)

    def _newest_us(self, text: str) -> int:
        """When the newest transaction before a position was written; 0 if unknown.

        A time in the future is ignored: a session of the source may set its clock (SET TIMESTAMP).
        """
        position = position_of(text)
        return position.newest_us if position is not None and position.newest_us <= self._source_us() else 0

    def _source_us(self) -> int:
        """The time by the source's clock, in microseconds."""
        return _now_us() + self._clock_offset_us


def _source_ids(engine: Engine, schemas: Sequence[str]) -> set[str]:
    """The source ids of schemas; those without one are left out."""
    found = set()
    for schema in schemas:
        with within_schema(engine, schema).connect() as connection:
            found.add(source.id_of(connection))
    return found - {""}


def _damaged_file(error: Damaged) -> Unreadable:
    return Unreadable(
        f"an event of the source's log could not be read {DAMAGED_TIMES} times: its file is damaged, or the event is "
        f"one that the source itself cannot decode ({error}). "
        "Nothing was skipped: start with --backfill, which sends the missing messages"
    )


async def _of_target(answer: Awaitable[T]) -> T:
    """The target's answer. Raises TargetAway instead of Unavailable."""
    try:
        return await answer
    except Unavailable as error:
        raise TargetAway(str(error)) from error


def _has_content(batch: PackedBridgeBatch) -> bool:
    """Whether a batch has more than a position."""
    return bool(batch.transactions or batch.commit or batch.rollback)


def _now_us() -> int:
    return time.time_ns() // 1000


def _engine(url: str) -> sa.Engine:
    engine = make_engine(url, "--dsn", _options)
    if engine.dialect.name == "postgresql":

        @sa.event.listens_for(engine, "connect", insert=True)  # before SQLAlchemy asks the server for anything
        def set_up(connection: Any, _: Any) -> None:
            with connection.cursor() as cursor:
                cursor.execute(set_in_session(MOVER_SETTINGS))
            connection.commit()  # a rollback would undo the settings

    return engine


def _options(url: URL) -> dict[str, Any]:
    """The options of a source's engine."""
    if url.get_backend_name() == "postgresql":
        arguments = {"connect_timeout": 5, "client_encoding": "utf8"} | CLIENT_KEEPALIVE
        return {"pool_pre_ping": True, "connect_args": arguments}
    if url.get_backend_name() == "sqlite":
        return {}
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": 5, "read_timeout": 30}}
