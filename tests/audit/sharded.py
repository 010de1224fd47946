"""A trade over databases as storage: two shards have the halves, and bridges move their messages to one queue's log."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from notify.protocol.wire import BridgeBatch
from notify.runtime.databases import RELAYED, UNSENT
from notify.spark.inputs.databases import Database
from notify.spark.result import Inputs
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.store import LogStore
from notify.storage.records import State
from notify.storage.sql import key_map, schema
from notify.storage.sql.engines import open_engine
from notify.storage.sql.rows import moment_of
from notify.storage.sql.store import SqlStore
from notify.storage.sql.tables import server_half_message, server_shard
from notify.storage.topics import Topic
from tests.audit.trade import AGO_US, SERVICES, TOPICS, WITH_INBOX, WITHOUT_INBOX, Trade, half_of, service_of

SHARDS = ("a", "b")
"""The registry is in the first. The bank's transactions go to the second shard."""


def shard_of(n: int) -> str:
    return SHARDS[n % 2]


def storage_url(trade: Trade, shard: str) -> str:
    return f"sqlite:///{trade.directory}/storage-{shard}.db"


def make_sharded(sound: Trade, to: Path, unmoved: Collection[int] = ()) -> Trade:
    """A copy of a trade, with storages and a queue's log instead of its log. `unmoved`: what the bridges left out."""
    trade = sound.copy(to)
    for service, shard in zip(("shop", "bank"), SHARDS, strict=True):
        trade.execute(service, f"UPDATE half_message SET shards = '{shard}'")
    sources = {shard: asyncio.run(_store(trade, shard, unmoved)) for shard in SHARDS}
    engine = open_engine(storage_url(trade, SHARDS[0]))
    with engine.begin() as connection:
        key_map.make_first(connection, SHARDS)
    engine.dispose()
    shutil.rmtree(trade.log)
    asyncio.run(_queue(trade, sources, unmoved))
    return trade


async def _store(trade: Trade, shard: str, unmoved: Collection[int]) -> str:
    """Store the halves of a shard and their outcomes; its source id."""
    url = storage_url(trade, shard)
    engine = open_engine(url)
    schema.upgrade(engine, shard)
    store = SqlStore(url, shard)
    await store.open(trade.first_us)
    own = [n for n in range(trade.count) if shard_of(n) == shard]
    made = [half_of(trade, n) for n in own]
    await store.put(made, trade.first_us)
    await store.decide([(t.id, t.producer_group, State.COMMITTED) for t in made], trade.first_us)
    await store.close()
    t = server_half_message.c
    with engine.begin() as connection:
        for n in own:
            at: dict[str, Any] = {"created_at": moment_of(trade.at(n)), "decided_at": moment_of(trade.at(n) + 2000)}
            at["relayed"] = UNSENT if n in unmoved else RELAYED
            connection.execute(server_half_message.update().where(t.transaction_id == trade.name(n)).values(at))
        source = str(connection.execute(sa.select(server_shard.c.source)).scalar_one())
    engine.dispose()
    return source


async def _queue(trade: Trade, sources: dict[str, str], unmoved: Collection[int]) -> None:
    """Write the queue's log, as bridges of both shards do."""
    now_us = trade.first_us
    store = LogStore(trade.log, clock=lambda: now_us)
    await store.open(now_us)
    for topic in TOPICS.values():
        await store.create_topic(Topic(topic))
        await store.subscribe(Subscription(WITH_INBOX, topic, inbox_from_us=0), [0])
    await store.subscribe(Subscription(WITHOUT_INBOX, TOPICS["shop"]), [0])
    for source in sources.values():
        await store.append_from_bridge(source, BridgeBatch(1, "", "", claim=True), [], now_us)
    positions = dict.fromkeys(SHARDS, "")
    offsets = dict.fromkeys(SHARDS, 0)
    for n in sorted(set(range(trade.count)) - set(unmoved)):
        now_us, shard = trade.at(n) + 2000, shard_of(n)
        bridged = msgspec.structs.replace(half_of(trade, n), source=sources[shard], instance="", committed=True)
        batch = BridgeBatch(1, positions[shard], str(n))
        positions[shard] = str(n)
        await store.append_from_bridge(sources[shard], batch, [bridged], now_us)
        groups = (WITH_INBOX, WITHOUT_INBOX) if shard == "a" else (WITH_INBOX,)
        for group in groups:
            await store.settle(group, TOPICS[service_of(n)], 0, [(offsets[shard], 1)], SettleKind.ACK, now_us + 2000)
        offsets[shard] += 1
    await store.sync()
    now_us += AGO_US // 2
    await store.checkpoint()
    await store.close()


@contextmanager
def inputs_of(trade: Trade, storages: Sequence[str] = SHARDS, services: Sequence[str] = SERVICES) -> Iterator[Inputs]:
    with ExitStack() as stack, trade.inputs(services) as inputs:
        opened = []
        for shard in storages:
            opened.append(Database(storage_url(trade, shard), f"shard-{shard}"))
            stack.callback(opened[-1].close)
        yield replace(inputs, storages=opened)
