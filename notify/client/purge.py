"""Purging local rows: only what is final on the server goes; a forced purge says up to when nothing can be known."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify import ids
from notify.client.http import items_for
from notify.client.inbox import DAY
from notify.client.old_rows import (
    CLOCK_SKEW,
    OldTransaction,
    delete_transactions,
    instant_before,
    note_purged,
    oldest_transactions,
)
from notify.client.servers import Servers
from notify.client.table import notify_source
from notify.databases import REFUSED, RELAYED, UNSENT, in_transaction, in_transaction_async
from notify.errors import InvalidRequest, NotifyError
from notify.wire import Item, OutcomeItem, Outcomes, States, encode_msgpack

log = logging.getLogger("notify.client")
T = TypeVar("T")

IDS_RETENTION_SECONDS = 7 * DAY
"""For so long a server knows what became of a transaction, by default; one that is undecided, for ever."""
BATCH = 1000
SMALL_BATCH = 500
PAUSE_SECONDS = 0.2
"""Between two batches of a producer's purge, so that it takes little of the database and of the server."""
EVERY_SECONDS = 3600.0
CLOSE_SECONDS = 8.0
FINAL = ("COMMITTED", "ROLLED_BACK")
ASK_SECONDS = 30.0


def check_purge_after(seconds: float | None) -> None:
    """Raises InvalidRequest for less than a day: checks, the audit and what moves an outbox still need younger rows."""
    if seconds is not None and not seconds >= DAY:
        raise InvalidRequest(
            f"purge_after is {seconds!r}; it is a number of seconds, {DAY:g} at least, or None: nothing is purged",
            "out_of_bounds",
        )


@dataclass(slots=True)
class Purged:
    """Transactions looked at, rows deleted, transactions kept because the server still has them open."""

    looked_at: int = 0
    rows: int = 0
    kept: int = 0


async def purge(
    engine: Engine,
    url: str,
    *,
    older_than: float,
    ids_retention: float = IDS_RETENTION_SECONDS,
    max_batches: int = 1000,
) -> Purged:
    """Delete rows older than `older_than` seconds whose transactions are final on the server.

    Each is asked for at the shard that its row names: another one does not know it, which says nothing. One that its
    shard does not know goes only if it is older than the ids' retention there, by the database's clock: an unknown
    younger one may be a half that is still on its way. What waits in the outbox goes only if the server says that it
    is committed there. Raises Unavailable if the server does not answer; nothing is lost then.
    """
    http = Servers(url, "transactions")
    result = Purged()
    after = ""
    try:
        for _ in range(max_batches):
            with engine.connect() as connection:
                rows, forgotten_ms = _read_old(connection, older_than, ids_retention, BATCH, after)
            final = await _final(http, rows, forgotten_ms)
            with engine.begin() as connection:
                result.rows += _delete(connection, final, older_than)
            result.looked_at += len(rows)
            result.kept += len(rows) - len(final)
            if len(rows) < BATCH:
                break
            after = rows[-1].id
    finally:
        await http.aclose()
    return result


def _read_old(
    connection: Connection, older_than: float, ids_retention: float, limit: int, after: str
) -> tuple[Sequence[OldTransaction], float]:
    """Old transactions, and up to which time (milliseconds) a server has forgotten the ids of final ones."""
    rows = oldest_transactions(connection, older_than, limit, after, waiting=True)
    # A producer's clock, which is in the ids, may run ahead of the database's.
    forgotten = instant_before(connection, ids_retention) - CLOCK_SKEW
    return rows, forgotten.replace(tzinfo=UTC).timestamp() * 1000


async def _final(http: Servers, rows: Sequence[OldTransaction], forgotten_ms: float) -> list[str]:
    """Those that the server has an outcome of, or has had and forgotten."""
    by_place: dict[tuple[str, str], list[OldTransaction]] = defaultdict(list)
    for row in rows:
        by_place[(row.producer_group, row.shards)].append(row)
    final: list[str] = []
    for (group, shards), some in by_place.items():
        answers = [await _ask(http, group, shard, [row.id for row in some]) for shard in shards.split(",")]
        for row, *items in zip(some, *answers, strict=True):
            is_old = ids.milliseconds(ids.from_text(row.id)) < forgotten_ms and not row.is_waiting
            if all(item.state in FINAL or (item.status == 404 and is_old) for item in items):
                final.append(row.id)
    return final


def _delete(connection: Connection, names: Sequence[str], older_than: float) -> int:
    """Delete the rows of these, and note for the audit from when on rows are whole; how many rows."""
    if names:
        note_purged(connection, notify_source.c.rows_from, older_than)
    return delete_transactions(connection, names)


class RowPurge:
    """A producer's rows, purged while it runs: once an hour, in small batches, beside its transactions.

    Only rows of its own group: it may not ask for others.
    """

    def __init__(self, http: Servers, group: str, engine: Any, purge_after: float) -> None:
        """`engine`: an Engine or an AsyncEngine; `purge_after` in seconds."""
        self._http, self._group, self._engine, self._purge_after = http, group, engine, purge_after
        self._under_way: asyncio.Future[Any] | None = None

    async def run(self) -> None:
        """Until cancelled. A database or server that is away is tried again an hour later."""
        await asyncio.sleep(random.uniform(0, EVERY_SECONDS))  # instances of a group start together
        while True:
            try:
                await self.once()
            except (sa.exc.SQLAlchemyError, NotifyError, OSError) as error:
                log.warning("old half_message rows were not purged; again later: %s", str(error)[:300])
            except Exception:
                log.exception("old half_message rows were not purged; again later")
            await asyncio.sleep(EVERY_SECONDS)

    async def once(self) -> Purged:
        """Look at every old row once. Raises Unavailable, and what the database says."""
        result = Purged()
        after = ""
        # As long as any server keeps ids by default, also where rows go earlier.
        forgotten = max(self._purge_after, IDS_RETENTION_SECONDS)
        while True:
            rows, forgotten_ms = await self._call(_read_old, self._purge_after, forgotten, SMALL_BATCH, after)
            own_rows = [row for row in rows if row.producer_group == self._group]
            final = await _final(self._http, own_rows, forgotten_ms)
            if final:
                result.rows += await self._call(_delete, final, self._purge_after)
            result.looked_at += len(own_rows)
            result.kept += len(own_rows) - len(final)
            if len(rows) < SMALL_BATCH:
                return result
            after = rows[-1].id
            await asyncio.sleep(PAUSE_SECONDS)

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of a connection in a transaction of its own, and return its result.

        A cancelled purge does not cut it short: a driver's connection that is cut in a statement is lost to its pool.
        """
        if hasattr(self._engine, "sync_engine"):
            self._under_way = asyncio.ensure_future(in_transaction_async(self._engine, function, *arguments))
        else:
            self._under_way = asyncio.ensure_future(
                asyncio.to_thread(in_transaction, self._engine, function, *arguments)
            )
        self._under_way.add_done_callback(_noted)
        told: T = await asyncio.shield(self._under_way)
        return told

    async def close(self) -> None:
        """Wait for what is under way in the database, for a while; `run` is cancelled already."""
        if self._under_way is not None and not self._under_way.done():
            await asyncio.wait([self._under_way], timeout=CLOSE_SECONDS)


async def _ask(http: Servers, group: str, shard: str, names: Sequence[str]) -> list[Item]:
    """How transactions stand on a shard; where a row names none (tombstones, the outbox): on any server, or where each
    has a log of its own, on the one that knows them.

    An outcome UNKNOWN decides nothing, and it is refused with 421 by a server that does not have the shard: what such
    a one does not know is not taken for unknown. (A question for states names no shard.)
    """
    if shard:
        outcomes = [OutcomeItem(id=name, outcome="UNKNOWN", shard=shard) for name in names]
        body = encode_msgpack(Outcomes(producer_group=group, outcomes=outcomes))
        answer = await http.call("POST", "/v1/transactions/outcomes", body, ASK_SECONDS, shard=shard)
        return items_for(names, answer, http)
    await http.known()
    body = encode_msgpack(States(producer_group=group, ids=list(names)))
    known: dict[str, Item] = {}
    for place in http.places() or (None,):
        answer = await http.call("POST", "/v1/transactions/states", body, ASK_SECONDS, shard=place)
        for item in items_for(names, answer, http):
            if item.id not in known or known[item.id].status == 404:
                known[item.id] = item
    return [known[name] for name in names]


def _noted(done: asyncio.Future[Any]) -> None:
    """Look at the error of what was under way when its purge was cancelled: nobody else does."""
    if not done.cancelled():
        done.exception()


def purge_by_force(engine: Engine, *, older_than: float) -> Purged:
    """Delete rows older than so many seconds without asking.

    In the same transaction the database notes up to which id its rows are gone, so that a check for a half up to there
    whose commit does not stand any more is answered UNKNOWN, and never with a tombstone: an operator has to decide
    those. The ids are compared, which say a producer's time, and not the times of any other clock.
    """
    result = Purged()
    with engine.begin() as connection:
        note_purged(connection, notify_source.c.rows_from, older_than)
        highest_ms = 0
        while rows := oldest_transactions(connection, older_than, BATCH):
            result.rows += delete_transactions(connection, [row.id for row in rows])
            result.looked_at += len(rows)
            highest_ms = max(highest_ms, ids.milliseconds(ids.from_text(rows[-1].id)))
        connection.execute(
            notify_source.update().where(notify_source.c.purged_before < highest_ms).values(purged_before=highest_ms)
        )
    return result


def counts(engine: Engine) -> dict[str, int]:
    """Rows by what they wait for: for `notify doctor`."""
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT relayed, COUNT(*) FROM half_message GROUP BY relayed"))
        found = {int(relayed): int(count) for relayed, count in rows}
    return {
        "waiting_for_relay": found.get(UNSENT, 0),
        "done": found.get(RELAYED, 0),
        "refused_by_server": found.get(REFUSED, 0),
    }
