"""A backfill reads rows and position in one snapshot, and moves only rows that were not moved."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from notify.binlog_bridge import backfill
from notify.binlog_bridge.bridge import Bridge
from notify.protocol.wire import instant
from notify.testing.binlog_server import BinlogServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import held_commits, is_held, move, numbers, outbox
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.groups import subscribe


@pytest.fixture
def url(binlog_url: str) -> str:
    return binlog_url


@pytest.mark.long
def test_a_transaction_that_is_in_the_binlog_and_not_yet_in_the_table_is_not_passed(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """Such a transaction waits for a semi-synchronous replica: the binlog has it, and no other session sees it yet."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    written = _binlog_end(binlog_server)
    writing = threading.Thread(target=outbox, args=(url, unique, range(4, 5)))
    with held_commits(binlog_server):
        writing.start()
        eventually(
            lambda: is_held(binlog_server) and _binlog_end(binlog_server) != written,
            "a transaction to wait for a replica",
        )
        # The bridge reads it from the binlog after the snapshot: MariaDB shows it before it is acknowledged, MySQL not.
        rows = move(url, server, fill=True).totals.rows
    writing.join()
    assert rows + move(url, server).totals.rows == 1
    assert numbers(server, unique, 3) == [0, 1, 4]


def _binlog_end(server: BinlogServer) -> object:
    """The newest file of the binlog, and how long it is."""
    return server.execute("SHOW BINARY LOGS")[-1][:2]


@pytest.mark.long
def test_only_what_was_not_moved_is_sent_in_the_order_of_its_times(
    url: str, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "TRANSACTIONS", 2)
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(7))
    engine = sa.create_engine(url)

    def change(numbers: str, values: str) -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"UPDATE half_message SET {values} WHERE JSON_VALUE(CONVERT(body USING utf8mb4), '$.n') IN ({numbers})"
            )

    change("0, 1, 2", "created_at = created_at - INTERVAL 4000 SECOND")
    bridge = move(url, server)
    assert bridge.totals.stored == 6
    again = move(url, server, fill=True)
    # Rows of the last hour before the position are sent again, and known by their ids; older ones are not sent.
    assert (again.totals.known, again.totals.stored) == (3, 0)
    outbox(url, unique, range(8, 14))
    change("8", "created_at = created_at + INTERVAL 60 SECOND")
    change("9", "relayed = 1")
    with engine.begin() as connection:
        (since,) = connection.exec_driver_sql("SELECT MIN(created_at) - INTERVAL 1 DAY FROM half_message").one()
    last = move(url, server, fill=True)
    assert (last.totals.known, last.totals.stored) == (3, 4)
    assert numbers(server, unique, 10) == [0, 1, 2, 4, 5, 6, 10, 12, 13, 8]
    # With an explicit instant all rows from it on are sent.
    since_us = round(since.timestamp() * 1e6)
    code, done = cli(
        "bridge", "--dsn", url, "--url", server.url, "--backfill-from", instant(since_us), "--once", "--json"
    )
    assert code == 0 and done["sources"][bridge.name]["known"] == 10
    code, done = cli("bridge", "--dsn", url, "--url", server.url, "--backfill-from", "2026-01-01T00:00:00")
    assert code == 2 and "write 2026-11-21T08:00:00Z" in done["text"]
    outbox(url, unique, range(14, 15))
    code, done = cli("bridge", "--dsn", url, "--url", server.url, "--once")
    assert done["text"].endswith(f"{bridge.name}: 1 message, 1 transaction stored\n")
    empty = sa.make_url(url).set(database="mysql").render_as_string(hide_password=False)
    code, done = cli("bridge", "--dsn", empty, "--url", server.url, "--once")
    assert code == 1 and done["text"].splitlines()[-1].startswith("notify: source (not reached yet): "), done
    engine.dispose()


@pytest.mark.long
def test_a_session_that_says_it_is_later_has_nothing_taken_for_moved(
    url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """A backfill began an hour before the time of the newest transaction, which SET TIMESTAMP had moved to next year:
    what was lost with the binlog was passed over for good."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    database = sa.make_url(url).database
    binlog_server.execute("SET TIMESTAMP = UNIX_TIMESTAMP() + 300 * 86400", f"CREATE TABLE {database}.later (n INT)")
    assert move(url, server).totals.stored == 2
    outbox(url, unique, range(4, 5))
    binlog_server.forget_binlogs()
    outbox(url, unique, range(5, 6))
    assert move(url, server, fill=True).totals.stored == 2
    assert numbers(server, unique, 4) == [0, 1, 4, 5]


@pytest.mark.long
def test_a_backfill_begins_while_services_write(url: str, server: ServerProcess, unique: str) -> None:
    """Each transaction is in the snapshot of the tables or behind its position, on MySQL and on MariaDB."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(1))
    ranges = [range(begin, begin + 80) for begin in range(4, 4 + 4 * 80, 80)]
    with ThreadPoolExecutor(len(ranges)) as writers:
        writing = [writers.submit(outbox, url, unique, part) for part in ranges]
        sent = [0, *(n for part in ranges for n in part if n % 4 != 3)]
        bridge = Bridge([url], server.url)
        with in_background(bridge.run(fill=True)) as bridging:
            bridging.until(lambda: bridge.totals.stored >= len(sent), "the bridge to move everything")
        assert bridge.totals.stored == len(sent)
        for each in writing:
            each.result()
    assert sorted(numbers(server, unique, len(sent))) == sent
