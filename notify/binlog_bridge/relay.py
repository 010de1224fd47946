"""The relay: moves outbox transactions from a half_message table to the server, each whole, once.

It claims by state (`relayed = 0`), never by an id above the last one: a transaction that commits later with an
earlier id is not passed over. Sending repeats safely, because the server knows transactions by their id: a crash
between sending and marking sends again, and nothing is doubled. Two relays side by side do no harm for that reason,
but only one keeps the order of commits per key.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.client.http import HttpClient
from notify.client.table import half_message, is_waiting
from notify.errors import Unavailable
from notify.wire import Item, Items, PackedMessage, PackedTransaction, PackedTransactions, encode_msgpack

log = logging.getLogger("notify.relay")

BATCH = 500
SEND_SECONDS = 10.0
RETRY_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0
RELAYED, REFUSED = 1, 2


@dataclass(slots=True)
class Relayed:
    """What one round did. `refused` ones stay in the table with relayed = 2, for a person to look at."""

    sent: int = 0
    refused: int = 0


class Relay:
    """Moves what is in one database's outbox to one server."""

    def __init__(self, engine: Engine, url: str) -> None:
        self._engine = engine
        self._url = url
        self.total = Relayed()

    async def run(self, *, interval: float = 0.2, once: bool = False) -> Relayed:
        """Until cancelled, or with `once` until the outbox is empty. An unreachable server or database is waited for.

        With `once` raises Unavailable if the server is away.
        """
        http = HttpClient(self._url)
        wait = RETRY_SECONDS
        try:
            while True:
                try:
                    moved = await self._round(http)
                    wait = RETRY_SECONDS
                except (Unavailable, sa.exc.OperationalError) as error:
                    if once:
                        raise Unavailable(f"the relay cannot go on: {error}") from error
                    log.warning("again in %.1f s: %s", wait, error)
                    await asyncio.sleep(wait)
                    wait = min(wait * 2, RETRY_MAX_SECONDS)
                    continue
                if not moved:
                    if once:
                        return self.total
                    await asyncio.sleep(interval)
        finally:
            http.close()

    async def _round(self, http: HttpClient) -> bool:
        """One batch: read, send, mark. False if there was nothing."""
        by_group = await asyncio.to_thread(self._read)
        for group, transactions in by_group.items():
            request = PackedTransactions(producer_group=group, transactions=transactions)
            answer = await http.call("POST", "/v1/transactions", encode_msgpack(request), SEND_SECONDS)
            items = msgspec.msgpack.decode(answer, type=Items).items
            await asyncio.to_thread(self._mark, items)
        return bool(by_group)

    def _read(self) -> dict[str, list[PackedTransaction]]:
        """The oldest waiting transactions, whole, by producer group."""
        t = half_message
        with self._engine.connect() as connection:
            first = (
                sa.select(t.c.transaction_id)
                .where(is_waiting, t.c.message_no == 0)
                .order_by(t.c.created_at, t.c.transaction_id)
                .limit(BATCH)
            )
            names = [str(name) for name in connection.scalars(first)]
            if not names:
                return {}
            rows = connection.execute(
                sa.select(t).where(t.c.transaction_id.in_(names)).order_by(t.c.transaction_id, t.c.message_no)
            ).mappings()
            messages: dict[str, list[PackedMessage]] = defaultdict(list)
            groups: dict[str, str] = {}
            for row in rows:
                messages[row["transaction_id"]].append(_message(row))
                groups[row["transaction_id"]] = row["producer_group"]
        by_group: dict[str, list[PackedTransaction]] = defaultdict(list)
        for name in names:
            by_group[groups[name]].append(PackedTransaction(id=name, messages=messages[name], committed=True))
        return by_group

    def _mark(self, items: Sequence[Item]) -> None:
        """Mark what the server has, and what it will never take."""
        taken = [item.id for item in items if item.status in (200, 201)]
        refused = [item for item in items if 400 <= item.status < 500 and item.status != 429]
        for item in refused:
            log.error("the server refuses %s: %s (%s)", item.id, item.detail, item.code)
        with self._engine.begin() as connection:
            for names, state in ((taken, RELAYED), ([item.id for item in refused], REFUSED)):
                if names:
                    mark = half_message.update().where(half_message.c.transaction_id.in_(names)).values(relayed=state)
                    connection.execute(mark)
        self.total.sent += len(taken)
        self.total.refused += len(refused)
        if not taken and not refused:
            raise Unavailable(f"the server took none of {len(items)} transactions: {items[0].detail}")


def _message(row: Any) -> PackedMessage:
    deliver_at = row["deliver_at"]
    return PackedMessage(
        topic=row["topic"],
        body=row["body"] or b"",
        key=row["key"],
        tag=row["tag"],
        headers=msgspec.json.decode(row["headers"]) if row["headers"] else None,
        delay=row["delay"],
        deliver_at=deliver_at.replace(tzinfo=UTC) if deliver_at is not None else None,
        ttl=row["ttl"],
    )
