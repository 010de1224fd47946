"""The bridge on PostgreSQL's log: which rows it moves, which sources it refuses; it never skips a row silently."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.bridge import Bridge
from notify.client import create_tables
from notify.movers.relay.relay import Relay
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import end_once_while_written, move, numbers, outbox
from tests.support.databases import drop_slots
from tests.support.groups import drain, subscribe
from tests.support.servers import make_storage
from tests.support.sql_storage import put_in_every_state
from tests.support.wal import insert


@pytest.fixture
def url(wal_url: str) -> str:
    return wal_url


@pytest.mark.parametrize("what", ["other rows", pytest.param("messages", marks=pytest.mark.long)])
def test_once_ends_where_the_log_ended_at_the_start(url: str, server: ServerProcess, unique: str, what: str) -> None:
    """Beside servers, whose heartbeats go to the log, `notify bridge --once` did not end."""
    end_once_while_written(url, server, unique, what)


@pytest.mark.long
def test_the_servers_table_is_bridged_when_it_commits(url: str, server: ServerProcess, unique: str) -> None:
    """Bodies are long: the log has them with an update only if the replica identity is FULL."""
    subscribe(server.url, unique, unique)
    make_storage(url)
    long = os.urandom(10_000).hex()
    committed = put_in_every_state(url, unique, long=long)
    assert move(url, server).totals.stored == 20
    committed += put_in_every_state(url, unique, 40, long=long)
    bridge = move(url, server)
    assert (bridge.totals.stored, bridge.totals.rows) == (20, 40)
    received = numbers(server, unique, 80)
    assert sorted(received) == sorted(committed)
    # The messages of a transaction stay together, in their order.
    assert all(second == first + 1 for first, second in zip(received[::2], received[1::2], strict=True))


@pytest.mark.long
def test_messages_after_a_lost_slot_are_backfilled(url: str, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(4))
    move(url, server)
    drop_slots(url)
    outbox(url, unique, range(4, 8))
    with pytest.raises(Exception, match=r"has no slot .*--backfill"):
        move(url, server)
    move(url, server, fill=True)
    outbox(url, unique, range(8, 12))
    assert move(url, server).totals.rows == 3
    assert sorted(numbers(server, unique, 9)) == [n for n in range(12) if n % 4 != 3]


KEYS, EACH = 4, 60


def test_a_bridge_takes_over_from_a_relay_that_still_runs(url: str, server: ServerProcess, unique: str) -> None:
    """The relay may still run when `notify bridge` is started, and producers write all the time. No message is lost,
    doubled, or out of its key's order."""
    subscribe(server.url, unique, unique)
    engine = sa.create_engine(url)
    create_tables(engine)

    def write(key: str, numbers: range) -> None:
        for n in numbers:
            with engine.begin() as connection:
                insert(connection, unique, n, key=key)

    keys = [f"k{n}" for n in range(KEYS)]
    bridge = Bridge([url], server.url)
    with in_background(Relay(engine, server.url).run()) as relaying, ThreadPoolExecutor(KEYS) as writers:
        list(writers.map(lambda key: write(key, range(EACH // 3)), keys))
        writing = [writers.submit(write, key, range(EACH // 3, EACH)) for key in keys]
        with in_background(bridge.run()) as bridging:
            for each in writing:
                each.result()
            bridging.until(lambda: bridge.totals.connections, "the bridge to read the log")
            relaying.stop()
    write("last", range(1))
    move(url, server)
    received: dict[str, list[int]] = {}
    for message in drain(server.url, unique, unique, KEYS * EACH + 1):
        received.setdefault(message["key"], []).append(json.loads(message["body"])["n"])
    assert received == {f"k{n}": list(range(EACH)) for n in range(KEYS)} | {"last": [0]}
    engine.dispose()
