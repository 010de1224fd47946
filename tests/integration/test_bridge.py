"""The bridge on real servers: which rows it moves, which sources it refuses; it never skips a row silently."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from notify.binlog_bridge import bridge as bridge_module
from notify.binlog_bridge.announcing import announce, mover_of
from notify.binlog_bridge.binlog.events import GTIDS
from notify.binlog_bridge.binlog.position import Position
from notify.binlog_bridge.binlog.reader import Assembly, BinlogReader
from notify.binlog_bridge.binlog.stream import BinlogStream
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Purged, Superseded, Unreadable
from notify.binlog_bridge.kinds import end_of_log
from notify.client.transport.http import HttpClient
from notify.errors import Conflict, InvalidRequest, NotifyError
from notify.movers.outbox import source_name
from notify.protocol import ids
from notify.protocol.wire import (
    BridgedTransaction,
    PackedBridgeBatch,
    PackedMessage,
    encode_msgpack,
)
from notify.storage.sql import checkup, registry, schema
from notify.storage.sql.engines import open_engine
from notify.storage.sql.movers import movers_of
from notify.testing.binlog_server import BinlogServer
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.process import ServerProcess
from notify.testing.statements import execute
from tests.support.background import in_background, repeated
from tests.support.bridges import end_once_while_written, move, numbers, outbox, write_as_statement
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import bodies, drain, subscribe
from tests.support.http import admin
from tests.support.proxy import Proxy
from tests.support.servers import make_storage
from tests.support.sql_storage import published, put, put_in_every_state


@pytest.fixture
def url(binlog_url: str) -> str:
    return binlog_url


def test_outbox_rows_reach_the_log_once_in_commit_order(url: str, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    for first in (0, 20, 40):
        outbox(url, unique, range(first, first + 20))
        bridge = move(url, server)
        assert (bridge.totals.rows, bridge.totals.stored) == (15, 15)
    wanted = [n for n in range(60) if n % 4 != 3]
    assert numbers(server, unique, 45) == wanted
    shown = next(b for b in admin(server.url, "GET", "bridges")["bridges"] if b["source"] == bridge.name)
    assert shown["rows"] == 45 and shown["lag_seconds"] >= 0 and shown["silent_seconds"] >= 0


@pytest.mark.parametrize("what", ["other rows", pytest.param("messages", marks=pytest.mark.long)])
def test_once_ends_where_the_log_ended_at_the_start(url: str, server: ServerProcess, unique: str, what: str) -> None:
    """Beside servers, whose heartbeats go to the log, `notify bridge --once` did not end."""
    end_once_while_written(url, server, unique, what)


def test_once_does_not_end_on_a_candidate_that_is_behind(
    url: str, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended at the end of a replica, without what the primary had when the run began."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(1))
    caplog.set_level(logging.INFO, "notify")
    bridge = Bridge([url, url], server.url)

    def of_the_primary(connection: sa.Connection) -> Any:
        """One transaction further; then the primary is unreachable."""
        end: Any = end_of_log(connection)
        monkeypatch.undo()
        bridge._end = replace(end, gtids=re.sub(r"\d+$", lambda number: str(int(number[0]) + 1), end.gtids))
        raise sa.exc.OperationalError("", {}, ConnectionError("away"))

    monkeypatch.setattr("notify.binlog_bridge.bridge.end_of_log", of_the_primary)
    with in_background(bridge.run(once=True)) as bridging:
        bridging.until(lambda: "an earlier candidate" in caplog.text, "the candidate's refusal")
        outbox(url, unique, range(1, 2))
        bridging.result()
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
def test_a_queue_that_is_away_costs_no_change_of_the_source(
    url: str, server: ServerProcess, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The bridge went to the source's replica, which may be behind, for the sake of a queue that did not answer."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(3))
    proxy = Proxy("127.0.0.1", sa.make_url(server.url).port or 0)
    proxy.close()
    replica = socket.create_server(("127.0.0.1", 0))
    replica.setblocking(False)
    other = sa.make_url(url).set(port=replica.getsockname()[1]).render_as_string(hide_password=False)

    caplog.set_level(logging.INFO, "notify")
    bridge = Bridge([url, other], f"http://127.0.0.1:{proxy.port}")
    with replica:
        with in_background(bridge.run(once=True)) as bridging:
            bridging.until(lambda: caplog.text.count("again in") > 1, "two tries")
            proxy.reopen()
            bridging.result()
        with pytest.raises(BlockingIOError):
            replica.accept()
    proxy.close()
    assert numbers(server, unique, 3) == [0, 1, 2]
    # It says at last what it reads and where it writes, without the password.
    begun = caplog.text[caplog.text.rindex("again in") :]
    assert f"writes to http://127.0.0.1:{proxy.port}" in begun and ":***@" in begun


@pytest.mark.long
def test_the_servers_table_is_bridged_when_it_commits(url: str, server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    make_storage(url)
    now = time.time_ns() // 1000 // 1_000_000 * 1_000_000  # a heartbeat of the source takes whole seconds
    committed = put_in_every_state(url, unique)
    bridge = move(url, server)
    assert bridge.totals.stored == 20
    engine = open_engine(url)
    announce(engine, mover_of(bridge.name), bridge.totals)
    with engine.begin() as connection:
        # Rows that were committed before the newest moved one may be purged.
        assert now - bridge_module.CAUGHT_UP_US <= movers_of(connection).read_through_us <= time.time_ns() // 1000
        assert [m.kind for m in registry.members(connection)] == ["bridge"]
    engine.dispose()
    assert sorted(numbers(server, unique, 40)) == sorted(committed)


@pytest.mark.long
def test_messages_published_without_a_transaction_are_bridged(url: str, server: ServerProcess, unique: str) -> None:
    """A row without a producer group is moved. The queue refused it: acknowledged, and never delivered."""
    subscribe(server.url, unique, unique)
    make_storage(url)
    put(url, published(unique, "0", "1", "2"))
    bridge = move(url, server)
    assert (bridge.totals.stored, bridge.totals.refused) == (3, 0)
    put(url, published(unique, "3", "4"))
    assert move(url, server, fill=True).totals.refused == 0
    assert sorted(bodies(drain(server.url, unique, unique, 5))) == ["0", "1", "2", "3", "4"]


@pytest.mark.long
def test_a_second_bridge_with_another_server_id_takes_over(url: str, server: ServerProcess, unique: str) -> None:
    """The source cuts off nobody then."""
    outbox(url, unique, range(2))
    first, second = (Bridge([url], server.url, server_id=number) for number in (991, 992))
    with in_background(first.run()) as superseded:
        superseded.until(lambda: first.totals.rows, "the first bridge to move a row")
        with in_background(second.run()) as bridging:
            bridging.until(lambda: second.totals.connections, "the second bridge to connect")
            outbox(url, unique, range(4, 6))
            with pytest.raises(Superseded):
                superseded.result()
            bridging.until(lambda: second.totals.rows >= 2, "the second bridge to move both rows")


@pytest.mark.long
def test_two_readers_with_one_server_id(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source cuts off one of two readers with one server id, again and again: the bridge says why, and stops."""
    # Ten cuts in a minute are too many. Here four are, however long each takes.
    monkeypatch.setattr(bridge_module, "SAME_ID_TIMES", 4)
    monkeypatch.setattr(bridge_module, "SAME_ID_SECONDS", 3600.0)
    monkeypatch.setattr(bridge_module, "SAME_ID_WAIT_SECONDS", 0.05)
    outbox(url, unique, range(2))
    bridge = Bridge([url], server.url, server_id=4711)
    stop = threading.Event()
    readers: list[BinlogReader] = []

    def interfere() -> None:
        """Cut off each connection of the bridge; the bridge's next connection cuts off this one.

        Two readers that connect at the same moment may both stay: so this one stays for a second at most.
        """
        cut = 0
        while not stop.is_set():
            began = time.monotonic()
            while bridge.totals.connections == cut and not stop.wait(0.01) and time.monotonic() - began < 1:
                pass
            cut, began = bridge.totals.connections, time.monotonic()
            reader = BinlogReader(sa.make_url(url), 4711, None, mariadb=isinstance(binlog_server, MariaDbServer))
            readers.append(reader)
            with contextlib.suppress(NotifyError):
                reader.connect()
                for _ in reader.batches():
                    if stop.is_set() or time.monotonic() - began > 1:
                        break
            reader.close()

    thread = threading.Thread(target=interfere)
    thread.start()
    try:
        with pytest.raises(InvalidRequest, match="--server-id"):
            asyncio.run(asyncio.wait_for(bridge.run(), 2 * PATIENCE_SECONDS))
    finally:
        stop.set()

        def ended() -> bool:
            for reader in readers[-1:]:
                reader.close()  # wakes the reader that waits for packets
            thread.join(0.1)
            return not thread.is_alive()

        eventually(ended, "the other reader to end")


@pytest.mark.long
def test_a_purged_binlog_stops_the_bridge_and_is_backfilled(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(8))
    move(url, server)
    outbox(url, unique, range(8, 16))
    binlog_server.execute("FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
    last = str(binlog_server.execute("SHOW BINARY LOGS")[-1][0])

    def purged() -> bool:
        binlog_server.execute(f"PURGE BINARY LOGS TO '{last}'")
        return len(binlog_server.execute("SHOW BINARY LOGS")) == 1

    eventually(purged, "connections that are over to let go of the older files")
    outbox(url, unique, range(16, 24))
    with pytest.raises(Purged, match="--backfill"):
        move(url, server)
    assert numbers(server, unique, 6) == [0, 1, 2, 4, 5, 6]
    bridge = move(url, server, fill=True)
    assert bridge.totals.known >= 6
    outbox(url, unique, range(24, 28))
    move(url, server)
    assert sorted(numbers(server, unique, 15)) == [n for n in range(8, 28) if n % 4 != 3]


@pytest.mark.long
def test_a_foreign_position_stops_it(url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str) -> None:
    outbox(url, unique, range(2))
    foreign = "0-77-900000" if isinstance(binlog_server, MariaDbServer) else f"{uuid.uuid4()}:1-900000"
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        name = source_name(connection)
    engine.dispose()

    async def stand_elsewhere() -> None:
        http = HttpClient(server.url)
        batch = PackedBridgeBatch(epoch=1, expected_position="", position=Position(foreign).text, claim=True)
        await http.call("POST", f"/v1/bridge/{name}/batches", encode_msgpack(batch), 10)
        http.close()

    asyncio.run(stand_elsewhere())
    with pytest.raises(Purged):
        move(url, server)


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        ("SET GLOBAL binlog_format = 'STATEMENT'", "binlog_format"),
        ("SET GLOBAL binlog_row_image = 'MINIMAL'", "binlog_row_image"),
        ("SET GLOBAL binlog_row_metadata = 'MINIMAL'", "binlog_row_metadata"),
    ],
)
def test_a_source_that_would_leave_gaps_is_refused_at_start(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str, statement: str, remedy: str
) -> None:
    outbox(url, unique, range(2))
    binlog_server.execute(statement)
    with pytest.raises(InvalidRequest, match=f"SET GLOBAL {remedy}"):
        move(url, server)


@pytest.mark.long
def test_a_source_that_turns_bad_stops_it(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """A session may write statements after the bridge has checked the format: the bridge stops, and says what to do."""
    outbox(url, unique, range(2))
    move(url, server)
    write_as_statement(url, "UPDATE half_message SET tag = 'x'")
    with pytest.raises(Unreadable, match="STATEMENT format"):
        move(url, server)


def test_missing_grants_and_tables_are_named(url: str, binlog_server: BinlogServer, server: ServerProcess) -> None:
    name = sa.make_url(url).database
    binlog_server.execute(
        "DROP USER IF EXISTS poor@'127.0.0.1'",
        "CREATE USER poor@'127.0.0.1' IDENTIFIED BY 'poor'",
        f"GRANT SELECT ON {name}.* TO poor@'127.0.0.1'",
    )
    poor = sa.make_url(url).set(username="poor", password="poor").render_as_string(hide_password=False)
    bridge = Bridge([poor], server.url, name="poor")
    with pytest.raises(InvalidRequest, match="GRANT REPLICATION SLAVE") as refused:
        asyncio.run(bridge.run(once=True))
    assert "neither half_message nor server_half_message" in str(refused.value)
    wrong = sa.make_url(url).set(password="wrong").render_as_string(hide_password=False)
    with pytest.raises(InvalidRequest, match="Access denied"):
        asyncio.run(Bridge([wrong], server.url, name="wrong").run())
    with pytest.raises(InvalidRequest, match="notify relay"):
        Bridge(["sqlite:///y"], server.url)


def test_a_table_of_another_schema_is_named(url: str, server: ServerProcess) -> None:
    made = "CREATE TABLE half_message (transaction_id CHAR(36) PRIMARY KEY, note TEXT)"
    execute(url, made, "INSERT INTO half_message VALUES ('x', 'y')")
    with pytest.raises(Unreadable, match=r"has no column .*producer_group"):
        asyncio.run(Bridge([url], server.url, name="older").run(once=True))


def test_a_queue_takes_a_batch_only_at_its_position(server: ServerProcess, unique: str) -> None:
    """A queue compares and sets positions, fences by epoch, and names a message that no queue can take."""

    async def post(http: HttpClient, **fields: Any) -> Any:
        import msgspec

        body = encode_msgpack(PackedBridgeBatch(**fields))
        return msgspec.msgpack.decode(await http.call("POST", f"/v1/bridge/{unique}/batches", body, 10))

    def sent(n: int, topic: str = unique) -> BridgedTransaction:
        return BridgedTransaction(
            id=ids.to_text(ids.new_id()), producer_group="g", messages=[PackedMessage(topic=topic, body=b"%d" % n)]
        )

    async def run() -> None:
        http = HttpClient(server.url)
        with pytest.raises(Conflict, match="never claimed"):
            await post(http, epoch=1, expected_position="", position="a")
        await post(http, epoch=1, expected_position="", position="a", claim=True, transactions=[sent(0)])
        with pytest.raises(Conflict) as wrong:
            await post(http, epoch=1, expected_position="", position="b", transactions=[sent(9)])
        assert wrong.value.code == "unexpected_position"
        bad, good = sent(1, "no such/topic"), sent(1)
        answer = await post(http, epoch=1, expected_position="a", position="b", transactions=[bad, good])
        assert [item["id"] for item in answer["refused"]] == [bad.id] and answer["stored"] == 1
        # No message of a large transaction is visible before its last part.
        part, last = sent(2), sent(3)
        await post(http, epoch=1, expected_position="b", position="b", prepare=True, transactions=[part])
        assert len(await asyncio.to_thread(drain, server.url, unique, unique, 2)) == 2
        assert await asyncio.to_thread(drain, server.url, unique, unique, 0) == []
        await post(http, epoch=1, expected_position="b", position="c", commit=[part.id], transactions=[last])
        assert [m["body"] for m in await asyncio.to_thread(drain, server.url, unique, unique, 2)] == ["2", "3"]
        # A second try may cut the parts elsewhere: a message that was prepared comes as committed now.
        part = sent(4)
        await post(http, epoch=1, expected_position="c", position="c", prepare=True, transactions=[part])
        last = sent(5)
        answer = await post(http, epoch=1, expected_position="c", position="c2", transactions=[part, last])
        assert (answer["known"], answer["stored"], answer.get("refused")) == (1, 1, None)
        assert [m["body"] for m in await asyncio.to_thread(drain, server.url, unique, unique, 2)] == ["4", "5"]
        await post(http, epoch=2, expected_position="c2", position="c2", claim=True)
        with pytest.raises(Conflict) as fenced:
            await post(http, epoch=1, expected_position="c2", position="d", transactions=[sent(9)])
        assert fenced.value.code == "stale_epoch"
        http.close()

    subscribe(server.url, unique, unique)
    asyncio.run(run())


@pytest.mark.long
def test_several_sources_in_one_process(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """`notify bridge` with two databases: one with an unusable table stops alone, and the exit code says so."""
    other, bad = (sa.make_url(url).set(database=f"{unique[:20]}_{n}") for n in ("other", "bad"))
    for database in (other, bad):
        binlog_server.execute(f"CREATE DATABASE {database.database} CHARACTER SET utf8mb4")
    addresses = [u.render_as_string(hide_password=False) for u in (other, bad)]
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(4))
    outbox(addresses[0], unique, range(4, 8))
    execute(addresses[1], "CREATE TABLE half_message (id INT PRIMARY KEY)", "INSERT INTO half_message VALUES (1)")
    command = [sys.executable, "-m", "notify.cli.main", "bridge", "--url", server.url, "--once", "--json"]
    for name, address in zip(("first", "second", "third"), (url, *addresses), strict=True):
        command += ["--dsn", f"{name}-{unique}={address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    result = json.loads(done.stdout)
    assert done.returncode == 1 and len(result["stopped"]) == 1 and "no column" in result["stopped"][0]
    assert [s["rows"] for s in result["sources"].values()] == [3, 3, 0]
    assert sorted(numbers(server, unique, 6)) == [0, 1, 2, 4, 5, 6]
    for database in (other, bad):
        binlog_server.execute(f"DROP DATABASE {database.database}")


@pytest.mark.long
def test_a_large_commit_of_published_messages_is_bridged(url: str, server: ServerProcess, unique: str) -> None:
    """The bridge moves a large commit of `publish` in parts. The parts had no producer group, and were refused."""
    subscribe(server.url, unique, unique)
    make_storage(url)
    put(url, published(unique, *(f"{n} {'x' * 900_000}" for n in range(8))))
    assert move(url, server).totals.refused == 0
    assert sorted(body[0] for body in bodies(drain(server.url, unique, unique, 8))) == [*"01234567"]


@pytest.mark.long
def test_a_bridge_without_rows_of_ours_says_how_far_it_has_read(
    url: str, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other commits on the instance move it. They kept the heartbeats away, so that purges and key maps waited."""
    monkeypatch.setattr(bridge_module, "CAUGHT_UP_US", 1_000_000)
    engine = open_engine(url)
    schema.upgrade(engine, "main")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE others (n INT) ENGINE = InnoDB")

    def be_busy() -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO others VALUES (1)")

    def read_through_us() -> int:
        with engine.connect() as connection:
            return movers_of(connection).read_through_us

    with repeated(be_busy, threads=1, pause_seconds=0.05, passing=()):
        began = time.time_ns() // 1000
        with in_background(Bridge([url], server.url).run()) as bridging:
            bridging.until(lambda: read_through_us() > began, "the bridge to say that it has read others' commits")
            assert read_through_us() < time.time_ns() // 1000
        # A bridge that starts again knows it from its position. It began with 0, more than 50 years behind.
        before = read_through_us()
        again = Bridge([url], server.url)
        with in_background(again.run()) as bridging:
            bridging.until(lambda: again.totals.connections, "the bridge to begin again")
            announce(engine, mover_of(again.name), again.totals)
            assert read_through_us() >= before - 2_000_000
    engine.dispose()


@pytest.mark.long
def test_a_source_that_has_begun_to_send_a_transaction_is_not_read_to_its_end(url: str) -> None:
    """A bridge has not caught up while a transaction arrives. It said so until its end, however long that took."""
    outbox(url, "t", range(1))
    engine = open_engine(url)
    with engine.connect() as connection:
        is_mariadb = checkup.is_mariadb(connection)
    assembly = Assembly(sa.make_url(url).database or "", None, mariadb=is_mariadb)
    stream = BinlogStream(sa.make_url(url), 4711, None, mariadb=is_mariadb)
    stream.connect()
    state = []

    def until_it_begins() -> Iterator[bytes | None]:
        for packet in stream.packets():
            yield packet
            if packet is None and assembly.caught_up_us and not state:
                state.append("heard")
                outbox(url, "t", range(1, 2))
            elif packet is not None and packet[5] in GTIDS and state:
                return

    list(assembly.batches(until_it_begins()))
    assert state == ["heard"] and not assembly.caught_up_us
    stream.close()
    engine.dispose()
