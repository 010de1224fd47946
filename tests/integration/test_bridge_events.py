"""The bridge on a real MariaDB's and MySQL's rare events: rollbacks, XA, changed checksums, another history."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa

from notify.binlog_bridge import announcing
from notify.binlog_bridge.batching import PART_BYTES
from notify.binlog_bridge.binlog.events import MARIADB_GTID
from notify.binlog_bridge.bridge import CAUGHT_UP_US, Bridge
from notify.binlog_bridge.errors import Purged, Unreadable
from notify.client import create_tables
from notify.protocol import ids
from notify.runtime.clock import wall_clock
from notify.storage.sql import schema
from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.process import ServerProcess
from notify.testing.statements import execute
from tests.support.background import in_background
from tests.support.bridges import move, numbers, outbox
from tests.support.commands import cli
from tests.support.databases import own_mariadb
from tests.support.groups import subscribe
from tests.support.http import admin
from tests.support.record_binlog import insert


@pytest.fixture
def url(binlog_url: str) -> str:
    engine = sa.create_engine(binlog_url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE unsafe (n INT) ENGINE = MyISAM")
    engine.dispose()
    return binlog_url


class Session:
    """A session of the source that runs statements unchanged."""

    def __init__(self, url: str, topic: str) -> None:
        at = sa.make_url(url)
        self._topic = topic
        self._connection = pymysql.connect(
            host=at.host, port=at.port or 3306, user=at.username, password=at.password or "", database=at.database
        )

    def run(self, *statements: str | int) -> None:
        """Run statements; a number stands for the INSERT of an outbox row with that number in its body."""
        with self._connection.cursor() as cursor:
            for statement in statements:
                if isinstance(statement, str):
                    cursor.execute(statement)
                else:
                    self.insert(statement)

    def insert(self, n: int, **values: Any) -> None:
        self.insert_many([json.dumps({"n": n})], **values)

    def insert_many(self, bodies: list[str], **values: Any) -> None:
        """Insert an outbox row for each body."""
        row = {
            "transaction_id": "", "message_no": 0, "producer_group": "g", "mode": "outbox", "state": "COMMITTED",
            "shards": "", "topic": self._topic, "body": "", "relayed": 0,
        } | values  # fmt: skip
        names = ", ".join(f"`{name}`" for name in row)
        rows = [
            list((row | {"transaction_id": ids.to_text(ids.new_id()), "body": body} | values).values())
            for body in bodies
        ]
        with self._connection.cursor() as cursor:
            cursor.executemany(
                f"INSERT INTO half_message ({names}, created_at) VALUES ({', '.join(['%s'] * len(row))}, "
                "UTC_TIMESTAMP(6))",
                rows,
            )

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def session(url: str, unique: str) -> Iterator[Session]:
    session = Session(url, unique)
    yield session
    session.close()


@pytest.mark.long
@pytest.mark.parametrize("other", ["INSERT INTO unsafe VALUES (1)", "CREATE TEMPORARY TABLE {} (n INT)"])
def test_rows_rolled_back_to_a_savepoint_are_not_taken(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str, session: Session, other: str
) -> None:
    """The source logs such rows, and ROLLBACK TO behind them, if the transaction has other changes that stay."""
    if isinstance(binlog_server, MySqlServer) and "unsafe" in other:
        pytest.skip("a MySQL with GTIDs refuses a transaction with a table that is not transactional (error 1785)")
    subscribe(server.url, unique, unique)
    session.run(
        "BEGIN", 0, "SAVEPOINT `A b`", 1, other.format("a"), "SAVEPOINT c", 2, "ROLLBACK TO c", 3,
        "ROLLBACK TO SAVEPOINT `a B`", 4, "COMMIT",
    )  # fmt: skip
    session.run("BEGIN", "SAVEPOINT a", 5, other.format("b"), "ROLLBACK TO a", 6, "COMMIT")
    assert move(url, server).totals.rows == 3
    assert numbers(server, unique, 3) == [0, 4, 6]


def test_messages_of_two_transactions_that_are_written_in_turns_stay_whole(
    url: str, server: ServerProcess, unique: str, session: Session
) -> None:
    """Two writers in one transaction of the database. The first message of each went out as if it were all, and the
    other ones were refused as those of another transaction."""
    subscribe(server.url, unique, unique)
    one, other = (ids.to_text(ids.new_id()) for _ in range(2))
    session.run("BEGIN")
    for number in range(3):
        session.insert(number, transaction_id=one, message_no=number)
        session.insert(10 + number, transaction_id=other, message_no=number)
    session.run("COMMIT")
    bridge = move(url, server)
    assert (bridge.totals.rows, bridge.totals.stored) == (6, 2)
    assert numbers(server, unique, 6) == [0, 1, 2, 10, 11, 12]


@pytest.mark.long
def test_a_large_transaction_that_is_rolled_back_leaves_nothing_at_the_queue(
    url: str, server: ServerProcess, unique: str, session: Session
) -> None:
    """The prepared parts are dropped. They waited for ever, or were committed with the next transaction."""
    subscribe(server.url, unique, unique)
    session.run("BEGIN")
    for n in range(12):
        session.insert(n, body=json.dumps({"n": n, "long": "x" * (PART_BYTES // 5)}))
    session.run("CREATE TEMPORARY TABLE t (n INT)", "ROLLBACK")
    session.run("BEGIN", 100, "COMMIT")
    bridge = move(url, server)
    assert numbers(server, unique, 1) == [100]
    in_doubt = admin(server.url, "GET", "transactions?state=PREPARED")["transactions"]
    assert [t for t in in_doubt if t["source"] == bridge.name] == []


@pytest.mark.long
def test_a_large_transaction_of_thousands_of_messages_is_moved(
    url: str, server: ServerProcess, unique: str, session: Session
) -> None:
    """Its last batch named them all, which no server took: the bridge tried again for ever."""
    subscribe(server.url, unique, unique)
    count = 9000
    session.run("BEGIN")
    session.insert_many([json.dumps({"n": n, "long": "x" * (PART_BYTES // 8000)}) for n in range(count)])
    session.run("COMMIT")
    assert move(url, server).totals.stored == count
    assert sorted(numbers(server, unique, count)) == [*range(count)]


@pytest.mark.long
def test_rows_of_an_xa_transaction_stop_it_and_others_do_not(
    url: str, server: ServerProcess, unique: str, session: Session
) -> None:
    subscribe(server.url, unique, unique)
    session.run("XA START 'x'", "INSERT INTO notify_source VALUES ('x', 0, 0, 0)", "XA END 'x'", "XA PREPARE 'x'")
    session.run("XA ROLLBACK 'x'", "XA START 'y'", 0, "XA END 'y'", "XA COMMIT 'y' ONE PHASE")
    move(url, server)
    assert numbers(server, unique, 1) == [0]
    session.run("XA START 'z'", 1, "XA END 'z'", "XA PREPARE 'z'")
    with pytest.raises(Unreadable, match="XA"):
        move(url, server)
    session.run("XA ROLLBACK 'z'")


@pytest.mark.long
def test_checksums_may_change_under_a_running_bridge_and_behind_it(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    bridge = Bridge([url], server.url)
    try:
        with in_background(bridge.run()) as bridging:
            bridging.until(lambda: bridge.totals.rows == 2, "the first two rows")
            binlog_server.execute("SET GLOBAL binlog_checksum = NONE")
            outbox(url, unique, range(4, 6))
            bridging.until(lambda: bridge.totals.rows == 4, "rows without checksums")
        assert bridge.totals.connections == 1
        binlog_server.execute("SET GLOBAL binlog_checksum = CRC32")
        outbox(url, unique, range(8, 10))
        binlog_server.execute("SET GLOBAL binlog_checksum = NONE")
        outbox(url, unique, range(12, 14))
        assert move(url, server).totals.rows == 4  # a file with checksums, read from a server without
    finally:
        binlog_server.execute("SET GLOBAL binlog_checksum = CRC32")
    assert numbers(server, unique, 8) == [0, 1, 4, 5, 8, 9, 12, 13]


@pytest.mark.long
def test_another_history_that_has_passed_the_position_stops_it(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """After RESET MASTER the same GTIDs come again: once past the bridge's position, the source would skip silently."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    move(url, server)
    binlog_server.forget_binlogs()
    outbox(url, unique, range(4, 40))
    with pytest.raises(Purged, match="another history"):
        move(url, server)
    # After a rotation the history is the same, whichever file the source continues from.
    move(url, server, fill=True)
    outbox(url, unique, range(40, 42))
    assert move(url, server).totals.rows == 2
    binlog_server.execute("FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
    outbox(url, unique, range(44, 46))
    assert move(url, server).totals.rows == 2
    wanted = [n for n in range(42) if n % 4 != 3 and n not in (2,)] + [44, 45]
    assert sorted(numbers(server, unique, len(wanted))) == wanted


@pytest.mark.long
def test_a_history_that_begins_again_under_a_bridge_that_runs_stops_it(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source waits for the end of a file that is gone, sends heartbeats, and nothing else."""
    monkeypatch.setattr(announcing, "ANNOUNCE_SECONDS", 0.1)
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    bridge = Bridge([url], server.url)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.rows == 2, "the bridge to read")
        read_us = wall_clock()
        bridging.until(lambda: bridge.totals.read_through_us > read_us - CAUGHT_UP_US, "a heartbeat")
        binlog_server.forget_binlogs()
        outbox(url, unique, range(4, 6))
        with pytest.raises(Purged, match="--backfill"):
            bridging.result()
    move(url, server, fill=True)
    assert numbers(server, unique, 4) == [0, 1, 4, 5]


@pytest.mark.long
def test_a_damaged_event_stops_it_after_some_tries(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """A wrong checksum may come from the way, and is read again; one in the source's file was read again for ever."""
    outbox(url, unique, range(2))
    binlog = binlog_server.directory / "data" / "bin.000001"
    content = bytearray(binlog.read_bytes())
    content[content.index(b'{"n":1}') + 1] ^= 1
    binlog.write_bytes(content)
    subscribe(server.url, unique, unique)
    with pytest.raises(Unreadable, match=r"5 times: .*checksum"):
        asyncio.run(asyncio.wait_for(Bridge([url], server.url).run(once=True), 60))
    assert numbers(server, unique, 1) == [0]


@pytest.mark.parametrize("before", ["messages", "other rows"])
def test_an_event_that_a_killed_mariadb_wrote_in_part_is_passed(
    server: ServerProcess, unique: str, before: str
) -> None:
    """MariaDB leaves it at the end of the file, and sends it up to its error with all that the bridge had not stored
    by then. The transaction was never committed; its number is used again in the next file."""
    subscribe(server.url, unique, unique)
    with own_mariadb() as mariadb:
        outbox(mariadb.url, unique, range(1, 3))
        if before == "other rows":
            move(mariadb.url, server)
            execute(mariadb.url, "INSERT INTO orders (item) VALUES ('of no message')")
        mariadb.kill()
        binlog = mariadb.directory / "data" / "bin.000001"
        content = binlog.read_bytes()
        binlog.write_bytes(content + partial_copy_of_last_transaction(content))
        mariadb.start()
        outbox(mariadb.url, unique, range(4, 6))
        move(mariadb.url, server)
    assert numbers(server, unique, 4) == [1, 2, 4, 5]


def partial_copy_of_last_transaction(binlog: bytes) -> bytes:
    """The last transaction of a MariaDB's file with the next number, without the end of its last row event."""
    events = []
    at = 4
    while at < len(binlog):
        size = int.from_bytes(binlog[at + 9 : at + 13], "little")
        events.append(binlog[at : at + size])
        at += size
    begin = max(n for n, event in enumerate(events) if event[4] == MARIADB_GTID)
    copied = b""
    for event in events[begin:-1]:
        changed = bytearray(event[:-4])
        changed[13:17] = (len(binlog) + len(copied) + len(event)).to_bytes(4, "little")
        if event[4] == MARIADB_GTID:
            changed[19:27] = (int.from_bytes(event[19:27], "little") + 1).to_bytes(8, "little")
        copied += changed + zlib.crc32(changed).to_bytes(4, "little")
    return copied[:-20]


def test_row_images_without_repeated_columns_are_read(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """MariaDB 11.4 can log a changed row's other columns only as they were before."""
    if not binlog_server.execute("SELECT VERSION()")[0][0].startswith("11."):
        pytest.skip("only MariaDB 11.4 and later have FULL_NODUP")
    subscribe(server.url, unique, unique)
    engine = sa.create_engine(url)
    schema.upgrade(engine, "main")
    engine.dispose()
    binlog_server.execute("SET GLOBAL binlog_row_image = 'FULL_NODUP'")
    made = insert(1, "server_half_message", transaction_id=ids.to_text(ids.new_id()), topic=unique, state="PREPARED")
    execute(url, made, "UPDATE server_half_message SET state = 'COMMITTED', decided_at = UTC_TIMESTAMP(6)")
    assert move(url, server).totals.rows == 1
    assert numbers(server, unique, 1) == [1]


def test_an_unexpected_error_is_told_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no reason at all")

    monkeypatch.setattr(Bridge, "run", fail)
    code, output = cli("bridge", "--dsn", "shop=mysql+pymysql://x@127.0.0.1/y")
    assert code == 1
    assert "no reason at all" in output["text"]
