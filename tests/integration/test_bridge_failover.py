"""A bridge at servers that become replicas of each other, and do not log what they take, or have not logged it all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import sqlalchemy as sa

from notify.binlog_bridge import announcing, purge
from notify.binlog_bridge.binlog import source
from notify.binlog_bridge.binlog.source import findings
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Purged
from notify.binlog_bridge.purge import purge_moved
from notify.errors import Unavailable
from notify.storage.sql import schema
from notify.storage.sql.engines import open_engine
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import move, numbers, outbox, poison
from tests.support.databases import own_mariadb
from tests.support.groups import subscribe


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[MariaDbServer, MariaDbServer]]:
    """One that logs everything, and one with MariaDB's default."""
    with ExitStack() as stack:
        yield (
            stack.enter_context(own_mariadb()),
            stack.enter_context(own_mariadb(["--server-id=2", "--log-slave-updates=OFF"])),
        )


@pytest.fixture
def logging(servers: tuple[MariaDbServer, MariaDbServer]) -> MariaDbServer:
    return begin_anew(servers[0])


@pytest.fixture
def silent(servers: tuple[MariaDbServer, MariaDbServer]) -> MariaDbServer:
    return begin_anew(servers[1])


def begin_anew(server: MariaDbServer) -> MariaDbServer:
    """A server that never was a replica, with an empty binlog."""
    server.promote()
    server.execute("RESET MASTER", "SET GLOBAL gtid_slave_pos = ''")
    return server


def url_at(server: MariaDbServer, database: str) -> str:
    return sa.make_url(server.url).set(database=database).render_as_string(hide_password=False)


def made(server: MariaDbServer, database: str) -> str:
    """The address of a new database."""
    server.execute(f"CREATE DATABASE {database} CHARACTER SET utf8mb4")
    return url_at(server, database)


def catch_up(replica: MariaDbServer, primary: MariaDbServer) -> None:
    replica.wait_until_it_has(str(primary.execute("SELECT @@gtid_current_pos")[0][0]))


def take_over(replica: MariaDbServer, primary: MariaDbServer) -> None:
    """The replica becomes the primary, and the primary its replica."""
    catch_up(replica, primary)
    replica.promote()
    primary.follow(replica)


@pytest.mark.long
def test_a_replica_that_does_not_log_what_it_takes_is_not_read(
    logging: MariaDbServer, silent: MariaDbServer, server: ServerProcess, unique: str
) -> None:
    """A bridge waited there in peace, and after the failover it continued behind what the replica had taken."""
    subscribe(server.url, unique, unique)
    silent.follow(logging)
    first, second = made(logging, unique), url_at(silent, unique)
    outbox(first, unique, range(3))
    move(first, server)
    outbox(first, unique, range(4, 7))
    catch_up(silent, logging)
    with pytest.raises(Purged, match="is a replica that does not log"):
        move(second, server)
    silent.promote()
    with pytest.raises(Purged, match="took transactions up to"):
        move(second, server)
    outbox(second, unique, range(8, 11))
    move(second, server, fill=True)
    outbox(second, unique, range(12, 15))
    move(second, server)
    engine = sa.create_engine(second)
    with engine.connect() as connection:
        assert [f for f in findings(connection, 7) if "log_slave_updates is OFF" in f.what and not f.stops]
    engine.dispose()
    wanted = [n for n in range(15) if n % 4 != 3]
    assert sorted(numbers(server, unique, len(wanted))) == wanted


@pytest.mark.long
def test_transactions_of_another_primary_in_between_are_not_skipped(
    logging: MariaDbServer,
    silent: MariaDbServer,
    server: ServerProcess,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bridge's position is in the server's own binlog, and so is what came later: all between was skipped. A purge
    took it for moved."""
    url = made(silent, unique)
    outbox(url, unique, range(2))
    move(url, server)
    logging.follow(silent)
    take_over(logging, silent)
    outbox(url_at(logging, unique), unique, range(4, 6))
    take_over(silent, logging)
    engine = sa.create_engine(url)
    monkeypatch.setattr(purge, "WAIT_SECONDS", 0.1)
    with pytest.raises(Unavailable, match="is it running"):
        asyncio.run(purge_moved(engine, server.url, older_than=0))
    engine.dispose()
    outbox(url, unique, range(8, 10))
    with pytest.raises(Purged, match="took transactions up to"):
        move(url, server)


@pytest.mark.long
def test_a_bridge_does_not_write_to_a_replica(
    logging: MariaDbServer,
    silent: MariaDbServer,
    server: ServerProcess,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With all rights it wrote to the registry every two seconds, also at a replica, whose replication ended by it."""
    monkeypatch.setattr(announcing, "ANNOUNCE_SECONDS", 0.05)
    url = made(silent, unique)
    outbox(url, unique, range(1))
    engine = open_engine(url)
    schema.upgrade(engine, "main")
    refused = poison(engine)
    engine.dispose()
    logging.follow(silent)
    catch_up(logging, silent)
    bridge = Bridge([url_at(logging, unique)], server.url, name=unique)
    with in_background(bridge.run()) as bridging:
        wanted = "takes no writes (read_only is ON)"
        bridging.until(lambda: caplog.text.count(wanted) > 1, "the refusal to wait")
        assert str(logging.execute("SELECT @@gtid_binlog_state")[0][0]).startswith("0-2-")
        logging.promote()
        bridging.until(lambda: bridge.totals.refused, "the refusal to be noted")
    listed = logging.execute(f"SELECT transaction_id FROM {unique}.notify_refused")
    assert [str(row[0]) for row in listed] == [refused]


def test_a_node_of_galera_that_does_not_log_what_others_write_is_refused(
    silent: MariaDbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = source.variables
    monkeypatch.setattr(source, "variables", lambda at: real(at) | {"wsrep_on": "ON"})
    engine = sa.create_engine(silent.url)
    with engine.connect() as connection:
        assert [f for f in findings(connection, 7) if "Galera" in f.what and f.stops]
    engine.dispose()


@pytest.mark.long
def test_a_bridge_that_stays_connected_does_not_pass_it_either(
    logging: MariaDbServer, silent: MariaDbServer, server: ServerProcess, unique: str
) -> None:
    url = made(silent, unique)
    outbox(url, unique, range(2))
    bridge = Bridge([url], server.url)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.rows == 2, "the first rows")
        logging.follow(silent)
        take_over(logging, silent)
        outbox(url_at(logging, unique), unique, range(4, 6))
        take_over(silent, logging)
        outbox(url, unique, range(8, 10))
        with pytest.raises(Purged, match="in between"):
            bridging.result()


@pytest.mark.long
def test_a_replica_from_a_backup_is_not_read_from_an_older_position(
    logging: MariaDbServer, silent: MariaDbServer, server: ServerProcess, unique: str
) -> None:
    """Its binlog has nothing of what is in the backup, and it accepts any position as long as it is empty."""
    url = made(silent, unique)
    outbox(url, unique, range(2))
    move(url, server)
    outbox(url, unique, range(4, 6))
    logging.follow(silent)
    catch_up(logging, silent)
    logging.execute("STOP SLAVE")
    taken = logging.execute("SELECT @@gtid_slave_pos")[0][0]
    logging.execute("RESET MASTER", f"SET GLOBAL gtid_slave_pos = '{taken}'", "START SLAVE")
    with pytest.raises(Purged, match="nothing of replication domain 0"):
        move(url_at(logging, unique), server)
