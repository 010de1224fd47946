"""The relay: moves committed transactions from a table to a queue server, each whole, once. For databases without a
binlog that could be read: PostgreSQL and SQLite.

It claims by state (`relayed = 0`), never by an id above the last one: a transaction that commits later with an
earlier id is not passed over. Sending repeats safely, because the queue knows transactions by their id: a crash
between sending and marking sends again, and nothing is doubled. Several relays of one database share its keys: each
holds leases on buckets of key hashes (storage of the leases: notify/relay/leases.py), so that the order per key
is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify import ids
from notify.backoff import Backoff
from notify.client.http import HttpClient
from notify.errors import InvalidRequest, NotifyError, Unavailable
from notify.kafka_records import SCHEME
from notify.outbox import LOCAL, REFUSED, RELAYED, SERVER, Outbox, present, source_name
from notify.relay.leases import Leases, leases_of
from notify.sinks.sink import Sink, open_sink
from notify.storage.sql import registry
from notify.wire import (
    BridgedTransaction,
    Item,
    Items,
    PackedBridgeBatch,
    PackedMessages,
    PackedPublished,
    PackedTransaction,
    PackedTransactions,
    encode_msgpack,
)

log = logging.getLogger("notify.relay")

T = TypeVar("T")

BATCH = 500
SEND_SECONDS = 10.0
RETRY_SECONDS = 0.2
RETRY_MAX_SECONDS = 5.0
ANNOUNCE_SECONDS = 2.0


@dataclass(slots=True)
class Relayed:
    """Counts of a relay. `refused` ones stay in the table with relayed = 2, for a person to look at."""

    sent: int = 0
    refused: int = 0


class Relay:
    """Moves what waits in one database to one queue server: the service's outbox, and the server's own table."""

    def __init__(self, engine: Engine, url: str) -> None:
        self._engine = engine
        self._url = url
        self._outboxes: list[Outbox] = []
        self._epoch = 0
        self._name = ""
        self._me = f"relay-{os.urandom(4).hex()}"
        self._announced = 0.0
        self._leases: Leases
        self.total = Relayed()

    async def run(self, *, interval: float = 0.2, once: bool = False) -> Relayed:
        """Until cancelled, or with `once` until the outbox is empty. An unreachable server or database is waited for.

        `interval`: seconds between two looks where nobody says that something came. With `once` raises Unavailable if
        the server is away, or if other relays hold all of the keys. Raises InvalidRequest if there is no table.
        """
        to: HttpClient | Sink = open_sink(self._url) if self._url.startswith(SCHEME) else HttpClient(self._url)
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        self._leases = leases_of(self._engine)
        try:
            while True:
                try:
                    moved = await self._round(to)
                    backoff.reset()
                    if not moved and not once:
                        await self._in_thread(self._leases.wait, interval)
                except (Unavailable, sa.exc.OperationalError, sa.exc.InterfaceError) as error:
                    if once:
                        raise Unavailable(f"the relay cannot go on: {error}") from error
                    wait = backoff.next()
                    log.warning("again in %.1f s: %s", wait, error)
                    await asyncio.sleep(wait)
                    continue
                if once and not moved:
                    return self.total
        finally:
            if isinstance(to, HttpClient):
                to.close()
            else:
                await to.close()
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                await asyncio.to_thread(self._leases.close)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run in a thread. Cancelled, it waits for that: whoever has stopped a relay may dispose of its engine."""
        running = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._leases.stop()
            await asyncio.wait([running])
            raise

    async def _round(self, to: HttpClient | Sink) -> bool:
        """One batch of each table: read, send, mark. False if there was nothing."""
        if not self._outboxes:
            self._outboxes = await self._in_thread(self._find)
        await self._in_thread(self._announce)
        if not await self._in_thread(self._leases.renew):
            return False
        moved = False
        for outbox in self._outboxes:
            by_group = await self._in_thread(self._read, outbox)
            if not isinstance(to, HttpClient):
                moved = await self._publish(to, outbox, by_group) or moved
                continue
            for group, transactions in by_group.items():
                items = await (_send(to, group, transactions) if group else _publish_again(to, transactions))
                await self._in_thread(self._mark, outbox, items)
                moved = True
        return moved

    async def _publish(self, sink: Sink, outbox: Outbox, by_group: dict[str, list[BridgedTransaction]]) -> bool:
        """To Kafka, which knows no ids: the position names the batch, so that one that was published is marked."""
        if not self._epoch:
            if not self._leases.all():
                raise Unavailable("another relay of this database publishes to Kafka; one does at a time")
            self._name = self._name or "relay-" + await self._in_thread(self._source)
            self._epoch, position = await sink.claim(self._name)
            if position:
                table, names = json.loads(position)
                last = next(o for o in (LOCAL, SERVER) if o.table.name == table)
                await self._in_thread(self._mark_all, last, names)
                return True
        transactions = [t for found in by_group.values() for t in found]
        if not transactions:
            return False
        names = [t.id for t in transactions]
        position = json.dumps([outbox.table.name, names])
        batch = PackedBridgeBatch(epoch=self._epoch, expected_position="", position=position, transactions=transactions)
        try:
            await sink.append(self._name, batch)
        except NotifyError:
            self._epoch = 0  # claim again, and see what became of it
            raise
        await self._in_thread(self._mark_all, outbox, names)
        self.total.sent += len(names)
        return True

    def _mark_all(self, outbox: Outbox, names: Sequence[str]) -> None:
        with self._engine.begin() as connection:
            outbox.mark(connection, names, RELAYED)

    def _source(self) -> str:
        with self._engine.connect() as connection:
            return source_name(connection)

    def _announce(self) -> None:
        """Say in the server's registry that this relay is there, where the database has one."""
        now = time.monotonic()
        if SERVER not in self._outboxes or now - self._announced < ANNOUNCE_SECONDS:
            return
        self._announced = now
        with self._engine.begin() as connection:
            detail = {"sent": self.total.sent, "refused": self.total.refused}
            registry.heartbeat(connection, registry.Member(self._me, "relay", detail=detail))

    def _find(self) -> list[Outbox]:
        found = present(self._engine)
        if not found:
            raise InvalidRequest(
                f"the database has neither {LOCAL.table.name} nor {SERVER.table.name}: run create_tables in the "
                "service, or `notify storage upgrade`"
            )
        return found

    def _read(self, outbox: Outbox) -> dict[str, list[BridgedTransaction]]:
        """The oldest waiting transactions of the buckets that are ours, whole, by producer group."""
        by_group: dict[str, list[BridgedTransaction]] = defaultdict(list)
        with self._engine.connect() as connection:
            names = outbox.oldest(connection, BATCH, self._leases.mine(outbox.table))
            for t in outbox.read(connection, names) if names else []:
                by_group[t.producer_group].append(t)
        return by_group

    def _mark(self, outbox: Outbox, items: Sequence[Item]) -> None:
        """Mark what the server has, and what it will never take."""
        taken = [item.id for item in items if item.status in (200, 201)]
        refused = [item for item in items if 400 <= item.status < 500 and item.status != 429]
        for item in refused:
            log.error("the server refuses %s: %s (%s)", item.id, item.detail, item.code)
        with self._engine.begin() as connection:
            outbox.mark(connection, taken, RELAYED)
            outbox.mark(connection, [item.id for item in refused], REFUSED)
        self.total.sent += len(taken)
        self.total.refused += len(refused)
        if not taken and not refused:
            raise Unavailable(f"the server took none of {len(items)} transactions: {items[0].detail}")


async def _send(to: HttpClient, group: str, transactions: Sequence[BridgedTransaction]) -> list[Item]:
    """Transactions of one producer group to a queue server; what became of each."""
    sent = [PackedTransaction(id=t.id, messages=t.messages, committed=True) for t in transactions]
    body = encode_msgpack(PackedTransactions(producer_group=group, transactions=sent))
    return msgspec.msgpack.decode(await to.call("POST", "/v1/transactions", body, SEND_SECONDS), type=Items).items


async def _publish_again(to: HttpClient, transactions: Sequence[BridgedTransaction]) -> list[Item]:
    """Messages that were published without a transaction, and so belong to no producer group: as they came, by id."""
    sent = []
    for t in transactions:
        (message,) = t.messages
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        sent.append(PackedPublished(**fields, id=ids.message_id(ids.from_text(t.id), 0)))
    answer = await to.call("POST", "/v1/messages", encode_msgpack(PackedMessages(messages=sent)), SEND_SECONDS)
    items = msgspec.msgpack.decode(answer, type=Items).items
    for item, t in zip(items, transactions, strict=True):
        item.id = t.id
    return items
