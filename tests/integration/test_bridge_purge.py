"""`notify purge` and what a bridge has moved: gone once the queue's position is behind it, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from notify.binlog_bridge import purge
from notify.binlog_bridge.binlog import source
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.purge import purge_moved
from notify.client.tables.definitions import half_message
from notify.errors import InvalidRequest, Unavailable
from notify.protocol import ids
from notify.testing.binlog_server import BinlogServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background, repeated
from tests.support.bridges import move, outbox, writing
from tests.support.clock import PATIENCE_SECONDS
from tests.support.commands import cli


@pytest.fixture
def url(binlog_url: str) -> str:
    return binlog_url


def left(url: str) -> int:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = connection.scalar(sa.select(sa.func.count()).select_from(half_message))
    engine.dispose()
    return int(rows or 0)


@pytest.mark.long
def test_a_row_that_is_refused_while_a_purge_runs_stays(
    url: str, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an old row that waited when the purge looked, and on the list when the bridge had passed it."""
    outbox(url, unique, range(1))
    move(url, server)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(half_message.update().values(transaction_id=ids.to_text(ids.new_id()), topic="no topic"))
        row = dict(connection.execute(sa.select(half_message)).mappings().one())
        connection.execute(half_message.delete())
        connection.execute(half_message.insert().values(row))
    outbox(url, unique, range(1, 2))
    position, looks = source.current_position, []

    def moved_meanwhile(connection: sa.Connection) -> Any:
        end = position(connection)
        looks.append(end)
        if len(looks) == 1:  # the purge has read which rows are old
            move(url, server)
        return end

    monkeypatch.setattr(source, "current_position", moved_meanwhile)
    assert asyncio.run(purge_moved(engine, server.url, older_than=0)) == 1
    with engine.connect() as connection:
        assert connection.scalars(sa.select(half_message.c.transaction_id)).all() == [row["transaction_id"]]
    engine.dispose()


@pytest.mark.long
def test_a_purge_ends_while_rows_are_written(
    url: str, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows became old as it deleted."""
    monkeypatch.setattr(purge, "BATCH", 1)
    outbox(url, unique, range(7))
    engine = sa.create_engine(url)
    bridge = Bridge([url], server.url)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.rows >= 6, "the bridge to move the first rows")
        with repeated(writing(engine, unique, "messages"), threads=1, pause_seconds=0.02, passing=()):
            purging = asyncio.wait_for(purge_moved(engine, server.url, older_than=0), PATIENCE_SECONDS)
            assert asyncio.run(purging) >= 6
    assert left(url) > 0
    engine.dispose()


@pytest.mark.long
def test_rows_that_a_bridge_moved_are_purged_and_no_others(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue forgets ids after a week, and one without the transactions role is never asked for them."""
    outbox(url, unique, range(3))
    words = ("purge", "--dsn", url, "--url", server.url, "--older-than", "0", "--json")
    engine = sa.create_engine(url)
    assert asyncio.run(purge_moved(engine, server.url, older_than=0)) == 0  # no bridge has written for it
    move(url, server)
    assert asyncio.run(purge_moved(engine, server.url, older_than=3600)) == 0
    outbox(url, unique, range(4, 6))
    monkeypatch.setattr(purge, "WAIT_SECONDS", 0.5)
    with pytest.raises(Unavailable, match="is it running"):
        asyncio.run(purge_moved(engine, server.url, older_than=0))
    assert left(url) == 5
    move(url, server)
    code, done = cli(*words)
    assert code == 0 and done["rows"] == 5 and left(url) == 0
    # A position of another history is behind nothing.
    outbox(url, unique, range(8, 9))
    move(url, server)
    binlog_server.forget_binlogs()
    outbox(url, unique, range(9, 10))
    with pytest.raises(InvalidRequest, match="another history"):
        asyncio.run(purge_moved(engine, server.url, older_than=0))
    assert left(url) == 2
    engine.dispose()
