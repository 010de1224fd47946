"""Positions of a bridge on a real MySQL: a megabyte of GTIDs, tags, a history that begins again, and its connection."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.binlog.position import Position
from notify.binlog_bridge.binlog.stream import BinlogStream
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Purged
from notify.errors import InvalidRequest, Unavailable
from notify.movers.sinks.sink import open_sink
from notify.testing.mysql_programs import MySqlPrograms, mysql_programs
from notify.testing.mysql_server import MySqlServer
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from tests.support.binlog import megabyte
from tests.support.bridges import move, move_until, numbers, outbox
from tests.support.databases import own_mysql
from tests.support.groups import subscribe
from tests.support.own_server import own_server


@pytest.fixture(scope="module")
def mysql() -> Iterator[MySqlServer]:
    with own_mysql(["--require-secure-transport=OFF"]) as server:
        yield server


@pytest.fixture
def url(mysql: MySqlServer, unique: str) -> Iterator[str]:
    """An empty database, and no GTIDs."""
    mysql.execute("RESET BINARY LOGS AND GTIDS", f"CREATE DATABASE {unique}")
    yield sa.make_url(mysql.url).set(database=unique).render_as_string(hide_password=False)
    mysql.execute(f"DROP DATABASE {unique}")


def with_gtids(url: str, mode: str) -> str:
    """The address for sessions whose transactions have such GTIDs."""
    changed = sa.make_url(url).update_query_dict({"init_command": f"SET gtid_next = '{mode}'"})
    return changed.render_as_string(hide_password=False)


def stands_at(server: ServerProcess, bridge: Bridge) -> Position:
    async def ask() -> str:
        sink = open_sink(server.url)
        try:
            return await sink.position(bridge.name)
        finally:
            await sink.close()

    position = Position.of(asyncio.run(ask()))
    assert position is not None
    return position


@pytest.mark.long
def test_a_position_of_a_megabyte_is_bridged(mysql: MySqlServer, url: str, server: ServerProcess, unique: str) -> None:
    """12,500 intervals were refused, also with --backfill; 8,000 took half a minute to read."""
    subscribe(server.url, unique, unique)
    mysql.execute(f"SET GLOBAL gtid_purged = '{megabyte()}'")
    outbox(url, unique, range(3))
    with pytest.raises(Purged, match="has purged"):
        move(url, server)
    bridge = move(url, server, fill=True)
    outbox(url, unique, range(4, 7))
    began = time.process_time()
    assert move(url, server).totals.rows == 3
    took = time.process_time() - began
    mysql.execute("FLUSH BINARY LOGS")
    outbox(url, unique, range(8, 11))
    assert move(url, server).totals.rows == 3
    assert numbers(server, unique, 9) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert stands_at(server, bridge).gtids == mysql.gtids and len(mysql.gtids) > 900_000
    assert took < 10


@pytest.mark.long
def test_transactions_with_tags_are_bridged(mysql: MySqlServer, url: str, server: ServerProcess, unique: str) -> None:
    """One of them, by anybody, and no bridge read the server until its GTIDs were reset."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    outbox(with_gtids(url, "AUTOMATIC:blue"), unique, range(4, 6))
    bridge = move(url, server)
    assert bridge.totals.rows == 4 and ":blue:1-" in stands_at(server, bridge).gtids
    # From here on both the request and the head of each file have tags.
    outbox(with_gtids(url, "AUTOMATIC:blue"), unique, range(8, 10))
    mysql.execute("FLUSH BINARY LOGS")
    outbox(with_gtids(url, "AUTOMATIC:other_tag_1"), unique, range(12, 14))
    outbox(url, unique, range(16, 18))
    mysql.execute("FLUSH BINARY LOGS")
    assert move(url, server).totals.rows == 6
    assert move(url, server).totals.rows == 0
    assert stands_at(server, bridge).gtids == mysql.gtids
    assert numbers(server, unique, 10) == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17]


@pytest.mark.long
def test_a_backfill_stands_at_tags(mysql: MySqlServer, url: str, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    outbox(with_gtids(url, "AUTOMATIC:blue"), unique, range(2))
    bridge = move(url, server, fill=True)
    assert stands_at(server, bridge).gtids == mysql.gtids
    outbox(with_gtids(url, "AUTOMATIC:blue"), unique, range(4, 6))
    assert move(url, server).totals.rows == 2
    assert numbers(server, unique, 4) == [0, 1, 4, 5]


@pytest.mark.long
def test_a_binlog_is_read_from_its_first_file(mysql: MySqlServer, url: str, server: ServerProcess, unique: str) -> None:
    """Without a file's name MySQL begins at the end of its binlog."""
    subscribe(server.url, unique, unique)
    for first in (0, 4, 8):
        outbox(url, unique, range(first, first + 3))
        mysql.execute("FLUSH BINARY LOGS")
    assert move(url, server).totals.rows == 9
    assert numbers(server, unique, 9) == [0, 1, 2, 4, 5, 6, 8, 9, 10]


def test_transactions_without_gtids_stop_it(mysql: MySqlServer, url: str, server: ServerProcess, unique: str) -> None:
    """The bridge that read them said: set gtid_mode = ON. The next one began behind them, and so did one that was away
    meanwhile."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    move(url, server)
    mysql.execute("SET GLOBAL gtid_mode = ON_PERMISSIVE", "SET GLOBAL gtid_mode = OFF_PERMISSIVE")
    outbox(url, unique, range(4, 6))
    mysql.execute("SET GLOBAL gtid_mode = ON_PERMISSIVE", "SET GLOBAL gtid_mode = ON")
    outbox(url, unique, range(8, 10))
    with pytest.raises(Purged, match=r"without GTIDs .* --backfill"):
        move(url, server)
    move(url, server, fill=True)
    assert numbers(server, unique, 6) == [0, 1, 4, 5, 8, 9]


@pytest.mark.long
@pytest.mark.parametrize(
    "more", [0, pytest.param(40, marks=pytest.mark.long)], ids=["the same numbers", "more than before"]
)
def test_a_history_that_begins_again_stops_the_bridge(
    mysql: MySqlServer, url: str, server: ServerProcess, unique: str, more: int
) -> None:
    """As many transactions as before are written again: the same GTIDs, and no bridge may take them for its own."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(3))
    bridge = move(url, server)
    before = mysql.gtids
    mysql.execute("RESET BINARY LOGS AND GTIDS")
    last = before.rpartition("-")[2]
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        made = 0
        while made < int(last) + more:
            connection.exec_driver_sql(f"INSERT INTO orders (item) VALUES ('{made}')")
            connection.commit()
            made += 1
    engine.dispose()
    assert more or mysql.gtids == before
    with pytest.raises(Purged, match="another history"):
        move_until(url, server, lambda: False)
    outbox(url, unique, range(4, 7))
    with pytest.raises(Purged, match="another history"):
        move(url, server)
    move(url, server, fill=True)
    outbox(url, unique, range(8, 11))
    assert move(url, server).totals.rows == 3
    assert stands_at(server, bridge).gtids == mysql.gtids
    assert numbers(server, unique, 9) == [0, 1, 2, 4, 5, 6, 8, 9, 10]


@pytest.mark.long
def test_a_server_with_less_than_the_bridge_has_read_stops_it(
    mysql: MySqlServer, url: str, server: ServerProcess, unique: str
) -> None:
    """After RESET BINARY LOGS AND GTIDS, before as many transactions are written again."""
    outbox(url, unique, range(6))
    move(url, server)
    mysql.execute("RESET BINARY LOGS AND GTIDS")
    outbox(url, unique, range(8, 9))
    with pytest.raises(Purged):
        move(url, server)


@pytest.mark.long
def test_a_restored_server_without_the_position_stops_it(
    mysql: MySqlServer, url: str, server: ServerProcess, unique: str
) -> None:
    """A dump or a clone sets gtid_purged: the transactions behind the position are in no file of the server."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    bridge = move(url, server)
    outbox(url, unique, range(4, 6))
    taken = mysql.gtids
    mysql.execute("RESET BINARY LOGS AND GTIDS", f"SET GLOBAL gtid_purged = '{taken}'")
    outbox(url, unique, range(8, 10))
    with pytest.raises(Purged, match="start with --backfill"):
        move(url, server)
    move(url, server, fill=True)
    # One that was restored at the position has all that follows it.
    assert stands_at(server, bridge).gtids == mysql.gtids
    mysql.execute("RESET BINARY LOGS AND GTIDS", f"SET GLOBAL gtid_purged = '{stands_at(server, bridge).gtids}'")
    mysql.execute("FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
    outbox(url, unique, range(12, 14))
    assert move(url, server).totals.rows == 2
    # No list of its files has what was restored: the next file seemed to begin in another history.
    mysql.execute("FLUSH BINARY LOGS")
    outbox(url, unique, range(16, 18))
    assert move(url, server).totals.rows == 2
    assert sorted(numbers(server, unique, 10)) == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17]


@pytest.mark.long
def test_a_binlog_purged_while_the_bridge_is_stopped_stops_it(
    mysql: MySqlServer, url: str, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    move(url, server)
    outbox(url, unique, range(4, 6))
    mysql.execute("FLUSH BINARY LOGS")
    outbox(url, unique, range(8, 10))
    last = mysql.execute("SHOW BINARY LOGS")[-1][0]
    mysql.execute(f"PURGE BINARY LOGS TO '{last}'")
    with pytest.raises(Purged, match="purged"):
        move(url, server)
    move(url, server, fill=True)
    assert sorted(numbers(server, unique, 6)) == [0, 1, 4, 5, 8, 9]


ACCOUNTS = [
    ("caching_sha2_password", "NONE", {"ssl_disabled": "true"}),
    ("caching_sha2_password", "NONE", {}),
    ("caching_sha2_password", "SSL", {}),
]


@pytest.mark.long
@pytest.mark.parametrize(("plugin", "require", "options"), ACCOUNTS, ids=["without TLS", "TLS", "REQUIRE SSL"])
def test_the_binlog_is_read_by_each_way_of_login(
    mysql: MySqlServer, url: str, server: ServerProcess, unique: str,
    plugin: str, require: str, options: dict[str, str],
) -> None:  # fmt: skip
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    mysql.execute(
        f"CREATE USER reader@'127.0.0.1' IDENTIFIED WITH {plugin} BY 'a password' REQUIRE {require}",
        "GRANT ALL ON *.* TO reader@'127.0.0.1'",
    )
    try:
        address = sa.make_url(url).set(username="reader", password="a password").update_query_dict(options)
        assert move(address.render_as_string(hide_password=False), server).totals.rows == 2
        if require == "SSL":
            plain = address.update_query_dict({"ssl_disabled": "true"})
            with pytest.raises((InvalidRequest, Unavailable)):
                move(plain.render_as_string(hide_password=False), server)
    finally:
        mysql.execute("DROP USER reader@'127.0.0.1'")
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
def test_a_source_that_wants_secure_transport_is_read(
    mysql: MySqlServer, url: str, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    mysql.execute("SET GLOBAL require_secure_transport = ON")
    try:
        assert move(url, server).totals.rows == 2
    finally:
        mysql.execute("SET GLOBAL require_secure_transport = OFF")
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
def test_the_binlog_is_read_by_a_unix_socket(mysql: MySqlServer, url: str, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    (row,) = mysql.execute("SELECT @@socket")
    mysql.execute("CREATE USER near@'localhost' IDENTIFIED BY 'near'", "GRANT ALL ON *.* TO near@'localhost'")
    address = sa.make_url(url).set(port=1, username="near", password="near")
    address = address.update_query_dict({"unix_socket": str(row[0])})
    assert move(address.render_as_string(hide_password=False), server).totals.rows == 2
    mysql.execute("DROP USER near@'localhost'")
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
def test_a_stream_that_the_source_kills_ends_with_an_error(mysql: MySqlServer, url: str) -> None:
    outbox(url, "t", range(1))
    stream = BinlogStream(sa.make_url(url), 4711, None, mariadb=False)
    stream.connect()
    packets = stream.packets()
    assert next(packets)
    (dump,) = [row[0] for row in mysql.execute("SHOW PROCESSLIST") if "Binlog Dump" in str(row[4])]
    mysql.execute(f"KILL {dump}")
    with pytest.raises(Unavailable):
        list(packets)
    stream.close()


@pytest.mark.long
def test_an_event_as_large_as_packets_can_be(mysql: MySqlServer, url: str) -> None:
    """An event of 16 MiB - 2 fills a packet, and an empty one follows."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE large (body LONGBLOB)")
    stream = BinlogStream(sa.make_url(url), 4711, None, mariadb=False)
    stream.connect()
    packets = (packet for packet in stream.packets() if packet is not None)
    full = 0xFFFFFF
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO large VALUES (REPEAT('x', 1000))")
    head = next(len(packet) for packet in packets if packet[5] == 30) - 1000
    for size in (full - 1, full, full + 1, 3 * full):
        with engine.begin() as connection:
            connection.exec_driver_sql(f"INSERT INTO large VALUES (REPEAT('x', {size - head}))")
        packet = next(packet for packet in packets if packet[5] == 30)
        assert len(packet) == size and packet.count(b"x") >= size - head
    stream.close()
    engine.dispose()


@pytest.mark.long
def test_the_binlog_is_read_with_an_option_file(
    mysql: MySqlServer, url: str, server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    mysql.execute("CREATE USER filed@'127.0.0.1' IDENTIFIED BY 'filed'", "GRANT ALL ON *.* TO filed@'127.0.0.1'")
    parsed, options = sa.make_url(url), tmp_path / "my.cnf"
    options.write_text(f"[client]\nhost=127.0.0.1\nport={parsed.port}\nuser=filed\npassword=filed\n")
    try:
        address = f"mysql+pymysql:///{parsed.database}?read_default_file={options}"
        assert move(address, server).totals.rows == 2
    finally:
        mysql.execute("DROP USER filed@'127.0.0.1'")
    assert numbers(server, unique, 2) == [0, 1]


def with_keyring(directory: Path) -> MySqlPrograms:
    """MySQL with a keyring, whose settings it reads beside its programs: these are links to those of other tests."""
    programs = mysql_programs()
    if programs.data is None:
        raise NotAvailable("the settings of a keyring would have to be in the folder of the installed MySQL")
    home, linked = programs.data.parent, directory / "mysql"
    shutil.copytree(home / "usr", linked / "usr", copy_function=os.symlink)
    (linked / "usr/sbin/mysqld.my").write_text(json.dumps({"components": "file://component_keyring_file"}))
    keys = {"path": f"{directory}/keyring", "read_only": False}
    (linked / "usr/lib/mysql/plugin/component_keyring_file.cnf").write_text(json.dumps(keys))
    return replace(programs, mysqld=tuple(word.replace(str(home), str(linked)) for word in programs.mysqld))


@pytest.mark.long
def test_an_encrypted_binlog_is_read(server: ServerProcess, unique: str) -> None:
    """Positions hold while its keys change, and while files that are encrypted and others follow each other."""
    subscribe(server.url, unique, unique)

    def start(directory: Path) -> MySqlServer:
        options = ["--binlog-encryption=ON", "--binlog-rows-query-log-events=ON"]
        return MySqlServer(directory, durable=False, options=options, programs=with_keyring(directory)).create()

    with own_server("mysql", start) as mysql:
        assert [row[2] for row in mysql.execute("SHOW BINARY LOGS")] == ["Yes"]
        first = 0
        for change in (
            "FLUSH BINARY LOGS",
            "ALTER INSTANCE ROTATE BINLOG MASTER KEY",
            "SET GLOBAL binlog_encryption = OFF",
            "SET GLOBAL binlog_encryption = ON",
        ):
            outbox(mysql.url, unique, range(first, first + 2))
            first += 2
            mysql.execute(change)
            move(mysql.url, server)
        mysql.kill()
        mysql.start()
        outbox(mysql.url, unique, range(first, first + 2))
        move(mysql.url, server)
        mysql.execute("SET GLOBAL gtid_mode = ON_PERMISSIVE", "SET GLOBAL gtid_mode = OFF_PERMISSIVE")
        outbox(mysql.url, unique, range(20, 21))
        mysql.execute("SET GLOBAL gtid_mode = ON_PERMISSIVE", "SET GLOBAL gtid_mode = ON")
        with pytest.raises(Purged, match="without GTIDs"):
            move(mysql.url, server)
        mysql.kill()
    assert numbers(server, unique, 8) == [n for n in range(10) if n % 4 != 3]
