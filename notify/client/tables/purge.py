"""Purging half_message: deletes the rows of transactions that are final on the server; a forced purge deletes rows
without asking, and notes up to which time checks cannot be answered any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.check.sources import Sources
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.definitions import half_message, has_source_id, notify_source
from notify.client.tables.old_rows import (
    CLOCK_SKEW,
    DAY,
    OldTransaction,
    delete_transactions,
    instant_before,
    note_purged,
    oldest_transactions,
)
from notify.client.transport.http import items_for
from notify.client.transport.servers import Servers
from notify.errors import InvalidRequest, NotifyError, UnsafeTable
from notify.protocol import ids
from notify.protocol.wire import Item, OutcomeItem, Outcomes, States, encode_msgpack
from notify.runtime.backoff import CHANCE
from notify.runtime.databases import (
    LEFT_BEHIND,
    REFUSED,
    RELAYED,
    UNSENT,
    is_lost,
    reason_of,
    whole,
    without_server_cursors,
)
from notify.runtime.program_log import program_log
from notify.runtime.schemas import found_in, named_by, naming

log = program_log("notify.client")

IDS_RETENTION_SECONDS = 7 * DAY
"""How long a server remembers a decided transaction, by default; it remembers an undecided one forever."""
BATCH = 1000
SMALL_BATCH = 500
PAUSE_SECONDS = 0.2
"""The pause between two batches of a producer's purge, so that the purge takes little of the database and server."""
EVERY_SECONDS = 3600.0
FINAL = ("COMMITTED", "ROLLED_BACK")
ASK_SECONDS = 30.0


def check_purge_after(seconds: float | None) -> None:
    """Raises InvalidRequest for less than a day: checks, the audit, relays and bridges still need younger rows."""
    if seconds is not None and not seconds >= DAY:
        raise InvalidRequest(
            f"purge_after is {seconds!r}; it is a number of seconds, {DAY:g} at least, or None: nothing is purged",
            "out_of_bounds",
        )


@dataclass(slots=True)
class Purged:
    """The result of a purge: transactions examined, rows deleted, and transactions kept because they are not final."""

    looked_at: int = 0
    rows: int = 0
    kept: int = 0


async def purge(
    engine: Engine,
    url: str,
    *,
    older_than: float,
    schema: str | None = None,
    ids_retention: float = IDS_RETENTION_SECONDS,
    max_batches: int = 1000,
) -> Purged:
    """Delete rows older than `older_than` seconds whose transactions are final on the server.

    `schema`: whose rows; None: where the engine's connections find them. Each transaction is looked up on the shard
    that its row names, because other shards do not know it. If its shard does not know it, its rows are deleted only
    if it is older than `ids_retention` by the database's clock: a younger one may be a half that is still on its way.
    Rows that wait in the outbox are deleted only if the server says that they are committed. Raises Unavailable if the
    server does not answer; nothing is lost then.
    """
    http = Servers(url, "transactions")
    result = Purged()
    after = ""
    cutoff: datetime | None = None
    try:
        for _ in range(max_batches):
            with engine.connect() as connection, _within(connection, schema):
                cutoff = cutoff or instant_before(connection, older_than)
                rows, forgotten_ms = _read_old(connection, cutoff, ids_retention, BATCH, after)
                schema = named_by(connection)  # a pool's next connection may find the table elsewhere
            final = await _final(http, rows, forgotten_ms)
            with engine.begin() as connection, _within(connection, schema):
                result.rows += _delete(connection, final, cutoff)
            result.looked_at += len(rows)
            result.kept += len(rows) - len(final)
            if len(rows) < BATCH:
                break
            after = rows[-1].id
    finally:
        await http.aclose()
    return result


@contextlib.contextmanager
def _within(connection: Connection, schema: str | None) -> Iterator[None]:
    """Statements on a schema's tables; None: where the connection finds half_message."""
    with without_server_cursors(connection), naming(connection, found_in(connection, half_message.name, schema)):
        yield


def _read_old(
    connection: Connection, cutoff: datetime, ids_retention: float, limit: int, after: str
) -> tuple[Sequence[OldTransaction], float]:
    """Transactions from before `cutoff`, and the time (in milliseconds) up to which servers forgot final ones."""
    rows = oldest_transactions(connection, cutoff, limit, after, waiting=True)
    # Ids contain the time of the producer's clock, which may run ahead of the database's.
    forgotten = instant_before(connection, ids_retention) - CLOCK_SKEW
    return rows, forgotten.replace(tzinfo=UTC).timestamp() * 1000


async def _final(http: Servers, rows: Sequence[OldTransaction], forgotten_ms: float) -> list[str]:
    """The ids of transactions that are final on the server, or were final and are forgotten."""
    rows_by_shards: dict[tuple[str, str], list[OldTransaction]] = defaultdict(list)
    for row in rows:
        rows_by_shards[(row.producer_group, row.shards)].append(row)
    final: list[str] = []
    for (group, shards), shard_rows in rows_by_shards.items():
        answers = [await _ask(http, group, shard, [row.id for row in shard_rows]) for shard in shards.split(",")]
        for row, *items in zip(shard_rows, *answers, strict=True):
            is_old = ids.milliseconds(ids.from_text(row.id)) < forgotten_ms and not row.is_waiting
            if all(item.state in FINAL or (item.status == 404 and is_old) for item in items):
                final.append(row.id)
    return final


def _delete(connection: Connection, transaction_ids: Sequence[str], cutoff: datetime) -> int:
    """Delete the rows of transactions, and note for the audit since when rows are whole; returns the number of rows."""
    if transaction_ids:
        note_purged(connection, notify_source.c.rows_from, cutoff)
    return delete_transactions(connection, transaction_ids)


class RowPurge:
    """Purges a producer's rows while it runs: once an hour, in small batches.

    It purges only rows of its own group, because it may have no right to ask for other groups.
    """

    def __init__(
        self, http: Servers, group: str, engine: Any, purge_after: float, sources: Sources | None = None
    ) -> None:
        """`engine`: an Engine or an AsyncEngine; `purge_after` in seconds; `sources`: whose rows are purged."""
        self._sources = Sources() if sources is None else sources
        self._http, self._group, self._purge_after = http, group, purge_after
        self._database = DatabaseCalls(engine, self._sources)

    async def run(self) -> None:
        """Purge until cancelled. If the database or server is unreachable, try again an hour later."""
        await asyncio.sleep(CHANCE.uniform(0, EVERY_SECONDS))  # instances of a group often start together
        while True:
            try:
                await self.once()
            except (sa.exc.SQLAlchemyError, NotifyError, OSError) as error:
                log.warning("old half_message rows were not purged; again later: %s", str(error)[:300])
            except Exception:
                log.exception("old half_message rows were not purged; again later")
            await asyncio.sleep(EVERY_SECONDS)

    async def once(self) -> Purged:
        """Look at every old row of every schema once. Raises Unavailable, and the errors of the database."""
        result = Purged()
        await self._database.look()
        schemas = self._sources.schemas
        for schema in schemas:
            try:
                await self._purge(schema, result)
            except (sa.exc.DBAPIError, UnsafeTable) as error:  # what is wrong in one schema holds up no other
                if len(schemas) == 1 or is_lost(error):
                    raise
                log.warning("old half_message rows of the schema %s were not purged: %s", schema, reason_of(error))
        return result

    async def _purge(self, schema: str, result: Purged) -> None:
        after = ""
        # A server keeps ids for this time by default, even if rows are purged earlier.
        ids_retention = max(self._purge_after, IDS_RETENTION_SECONDS)
        cutoff = await self._database.call(instant_before, self._purge_after, schema=schema)
        while True:
            rows, forgotten_ms = await self._database.call(
                _read_old, cutoff, ids_retention, SMALL_BATCH, after, schema=schema
            )
            own_rows = [row for row in rows if row.producer_group == self._group]
            final = await _final(self._http, own_rows, forgotten_ms)
            if final:
                result.rows += await self._database.call(_delete, final, cutoff, schema=schema)
            result.looked_at += len(own_rows)
            result.kept += len(own_rows) - len(final)
            if len(rows) < SMALL_BATCH:
                return
            after = rows[-1].id
            await asyncio.sleep(PAUSE_SECONDS)

    async def close(self) -> None:
        """Wait for a call to the database; `run` is cancelled already."""
        await self._database.close()


async def _ask(http: Servers, group: str, shard: str, transaction_ids: Sequence[str]) -> list[Item]:
    """The states of transactions on a shard. Rows of tombstones and of the outbox name no shard: then any server is
    asked, or each of several servers with separate logs.

    To ask a shard, this sends the outcome UNKNOWN, which decides nothing. A server that does not have the shard refuses
    it with 421, so that its missing knowledge does not count as "unknown". (A request for states names no shard.)
    """
    if shard:
        outcomes = [
            OutcomeItem(id=transaction_id, outcome="UNKNOWN", shard=shard) for transaction_id in transaction_ids
        ]
        body = encode_msgpack(Outcomes(producer_group=group, outcomes=outcomes))
        answer = await http.call("POST", "/v1/transactions/outcomes", body, ASK_SECONDS, shard=shard)
        return items_for(transaction_ids, answer, http)
    await http.known(ASK_SECONDS)
    body = encode_msgpack(States(producer_group=group, ids=list(transaction_ids)))
    items: dict[str, Item] = {}
    for log_shard in http.places() or (None,):
        answer = await http.call("POST", "/v1/transactions/states", body, ASK_SECONDS, shard=log_shard)
        for item in items_for(transaction_ids, answer, http):
            if item.id not in items or items[item.id].status == 404:
                items[item.id] = item
    return [items[transaction_id] for transaction_id in transaction_ids]


def purge_by_force(engine: Engine, *, older_than: float, schema: str | None = None) -> Purged:
    """Delete rows older than `older_than` seconds, without asking the server.

    In the same transaction the database notes up to which id rows are gone. A check for a half up to this id, without a
    row, is then answered UNKNOWN, and never with a tombstone: an operator must decide it. Ids are compared, not times,
    because they contain the time of the producer's own clock.
    """
    result = Purged()
    with engine.begin() as connection, _within(connection, schema):
        cutoff = instant_before(connection, older_than)
        note_purged(connection, notify_source.c.rows_from, cutoff)
        highest_ms = 0
        while rows := oldest_transactions(connection, cutoff, BATCH):
            result.rows += delete_transactions(connection, [row.id for row in rows])
            result.looked_at += len(rows)
            highest_ms = max(highest_ms, ids.milliseconds(ids.from_text(rows[-1].id)))
        connection.execute(
            notify_source.update()
            .where(has_source_id, notify_source.c.purged_before < highest_ms)
            .values(purged_before=highest_ms)
        )
    return result


def counts(engine: Engine, schema: str | None = None) -> dict[str, int]:
    """The number of rows in half_message by their state, for `notify doctor`."""
    with engine.connect() as connection, _within(connection, schema):
        states = sa.select(half_message.c.relayed, sa.func.count()).group_by(half_message.c.relayed)
        rows = connection.execute(whole(states))
        by_state = {int(relayed): int(count) for relayed, count in rows}
    return {
        "waiting_for_relay": by_state.get(UNSENT, 0),
        "done": by_state.get(RELAYED, 0),
        "refused_by_server": by_state.get(REFUSED, 0),
        "left_behind": by_state.get(LEFT_BEHIND, 0),
    }
