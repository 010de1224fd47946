"""A bridge at MySQL servers that fail over to each other, by GTID: nothing is lost, doubled, or passed in silence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Purged
from notify.protocol import ids
from notify.testing.mysql_server import MySqlServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import move, numbers, outbox
from tests.support.clock import eventually
from tests.support.databases import own_mysql
from tests.support.groups import subscribe

UNORDERED = ["--server-id=2", "--replica-preserve-commit-order=OFF", "--replica-parallel-workers=4"]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[MySqlServer, MySqlServer]]:
    """Two servers; the second applies what it replicates in parallel, and commits it in any order."""
    with ExitStack() as stack:
        yield stack.enter_context(own_mysql()), stack.enter_context(own_mysql(UNORDERED))


@pytest.fixture
def first(servers: tuple[MySqlServer, MySqlServer]) -> MySqlServer:
    """A primary with an empty binlog."""
    return _begin(servers[0])


@pytest.fixture
def second(servers: tuple[MySqlServer, MySqlServer], first: MySqlServer) -> MySqlServer:
    """Its replica."""
    second = _begin(servers[1])
    second.follow(first)
    return second


def _begin(server: MySqlServer) -> MySqlServer:
    assert server.process is not None
    if server.process.poll() is not None:
        server.start()
    server.promote()
    server.forget_binlogs()
    return server


def _url(server: MySqlServer, database: str) -> str:
    return sa.make_url(server.url).set(database=database).render_as_string(hide_password=False)


def _made(server: MySqlServer, database: str) -> str:
    """The address of a new database."""
    server.execute(f"CREATE DATABASE {database} CHARACTER SET utf8mb4")
    return _url(server, database)


def test_a_bridge_continues_with_the_replica_that_is_promoted(
    first: MySqlServer, second: MySqlServer, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    urls = [_made(first, unique), _url(second, unique)]
    outbox(urls[0], unique, range(3))
    second.wait_until_it_has(first.gtids)
    bridge = Bridge(urls, server.url)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.rows == 3, "the primary's rows")
        first.kill()
        second.promote()
        outbox(urls[1], unique, range(4, 7))
        bridging.until(lambda: bridge.totals.rows == 6, "the new primary's rows")
    assert numbers(server, unique, 6) == [0, 1, 2, 4, 5, 6]


@pytest.mark.long
def test_a_new_primary_that_lacks_what_was_moved_stops_it(
    first: MySqlServer, second: MySqlServer, server: ServerProcess, unique: str
) -> None:
    """A primary dies before its replica has its last transactions (no semi-synchronous replication). The bridge had
    moved them, and continued in silence: MySQL accepts a position with transactions of others that it does not have."""
    subscribe(server.url, unique, unique)
    url = _made(first, unique)
    outbox(url, unique, range(2))
    second.wait_until_it_has(first.gtids)
    second.execute("STOP REPLICA")
    outbox(url, unique, range(4, 6))
    move(url, server)
    first.kill()
    second.promote()
    outbox(_url(second, unique), unique, range(8, 10))
    with pytest.raises(Purged, match="does not have") as stopped:
        move(_url(second, unique), server)
    assert "--backfill" in str(stopped.value)
    move(_url(second, unique), server, fill=True)
    assert numbers(server, unique, 6) == [0, 1, 4, 5, 8, 9]


@pytest.mark.long
def test_a_replica_that_is_behind_is_asked_again(
    first: MySqlServer, second: MySqlServer, server: ServerProcess, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A bridge that may choose between two servers waits until one of them has what it has moved."""
    subscribe(server.url, unique, unique)
    url = _made(first, unique)
    outbox(url, unique, range(2))
    second.wait_until_it_has(first.gtids)
    second.execute("STOP REPLICA SQL_THREAD")
    outbox(url, unique, range(4, 6))
    wanted = first.gtids
    move(url, server)
    eventually(lambda: _has_received(second, wanted), "the replica to have received what it does not apply")
    first.kill()
    bridge = Bridge([url, _url(second, unique)], server.url)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: "does not have" in caplog.text, "the bridge to ask the replica")
        second.execute("START REPLICA SQL_THREAD")
        second.wait_until_it_has(wanted)
        second.promote()
        outbox(_url(second, unique), unique, range(8, 10))
        bridging.until(lambda: bridge.totals.rows == 2, "the new primary's rows")
    assert numbers(server, unique, 6) == [0, 1, 4, 5, 8, 9]


def _has_received(server: MySqlServer, wanted: str) -> bool:
    """Whether the replica has received these GTIDs, applied or not."""
    query = f"SELECT GTID_SUBSET('{wanted}', received_transaction_set) FROM performance_schema."
    return server.execute(query + "replication_connection_status") == [(1,)]


@pytest.mark.long
def test_commits_out_of_order_on_a_replica_are_moved_once(
    first: MySqlServer, second: MySqlServer, server: ServerProcess, unique: str
) -> None:
    """A parallel replica without replica_preserve_commit_order commits a later transaction before an earlier one: its
    GTIDs have a gap for a while, in which a bridge reads, and the primary's bridge continues behind it."""
    subscribe(server.url, unique, unique)
    url, replica_url = _made(first, unique), _url(second, unique)
    outbox(url, unique, range(1))
    first.execute(f"CREATE TABLE {unique}.lock_me (n INT PRIMARY KEY)", f"INSERT INTO {unique}.lock_me VALUES (1)")
    second.wait_until_it_has(first.gtids)
    second.execute("SET GLOBAL super_read_only = OFF")  # it lets nobody lock a row
    holder = sa.create_engine(replica_url)
    engine = sa.create_engine(url)
    try:
        with holder.connect() as held:
            held.exec_driver_sql("SELECT * FROM lock_me FOR UPDATE")
            with engine.begin() as connection:  # the replica waits here, with the message in its hand
                connection.exec_driver_sql("UPDATE lock_me SET n = 2")
                connection.exec_driver_sql(
                    "INSERT INTO half_message (transaction_id, message_no, producer_group, mode, state, shards, topic, "
                    f"`key`, headers, body, relayed, created_at) SELECT '{ids.to_text(ids.new_id())}', 0, "
                    "producer_group, mode, state, shards, topic, `key`, headers, REPLACE(body, '0', '1'), 0, "
                    "UTC_TIMESTAMP(6) FROM half_message"
                )
            outbox(url, unique, range(2, 3))
            eventually(lambda: ":1-" in second.gtids and second.gtids.count(":") > 1, "a gap in the replica's GTIDs")
            bridge = move(replica_url, server)
            assert bridge.totals.rows == 2
            held.rollback()
        second.wait_until_it_has(first.gtids)
        move(replica_url, server)
        outbox(url, unique, range(4, 5))
        move(url, server)
    finally:
        holder.dispose()
        engine.dispose()
    assert numbers(server, unique, 4) == [0, 2, 1, 4]


@pytest.mark.long
@pytest.mark.parametrize("how", [pytest.param("clone", marks=pytest.mark.long), "dump"])
def test_a_server_made_from_a_copy_is_read_from_where_the_copy_was_made(
    first: MySqlServer, second: MySqlServer, server: ServerProcess, unique: str, how: str
) -> None:
    """Its binlog begins after the copy: a bridge that had moved all of that continues there, another one is told."""
    subscribe(server.url, unique, unique)
    url = _made(first, unique)
    outbox(url, unique, range(2))
    move(url, server)
    outbox(url, unique, range(4, 6))
    second.promote()
    (_clone if how == "clone" else _load_dump)(second, first, unique)
    copied = _url(second, unique)
    with pytest.raises(Purged, match="--backfill"):
        move(copied, server)
    move(url, server)
    outbox(copied, unique, range(8, 10))
    move(copied, server)
    assert numbers(server, unique, 6) == [0, 1, 4, 5, 8, 9]


def _clone(copy: MySqlServer, donor: MySqlServer, database: str) -> None:
    """Replace all that a server has by a physical copy of another server, by the plugin."""
    for each in (copy, donor):
        if not each.execute("SELECT 1 FROM information_schema.plugins WHERE plugin_name = 'clone'"):
            each.execute("INSTALL PLUGIN clone SONAME 'mysql_clone.so'")
    donor_place = f"127.0.0.1:{donor.port}"
    with contextlib.suppress(sa.exc.OperationalError):  # it ends, and asks to be started: nothing watches over it
        copy.execute(
            f"SET GLOBAL clone_valid_donor_list = '{donor_place}'",
            f"CLONE INSTANCE FROM '{donor.USER}'@'127.0.0.1':{donor.port} IDENTIFIED BY 'shop'",
        )
    assert copy.process is not None
    copy.process.wait(60)
    copy.start()


def _load_dump(copy: MySqlServer, donor: MySqlServer, database: str) -> None:
    """Load a dump of a database: its rows, not logged, and the donor's GTIDs as purged."""
    copy.forget_binlogs()
    copy.execute("SET sql_log_bin = 0", f"DROP DATABASE IF EXISTS {database}", f"CREATE DATABASE {database}")
    source, target = sa.create_engine(_url(donor, database)), sa.create_engine(_url(copy, database))
    tables = sa.MetaData()
    tables.reflect(source)
    with source.connect() as reading, target.connect() as writing:
        writing.exec_driver_sql("SET sql_log_bin = 0")
        tables.create_all(writing)
        for table in tables.sorted_tables:
            rows = [dict(row) for row in reading.execute(sa.select(table)).mappings()]
            if rows:
                writing.execute(table.insert(), rows)
        writing.commit()
    source.dispose()
    target.dispose()
    copy.execute(f"SET GLOBAL gtid_purged = '{donor.gtids}'")
