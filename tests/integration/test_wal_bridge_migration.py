"""From a relay to a bridge on PostgreSQL: `notify bridge` is the command, and the relay may still run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.bridge import Bridge
from notify.client import create_tables
from notify.movers.relay.relay import Relay
from notify.testing.process import ServerProcess
from tests.support.bridges import move
from tests.support.clock import eventually_async
from tests.support.groups import drain, subscribe
from tests.support.wal import insert

KEYS, EACH = 4, 60


@pytest.fixture
def engine(wal_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(wal_url)
    create_tables(engine)
    yield engine
    engine.dispose()


def test_a_bridge_takes_over_from_a_relay_that_still_runs(
    wal_url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """Producers write all the time. No message is lost, doubled, or out of its key's order."""
    subscribe(server.url, unique, unique)

    def write(key: str, numbers: range) -> None:
        for n in numbers:
            with engine.begin() as connection:
                insert(connection, unique, n, key=key)

    async def run() -> None:
        relay = asyncio.ensure_future(Relay(engine, server.url).run())
        keys = [f"k{n}" for n in range(KEYS)]
        await asyncio.gather(*(asyncio.to_thread(write, key, range(EACH // 3)) for key in keys))
        bridge = Bridge([wal_url], server.url)
        writing = asyncio.gather(*(asyncio.to_thread(write, key, range(EACH // 3, EACH)) for key in keys))
        bridging = asyncio.ensure_future(bridge.run())
        await writing
        await eventually_async(lambda: bridging.done() or bridge.totals.connections, "the bridge to read the log")
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        assert not bridging.done()
        bridging.cancel()
        await asyncio.gather(bridging, return_exceptions=True)

    asyncio.run(run())
    write("last", range(1))
    move(wal_url, server)
    received: dict[str, list[int]] = {}
    for message in drain(server.url, unique, unique, KEYS * EACH + 1):
        received.setdefault(message["key"], []).append(json.loads(message["body"])["n"])
    assert received == {f"k{n}": list(range(EACH)) for n in range(KEYS)} | {"last": [0]}
    assert drain(server.url, unique, unique, 0) == []
