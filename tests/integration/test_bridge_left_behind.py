"""A bridge alone sends what a killed producer in mode auto left behind, from the tables of a primary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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


class Source:
    """A database that a bridge reads, in which producers leave messages of a topic behind."""

    def __init__(self, url: str, server: ServerProcess, topic: str) -> None:
        self.url, self.server, self.topic = url, server, topic
        self.engine = make_engine(url)
        create_tables(self.engine)
        self._nowhere = f"http://127.0.0.1:{free_port()}"

    def leave(self, *bodies: str) -> None:
        leave_and_die(self._nowhere, self.topic, self.url, of_key("k", *bodies))

    @property
    def rows(self) -> list[tuple[int, str]]:
        return rows(self.engine)

    @property
    def delivered(self) -> list[str]:
        return delivered(self.server.url, self.topic)


@pytest.fixture
def source(binlog_url: str, server: ServerProcess, unique: str) -> Iterator[Source]:
    made = Source(binlog_url, server, unique)
    yield made
    made.engine.dispose()


def test_a_bridge_sends_what_a_killed_producer_left(source: Source) -> None:
    sends_once(source)


def test_a_bridge_on_postgresql_sends_what_a_killed_producer_left(
    wal_url: str, server: ServerProcess, unique: str
) -> None:
    source = Source(wal_url, server, unique)
    sends_once(source)
    source.engine.dispose()


def sends_once(source: Source) -> None:
    """Beside messages of an outbox, whose bridge reads the log of all of this."""
    url, server, topic = source.url, source.server, f"{source.topic}-outbox"
    outbox(url, topic, range(3))
    source.leave("a", "b")
    assert move(url, server).totals.left_behind_sent == 2
    assert [relayed for relayed, _ in source.rows].count(RELAYED) == 2
    assert source.delivered == ["a", "b"]
    assert len(delivered(server.url, topic)) == 3
    source.leave("c")
    move_until(url, server, lambda: LEFT_BEHIND not in [relayed for relayed, _ in source.rows])
    move(url, server)  # it reads in the log what has become of these rows
    assert source.delivered == ["a", "b", "c"]
    assert len(delivered(server.url, topic)) == 3


def test_a_bridge_of_a_replica_leaves_them(
    source: Source, binlog_server: BinlogServer, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Its user may write all the same; the primary's rows would name no shard, or another one."""
    source.leave("a")
    binlog_server.execute("SET GLOBAL read_only = ON")
    move(source.url, server)
    assert source.rows == [(LEFT_BEHIND, "")] and "reads a replica" in caplog.text
    binlog_server.execute("SET GLOBAL read_only = OFF")
    move(source.url, server)
    assert source.delivered == ["a"]


def test_a_bridge_of_a_replica_that_takes_writes_leaves_them(
    source: Source, binlog_server: BinlogServer, server: ServerProcess, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose connection has a name, and where its user may not see whether it is one."""
    source.leave("a")
    if isinstance(binlog_server, MariaDbServer):
        follow, end = "CHANGE MASTER 'named' TO MASTER_HOST = '127.0.0.1'", "RESET SLAVE 'named' ALL"
        right = "REPLICA MONITOR"
    else:
        follow, end = "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1'", "RESET REPLICA ALL"
        right = "REPLICATION CLIENT"
    name = unique[:12]
    with binlog_reader(binlog_server, source.url, name, {"*": "SELECT, UPDATE"}) as reader:
        move(reader, server)  # it has a position from now on, without which MySQL asks for the right
        assert source.delivered == ["a"]
        source.leave("b")
        binlog_server.execute(follow)
        try:
            move(reader, server)
            assert (LEFT_BEHIND, "") in source.rows and "reads a replica" in caplog.text
            binlog_server.execute(f"REVOKE {right} ON *.* FROM '{name}'@'127.0.0.1'")
            move(reader, server)
            assert (LEFT_BEHIND, "") in source.rows and f"GRANT {right} ON *.* TO '{name}'" in caplog.text
        finally:
            binlog_server.execute(end)
        binlog_server.execute(f"GRANT {right} ON *.* TO '{name}'@'127.0.0.1'")
        move(reader, server)
    assert source.delivered == ["a", "b"]


def test_a_bridge_that_may_mark_no_rows_stores_no_halves(
    source: Source, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    source.leave("a")
    with binlog_reader(binlog_server, source.url, unique[:12], {"*": "SELECT"}) as reader:
        with pytest.raises(Unavailable, match="messages that producers left behind wait in the database"):
            move(reader, server)
        assert source.rows == [(LEFT_BEHIND, "")]
        assert ask(server.url, "GET", f"/v1/admin/transactions?producer_group={unique}")[1]["transactions"] == []
        grant(binlog_server, source.url, unique[:12], {"half_message": "UPDATE"})
        move(reader, server)
    assert source.delivered == ["a"]
