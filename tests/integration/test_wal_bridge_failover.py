"""A bridge at PostgreSQL servers that are promoted, and come back: it continues only where nothing is missing."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import sqlalchemy as sa

from notify.binlog_bridge import purge
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Purged
from notify.binlog_bridge.purge import purge_moved
from notify.check import CheckUnavailable
from notify.check.question import ask
from notify.cli.database import opened
from notify.client import Message, TransactionProducer, create_tables
from notify.client.inbox.inbox import note_old
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.old_rows import DAY
from notify.errors import Unavailable
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from tests.support.bridges import move, numbers, outbox
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import postgresql18_programs
from tests.support.groups import subscribe

SETTINGS = ("wal_level=logical", "max_slot_wal_keep_size=1GB")


def asked(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        ask(connection, ids.to_text(ids.new_id()), "g")


def purged(engine: sa.Engine) -> None:
    asyncio.run(DatabaseCalls(engine).call(note_old, DAY, schema="public"))


def scalar(server: PostgreSqlServer, query: str) -> object:
    engine = sa.create_engine(server.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar()


def catch_up(standby: PostgreSqlServer, primary: PostgreSqlServer) -> None:
    end = scalar(primary, "SELECT pg_current_wal_flush_lsn()::text")
    eventually(lambda: scalar(standby, f"SELECT pg_last_wal_replay_lsn() >= '{end}'"), "the standby to have it all")


@pytest.fixture
def servers() -> Iterator[tuple[PostgreSqlServer, PostgreSqlServer]]:
    """A primary and its standby."""
    with ExitStack() as stack:
        made = []
        try:
            for _ in range(2):
                place = Path(stack.enter_context(TemporaryDirectory(prefix="notify-wal-")))
                place.chmod(0o755)  # root runs PostgreSQL as another user
                made.append(PostgreSqlServer(place, durable=False, settings=SETTINGS))
        except NotAvailable as reason:
            pytest.skip(str(reason))
        primary, standby = made
        stack.callback(primary.create().stop)
        stack.callback(standby.follow(primary).stop)
        yield primary, standby


@pytest.fixture
def with_failover_slots() -> Iterator[tuple[PostgreSqlServer, PostgreSqlServer]]:
    """A primary of PostgreSQL 18, and its standby, which keeps the primary's slots."""
    with ExitStack() as stack:
        places = []
        for _ in range(2):
            places.append(Path(stack.enter_context(TemporaryDirectory(prefix="notify-wal-"))))
            places[-1].chmod(0o755)  # root runs PostgreSQL as another user
        try:
            programs = postgresql18_programs()
        except NotAvailable as reason:
            pytest.skip(str(reason))
        primary = PostgreSqlServer(places[0], durable=False, settings=SETTINGS, programs=programs).create()
        stack.callback(primary.stop)
        scalar(primary, "SELECT pg_create_physical_replication_slot('standby')")
        primary.stop()
        conninfo = f"host=127.0.0.1 port={primary.port} user=postgres dbname=postgres"
        follows = (
            f"primary_conninfo={conninfo}", "primary_slot_name=standby", "hot_standby_feedback=on",
            "sync_replication_slots=on",
        )  # fmt: skip
        standby = PostgreSqlServer(places[1], durable=False, settings=(*SETTINGS, *follows), programs=programs)
        # These programs have no pg_basebackup, and that of an older version refuses a newer server.
        subprocess.run(["cp", "-a", places[0] / "data", places[1] / "data"], check=True)
        (places[1] / "data" / "standby.signal").touch()
        primary.start()
        standby.start()
        stack.callback(standby.stop)
        yield primary, standby


@pytest.mark.long
def test_a_bridge_goes_on_at_a_new_primary_that_has_its_slot(
    with_failover_slots: tuple[PostgreSqlServer, PostgreSqlServer], server: ServerProcess, unique: str
) -> None:
    """Nothing is taken from the tables: messages without rows, which only the log has, are there, too."""
    primary, standby = with_failover_slots
    subscribe(server.url, unique, unique)
    outbox(primary.url, unique, range(4))
    move(primary.url, server)

    def is_kept() -> object:
        """A standby takes a slot over once its bridge has confirmed something that the standby has."""
        scalar(primary, "SELECT pg_logical_emit_message(true, 'x', '')")
        move(primary.url, server)
        kept = "SELECT count(*) FROM pg_replication_slots WHERE synced AND NOT temporary AND slot_name LIKE 'notify%%'"
        return scalar(standby, kept)

    eventually(is_kept, "the standby to keep the slot")
    outbox(primary.url, unique, range(4, 8))
    engine = sa.create_engine(primary.url)
    with TransactionProducer("http://127.0.0.1:9", group=unique, engine=engine, mode="outbox", rows=False) as producer:
        with engine.connect() as connection, producer.transaction(connection) as tx:
            tx.send(Message(unique, {"n": 100}, key="k"))
    engine.dispose()
    catch_up(standby, primary)
    primary.kill()
    scalar(standby, "SELECT pg_promote()")
    outbox(standby.url, unique, range(8, 12))
    bridge = Bridge([primary.url, standby.url], server.url)
    asyncio.run(asyncio.wait_for(bridge.run(once=True), PATIENCE_SECONDS))
    assert bridge.totals.rows == 7
    assert sorted(numbers(server, unique, 10)) == [*(n for n in range(12) if n % 4 != 3), 100]


@pytest.mark.long
def test_a_bridge_goes_on_at_a_new_primary_once_the_tables_have_filled_what_its_slot_lacked(
    servers: tuple[PostgreSqlServer, PostgreSqlServer],
    server: ServerProcess,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PostgreSQL 15 has no slots on standbys. The old primary, which still has the slot, must not be read again."""
    primary, standby = servers
    subscribe(server.url, unique, unique)
    outbox(primary.url, unique, range(4))
    move(primary.url, server)
    outbox(primary.url, unique, range(4, 8))
    catch_up(standby, primary)
    primary.kill()
    scalar(standby, "SELECT pg_promote()")
    outbox(standby.url, unique, range(8, 12))
    # Places of the two timelines say nothing of each other: no row is purged before the bridge has read here.
    monkeypatch.setattr(purge, "WAIT_SECONDS", 0.1)
    engine = sa.create_engine(standby.url)
    with pytest.raises(Unavailable, match="Nothing that it has not read was deleted"):
        asyncio.run(purge_moved(engine, server.url, older_than=0))
    with pytest.raises(Purged, match=r"has no slot .*--backfill"):
        move(standby.url, server)
    move(standby.url, server, fill=True)
    outbox(standby.url, unique, range(12, 16))
    assert move(standby.url, server).totals.rows == 3
    assert sorted(numbers(server, unique, 12)) == [n for n in range(16) if n % 4 != 3]
    engine.dispose()
    primary.start()
    outbox(primary.url, unique, range(16, 20))
    with pytest.raises(Purged, match=r"timeline 1, which does not come from timeline 2 .*old primary"):
        move(primary.url, server)


@pytest.mark.long
def test_a_snapshot_of_the_disk_stops_it_also_when_its_log_is_longer_by_then(
    servers: tuple[PostgreSqlServer, PostgreSqlServer], server: ServerProcess, unique: str
) -> None:
    """It has the cluster's identifier, timeline and slot. A crash of the machine alone stops nothing."""
    primary, _ = servers
    data, copy = primary.directory / "data", primary.directory / "copy"
    subscribe(server.url, unique, unique)
    outbox(primary.url, unique, range(3))
    move(primary.url, server)
    primary.kill()
    subprocess.run(["cp", "-a", data, copy], check=True)
    primary.start()
    outbox(primary.url, unique, range(4, 7))
    scalar(primary, "SELECT pg_logical_emit_message(true, 'x', repeat('x', 100000))")
    assert move(primary.url, server).totals.rows == 3
    primary.kill()
    data.rename(primary.directory / "lost")
    copy.rename(data)
    primary.start()
    outbox(primary.url, unique, range(8, 11))
    scalar(primary, "SELECT pg_logical_emit_message(true, 'x', repeat('x', 1000000))")
    for _ in range(2):
        with pytest.raises(Purged, match=r"found its log up to .* only.*snapshot of its disk.*--backfill"):
            move(primary.url, server)
    move(primary.url, server, fill=True)
    outbox(primary.url, unique, range(12, 15))
    assert move(primary.url, server).totals.rows == 3
    assert numbers(server, unique, 12) == [n for n in range(15) if n % 4 != 3]


@pytest.mark.long
def test_a_new_primary_without_the_last_transactions_of_the_old_one_stops_it(
    servers: tuple[PostgreSqlServer, PostgreSqlServer], server: ServerProcess, unique: str
) -> None:
    """Messages that the new primary lost are told apart from those that are only missing in its slot."""
    primary, standby = servers
    subscribe(server.url, unique, unique)
    outbox(primary.url, unique, range(4))
    catch_up(standby, primary)
    standby.kill()
    outbox(primary.url, unique, range(4, 8))
    move(primary.url, server)
    primary.kill()
    standby.start()
    scalar(standby, "SELECT pg_promote()")
    outbox(standby.url, unique, range(8, 12))
    scalar(standby, "SELECT pg_logical_emit_message(true, 'x', repeat('x', 1000000))")  # its log is longer now
    with pytest.raises(Purged, match=r"was promoted at .*GHOST.*--backfill"):
        move(standby.url, server)
    move(standby.url, server, fill=True)
    outbox(standby.url, unique, range(12, 16))
    assert move(standby.url, server).totals.rows == 3
    assert sorted(numbers(server, unique, 12)) == [n for n in range(16) if n % 4 != 3]


@pytest.mark.long
@pytest.mark.parametrize("work", [asked, purged])
def test_a_service_does_not_come_back_to_a_standby(
    servers: tuple[PostgreSqlServer, PostgreSqlServer], work: Callable[[sa.Engine], None]
) -> None:
    """After a failover a name may lead to a standby for a while. The session stayed in the service's pool, and each
    check and purge got it until a restart (riverqueue/river#1225)."""
    primary, standby = servers
    at_primary = sa.create_engine(primary.url)
    create_tables(at_primary)
    with at_primary.begin() as connection:
        connection.exec_driver_sql("INSERT INTO notify_inbox VALUES ('g', 'old', 0, '2020-01-01')")
    at_primary.dispose()
    catch_up(standby, primary)
    ports = [sa.make_url(server.url).port for server in servers]
    engine = sa.create_engine(primary.url, pool_size=1, max_overflow=0)

    @sa.event.listens_for(engine, "do_connect")
    def lead(dialect: object, record: object, arguments: object, parameters: dict[str, Any]) -> None:
        parameters["port"] = ports.pop() if len(ports) > 1 else ports[0]

    with pytest.raises((CheckUnavailable, sa.exc.DBAPIError), match="during recovery"):
        work(engine)
    work(engine)
    engine.dispose()


@pytest.mark.long
def test_a_relay_is_refused_by_a_standby_and_finds_the_primary_among_several_hosts(
    servers: tuple[PostgreSqlServer, PostgreSqlServer], server: ServerProcess, unique: str
) -> None:
    """It said that the server cannot execute LISTEN during recovery."""
    primary, standby = servers
    subscribe(server.url, unique, unique)
    outbox(primary.url, unique, range(2))
    catch_up(standby, primary)

    def relay(url: str) -> int:
        with opened(url) as engine:
            return asyncio.run(asyncio.wait_for(Relay(engine, server.url).run(once=True), PATIENCE_SECONDS)).sent

    hosts = f"postgresql://postgres@/postgres?host=127.0.0.1:{standby.port}&host=127.0.0.1:{primary.port}"
    with pytest.raises(Unavailable, match=r"is a standby.*target_session_attrs=primary"):
        relay(hosts)
    assert relay(f"{hosts}&target_session_attrs=primary") == 2
