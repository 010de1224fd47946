"""A bridge alone sends what a killed producer in mode auto left behind, from the tables of a primary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.errors import Unavailable
from notify.runtime.databases import LEFT_BEHIND, RELAYED
from notify.testing.binlog_server import BinlogServer
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.bridges import binlog_reader, grant, move, move_until, outbox
from tests.support.http import ask
from tests.support.left_behind import delivered, leave_and_die, of_key, rows
from tests.support.shop import make_engine


@pytest.fixture
def nowhere() -> str:
    """The address of a server that is unreachable."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def opened(stack: ExitStack, url: str) -> sa.Engine:
    """An engine with the SDK's tables."""
    engine = make_engine(url)
    stack.callback(engine.dispose)
    create_tables(engine)
    return engine


def test_a_bridge_sends_what_a_killed_producer_left(
    binlog_url: str, server: ServerProcess, unique: str, nowhere: str, stack: ExitStack
) -> None:
    sends_once(opened(stack, binlog_url), binlog_url, server, unique, nowhere)


def test_a_bridge_on_postgresql_sends_what_a_killed_producer_left(
    wal_url: str, server: ServerProcess, unique: str, nowhere: str, stack: ExitStack
) -> None:
    sends_once(opened(stack, wal_url), wal_url, server, unique, nowhere)


def sends_once(engine: sa.Engine, url: str, server: ServerProcess, unique: str, nowhere: str) -> None:
    """Beside messages of an outbox, whose bridge reads the log of all of this."""
    outbox(url, f"{unique}-outbox", range(3))
    leave_and_die(nowhere, unique, url, of_key("k", "a", "b"))
    assert move(url, server).totals.left_behind_sent == 2
    assert [relayed for relayed, _ in rows(engine)].count(RELAYED) == 2
    assert delivered(server.url, unique) == ["a", "b"]
    assert len(delivered(server.url, f"{unique}-outbox")) == 3
    leave_and_die(nowhere, unique, url, of_key("k", "c"))
    move_until(url, server, lambda: LEFT_BEHIND not in [relayed for relayed, _ in rows(engine)])
    move(url, server)  # it reads in the log what has become of these rows
    assert delivered(server.url, unique) == ["a", "b", "c"]
    assert len(delivered(server.url, f"{unique}-outbox")) == 3


def test_a_bridge_of_a_replica_leaves_them(
    binlog_url: str,
    binlog_server: BinlogServer,
    server: ServerProcess,
    unique: str,
    nowhere: str,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its user may write all the same; the primary's rows would name no shard, or another one."""
    engine = opened(stack, binlog_url)
    leave_and_die(nowhere, unique, binlog_url, of_key("k", "a"))
    binlog_server.execute("SET GLOBAL read_only = ON")
    move(binlog_url, server)
    assert rows(engine) == [(LEFT_BEHIND, "")] and "reads a replica" in caplog.text
    binlog_server.execute("SET GLOBAL read_only = OFF")
    move(binlog_url, server)
    assert delivered(server.url, unique) == ["a"]


def test_a_bridge_of_a_replica_that_takes_writes_leaves_them(
    binlog_url: str,
    binlog_server: BinlogServer,
    server: ServerProcess,
    unique: str,
    nowhere: str,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also one whose connection has a name, and where its user may not see whether it is one."""
    engine = opened(stack, binlog_url)
    leave_and_die(nowhere, unique, binlog_url, of_key("k", "a"))
    if isinstance(binlog_server, MariaDbServer):
        follow, end = "CHANGE MASTER 'named' TO MASTER_HOST = '127.0.0.1'", "RESET SLAVE 'named' ALL"
        right = "REPLICA MONITOR"
    else:
        follow, end = "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1'", "RESET REPLICA ALL"
        right = "REPLICATION CLIENT"
    name = unique[:12]
    with binlog_reader(binlog_server, binlog_url, name, {"*": "SELECT, UPDATE"}) as reader:
        move(reader, server)  # it has a position from now on, without which MySQL asks for the right
        assert delivered(server.url, unique) == ["a"]
        leave_and_die(nowhere, unique, binlog_url, of_key("k", "b"))
        binlog_server.execute(follow)
        try:
            move(reader, server)
            assert (LEFT_BEHIND, "") in rows(engine) and "reads a replica" in caplog.text
            binlog_server.execute(f"REVOKE {right} ON *.* FROM '{name}'@'127.0.0.1'")
            move(reader, server)
            assert (LEFT_BEHIND, "") in rows(engine) and f"GRANT {right} ON *.* TO '{name}'" in caplog.text
        finally:
            binlog_server.execute(end)
        binlog_server.execute(f"GRANT {right} ON *.* TO '{name}'@'127.0.0.1'")
        move(reader, server)
    assert delivered(server.url, unique) == ["a", "b"]


def test_a_bridge_that_may_mark_no_rows_stores_no_halves(
    binlog_url: str,
    binlog_server: BinlogServer,
    server: ServerProcess,
    unique: str,
    nowhere: str,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = opened(stack, binlog_url)
    leave_and_die(nowhere, unique, binlog_url, of_key("k", "a"))
    with binlog_reader(binlog_server, binlog_url, unique[:12], {"*": "SELECT"}) as reader:
        with pytest.raises(Unavailable, match="what producers left behind waits in its rows"):
            move(reader, server)
        assert rows(engine) == [(LEFT_BEHIND, "")]
        assert ask(server.url, "GET", f"/v1/admin/transactions?producer_group={unique}")[1]["transactions"] == []
        grant(binlog_server, binlog_url, unique[:12], {"half_message": "UPDATE"})
        move(reader, server)
    assert delivered(server.url, unique) == ["a"]
