"""Purging local rows: only what is final on the server goes; a forced purge says up to when nothing can be known."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify import ids
from notify.client.servers import Servers
from notify.client.table import delete_transactions, note_purged, notify_source, oldest_transactions
from notify.wire import Items, States, encode_msgpack

BATCH = 1000
FINAL = ("COMMITTED", "ROLLED_BACK")


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

    One that the server does not know goes only if it is older than the ids' retention there: an unknown younger one
    may be a half that is still on its way. Raises Unavailable if the server does not answer; nothing is lost then.
    """
    http = Servers(url, "transactions")
    result = Purged()
    after = ""
    try:
        for _ in range(max_batches):
            with engine.connect() as connection:
                rows = oldest_transactions(connection, older_than, BATCH, after)
            by_group: dict[str, list[str]] = defaultdict(list)
            for group, name in rows:
                by_group[group].append(name)
            final: list[str] = []
            for group, names in by_group.items():
                request = encode_msgpack(States(producer_group=group, ids=names))
                answer = await http.call("POST", "/v1/transactions/states", request, 30)
                for item in msgspec.msgpack.decode(answer, type=Items).items:
                    if item.state in FINAL or (item.status == 404 and _age(item.id) > ids_retention):
                        final.append(item.id)
            with engine.begin() as connection:
                if final:
                    note_purged(connection, notify_source.c.rows_from, older_than)
                result.rows += delete_transactions(connection, final)
            result.looked_at += len(rows)
            result.kept += len(rows) - len(final)
            if len(rows) < BATCH:
                break
            after = rows[-1][1]
    finally:
        await http.aclose()
    return result


def _age(transaction_id: str) -> float:
    return time.time() - ids.milliseconds(ids.from_text(transaction_id)) / 1000


def purge_by_force(engine: Engine, *, older_than: float) -> Purged:
    """Delete rows older than so many seconds without asking.

    In the same transaction the database notes up to when its rows are gone, so that a check for an older half is
    answered UNKNOWN and never with a tombstone: an operator has to decide those.
    """
    result = Purged()
    before_ms = round((time.time() - older_than) * 1000)
    with engine.begin() as connection:
        connection.execute(
            notify_source.update().where(notify_source.c.purged_before < before_ms).values(purged_before=before_ms)
        )
        note_purged(connection, notify_source.c.rows_from, older_than)
        while rows := oldest_transactions(connection, older_than, BATCH):
            result.rows += delete_transactions(connection, [name for _, name in rows])
            result.looked_at += len(rows)
    return result


def counts(engine: Engine) -> dict[str, int]:
    """Rows by what they wait for: for `notify doctor`."""
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT relayed, COUNT(*) FROM half_message GROUP BY relayed"))
        found = {int(relayed): int(count) for relayed, count in rows}
    return {"waiting_for_relay": found.get(0, 0), "done": found.get(1, 0), "refused_by_server": found.get(2, 0)}
