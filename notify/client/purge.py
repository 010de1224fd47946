"""Purging local rows: only what is final on the server goes; a forced purge says up to when nothing can be known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify import ids
from notify.client.servers import Servers
from notify.client.table import (
    CLOCK_SKEW,
    delete_transactions,
    instant_before,
    note_purged,
    notify_source,
    oldest_transactions,
)
from notify.wire import Item, Items, OutcomeItem, Outcomes, States, encode_msgpack

BATCH = 1000
FINAL = ("COMMITTED", "ROLLED_BACK")
ASK_SECONDS = 30.0


@dataclass(slots=True)
class Purged:
    """Transactions looked at, rows deleted, transactions kept because the server still has them open."""

    looked_at: int = 0
    rows: int = 0
    kept: int = 0


async def purge(
    engine: Engine, url: str, *, older_than: float, ids_retention: float = 7 * 86_400.0, max_batches: int = 1000
) -> Purged:
    """Delete rows older than `older_than` seconds whose transactions are final on the server.

    Each is asked for at the shard that its row names: another one does not know it, which says nothing. One that its
    shard does not know goes only if it is older than the ids' retention there, by the database's clock: an unknown
    younger one may be a half that is still on its way. Raises Unavailable if the server does not answer; nothing is
    lost then.
    """
    http = Servers(url, "transactions")
    result = Purged()
    after = ""
    try:
        for _ in range(max_batches):
            with engine.connect() as connection:
                rows = oldest_transactions(connection, older_than, BATCH, after)
                # A producer's clock, which is in the ids, may run ahead of the database's.
                forgotten = instant_before(connection, ids_retention) - CLOCK_SKEW
            forgotten_ms = forgotten.replace(tzinfo=UTC).timestamp() * 1000
            by_place: dict[tuple[str, str], list[str]] = defaultdict(list)
            for row in rows:
                by_place[(row.producer_group, row.shards)].append(row.id)
            final: list[str] = []
            for (group, shards), names in by_place.items():
                answers = [await _ask(http, group, shard, names) for shard in shards.split(",")]
                for name, *items in zip(names, *answers, strict=True):
                    is_old = ids.milliseconds(ids.from_text(name)) < forgotten_ms
                    if all(item.state in FINAL or (item.status == 404 and is_old) for item in items):
                        final.append(name)
            with engine.begin() as connection:
                if final:
                    note_purged(connection, notify_source.c.rows_from, older_than)
                result.rows += delete_transactions(connection, final)
            result.looked_at += len(rows)
            result.kept += len(rows) - len(final)
            if len(rows) < BATCH:
                break
            after = rows[-1].id
    finally:
        await http.aclose()
    return result


async def _ask(http: Servers, group: str, shard: str, names: Sequence[str]) -> list[Item]:
    """How transactions stand on a shard; where a row names none (tombstones, the outbox): on any server.

    An outcome UNKNOWN decides nothing, and it is refused with 421 by a server that does not have the shard: what such
    a one does not know is not taken for unknown. (A question for states names no shard.)
    """
    if shard:
        outcomes = [OutcomeItem(id=name, outcome="UNKNOWN", shard=shard) for name in names]
        body = encode_msgpack(Outcomes(producer_group=group, outcomes=outcomes))
        answer = await http.call("POST", "/v1/transactions/outcomes", body, ASK_SECONDS, shard=shard)
    else:
        body = encode_msgpack(States(producer_group=group, ids=list(names)))
        answer = await http.call("POST", "/v1/transactions/states", body, ASK_SECONDS)
    return msgspec.msgpack.decode(answer, type=Items).items


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
    return {"waiting_for_relay": found.get(0, 0), "done": found.get(1, 0), "refused_by_server": found.get(2, 0)}
