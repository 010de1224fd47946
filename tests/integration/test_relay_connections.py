"""Databases named by `--dsn`: every command finds their driver, and notices that their machine is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.cli.database import opened
from notify.client import create_tables
from notify.client.tables.definitions import half_message
from notify.errors import Unavailable
from notify.movers.relay.leases import leases_of
from notify.movers.relay.relay import Relay
from notify.runtime.databases import KEEPALIVE
from notify.storage.sql import engines
from notify.storage.sql.tables import server_member
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.bridges import outbox
from tests.support.clock import PATIENCE_SECONDS
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.groups import subscribe
from tests.support.proxy import Proxy
from tests.support.servers import make_storage
from tests.support.wal import insert


@pytest.fixture
def mariadb(database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[sa.URL]:
    with empty_database("mariadb", database_urls, tmp_path) as url:
        yield sa.make_url(url)


def text(url: sa.URL) -> str:
    return url.render_as_string(hide_password=False)


def test_a_relay_goes_on_when_its_databases_machine_was_gone(
    mariadb: sa.URL,
    server: ServerProcess,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection stands, and nothing comes back on it: the relay waited on it for ever."""
    monkeypatch.setattr(engines, "VISITOR_READ_SECONDS", 1)
    subscribe(server.url, unique, unique)
    outbox(text(mariadb), unique, range(1))
    with (
        caplog.at_level(logging.INFO, "notify.relay"),
        Proxy(str(mariadb.host), mariadb.port or 3306) as proxy,
        opened(text(mariadb.set(host="127.0.0.1", port=proxy.port))) as engine,
    ):
        # A lease so long that the database does not end its silent session: one that is gone never does.
        relay = Relay(engine, server.url, lease_seconds=600)
        with in_background(relay.run(interval=0.05)) as relaying:
            relaying.until(lambda: relay.total.sent == 1, "the first to be sent")
            proxy.drop_answers = True
            relaying.until(lambda: "again in" in caplog.text, "the relay to notice it")
            proxy.drop_answers = False
            outbox(text(mariadb), unique, range(1, 2))
            relaying.until(lambda: relay.total.sent == 2, "the second to be sent")
    assert caplog.text.count(f"to {server.url}") == 2  # at first, and when it continues


def test_a_visitors_connection_to_postgresql_asks_whether_its_other_end_is_there(
    database_urls: Mapping[str, str],
) -> None:
    """A proxy cannot show it: this machine's own network answers for it. The socket's options can."""
    url = sa.make_url(database_urls["postgresql"]).set(drivername="postgresql")
    with opened(text(url.update_query_dict({"keepalives_count": "7"}))) as engine, engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        with socket.socket(fileno=os.dup(driver.fileno())) as own:
            if own.family == socket.AF_UNIX:
                pytest.skip("the database is reached by a socket of this machine, which has no other end to lose")
            said = {
                option: own.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            }
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert said == {
        socket.TCP_USER_TIMEOUT: engines.IO_SECONDS * 1000,
        socket.TCP_KEEPIDLE: KEEPALIVE["tcp_keepalives_idle"],
        socket.TCP_KEEPINTVL: KEEPALIVE["tcp_keepalives_interval"],
        socket.TCP_KEEPCNT: 7,  # what the URL says goes before
    }


def test_every_command_takes_a_url_without_a_driver(mariadb: sa.URL, server: ServerProcess, unique: str) -> None:
    """As the documentation writes them: `mysql://…`. They failed with "No module named 'MySQLdb'"."""
    dsn = text(mariadb.set(drivername="mysql"))
    outbox(text(mariadb), unique, range(1))
    subscribe(server.url, unique, unique)
    url = ("--url", server.url)
    for words in (("doctor", *url), ("doctor", "--bridge", *url), ("refused", "list"), ("purge", *url)):
        code, said = cli(*words, "--dsn", dsn, "--json")
        assert code in (0, 1) and "MySQLdb" not in str(said), (words, said)
    assert cli("relay", *url, "--dsn", dsn, "--once", "--json") == (0, {"sent": 1, "refused": 0})
    with opened(text(mariadb.set(drivername="mariadb"))) as engine:
        create_tables(engine)
        with engine.connect() as connection:
            assert connection.scalar(sa.select(half_message.c.relayed)) == 1


def test_a_driver_that_is_not_there_is_said(unique: str) -> None:
    code, said = cli("refused", "list", "--dsn", "mysql+mysqlconnector://127.0.0.1/x")
    assert code == 2 and "--dsn" in said["text"]


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_once_beside_a_relay_that_holds_everything_is_no_success(
    kind: str, database_urls: Mapping[str, str], server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    """It said "0 sent" and success, while messages waited."""
    with empty_database(kind, database_urls, tmp_path) as url:
        outbox(url, unique, range(1))
        with opened(url) as engine:
            holding = leases_of(engine)
            schema = "public" if kind == "postgresql" else str(engine.url.database)
            assert holding.renew(schema) and holding.all()
            code, said = cli("relay", "--dsn", url, "--url", server.url, "--once", "--json")
            assert code == 2 and "other relays" in said["text"]
            holding.close()


@pytest.mark.parametrize("kind", ["mysql", pytest.param("mariadb", marks=pytest.mark.long)])
def test_a_transaction_that_stays_open_holds_no_relay_up(
    kind: str, database_urls: Mapping[str, str], server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    """The relay marks most of the table's rows. It waited for those that a service had not committed yet, sent the same
    rows again and again meanwhile, and kept the service's next messages waiting, up to a deadlock."""
    with empty_database(kind, database_urls, tmp_path) as url, opened(url) as engine:
        create_tables(engine)
        with engine.begin() as connection:
            for n in range(300):
                insert(connection, unique, n)
        with engine.begin() as service:
            insert(service, unique, 1000)
            assert asyncio.run(asyncio.wait_for(Relay(engine, server.url).run(once=True), PATIENCE_SECONDS)).sent == 300
            with engine.begin() as relay:
                relay.execute(half_message.update().where(half_message.c.relayed + 0 == 1).values(relayed=1))
                service.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
                insert(service, unique, 1001)
        assert asyncio.run(Relay(engine, server.url).run(once=True)).sent == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "table"), [("postgresql", "half_message"), ("postgresql", "notify_refused"), ("mariadb", "half_message")]
)
def test_a_relay_says_that_another_session_has_locked_a_table(
    kind: str, table: str, database_urls: Mapping[str, str], server: ServerProcess, unique: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As a migration does. It waited for its end without a word, and could not be stopped meanwhile."""
    monkeypatch.setattr("notify.movers.relay.leases.LOCK_SECONDS", 0.1)
    subscribe(server.url, unique, unique)
    # A relay that waits without a bound fails this test as soon as the database ends the session that holds the lock.
    locks = {
        "postgresql": ("SET idle_in_transaction_session_timeout = '20s'", "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE"),
        "mariadb": ("SET SESSION wait_timeout = 20", "LOCK TABLES {} WRITE"),
    }
    with empty_database(kind, database_urls, tmp_path) as url, opened(url) as engine, opened(url) as others:
        outbox(url, unique, range(1))
        with others.connect() as other:
            for statement in locks[kind]:
                other.exec_driver_sql(statement.format(table))
            with pytest.raises(Unavailable, match=r"(?i)lock (wait )?timeout"):
                asyncio.run(Relay(engine, server.url).run(once=True))
            other.invalidate()
        assert asyncio.run(Relay(engine, server.url).run(once=True)).sent == 1


OFTEN = 12
"""More often than psycopg executes a statement before it prepares it, in each of the sessions of a relay."""


@pytest.mark.long
def test_a_relay_is_not_bound_as_requests_of_its_role_are(
    database_urls: Mapping[str, str], server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    """A page of a large table was never read: its statement was cancelled each time."""
    subscribe(server.url, unique, unique)
    with empty_database("postgresql", database_urls, tmp_path) as url:
        outbox(url, unique, range(1))
        bound = sa.make_url(url).update_query_dict({"options": "-c statement_timeout=2000"})
        with opened(bound.render_as_string(hide_password=False)) as engine:

            @sa.event.listens_for(engine, "before_cursor_execute")
            def slow(connection: sa.Connection, cursor: Any, statement: str, *given: Any) -> None:
                if "FOR UPDATE" in statement or "ORDER BY" in statement:
                    connection.connection.cursor().execute("SELECT pg_sleep(2.5)")

            assert asyncio.run(Relay(engine, server.url).run(once=True)).sent == 1


def test_tables_that_are_made_later_are_relayed(
    engine_url: str, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service's outbox came into a server's database: its rows waited until the relay was started again."""
    monkeypatch.setattr("notify.movers.relay.relay.LOOK_SECONDS", 0.2)
    make_storage(engine_url)
    subscribe(server.url, unique, unique)

    def relay_is_there(engine: sa.Engine) -> bool:
        with engine.connect() as connection:
            return connection.scalar(sa.select(server_member.c.name).where(server_member.c.kind == "relay")) is not None

    with opened(engine_url) as engine:
        relay = Relay(engine, server.url)
        with in_background(relay.run(interval=0.05)) as relaying:
            relaying.until(lambda: relay_is_there(engine), "the relay to say that it is there")
            outbox(engine_url, unique, range(1))
            relaying.until(lambda: relay.total.sent == 1, "the row of the new table to be sent")


def test_a_relay_goes_on_when_a_column_gets_another_type(
    database_urls: Mapping[str, str], server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    """PostgreSQL refuses a statement that the session prepared before: the relay ended."""
    subscribe(server.url, unique, unique)
    with empty_database("postgresql", database_urls, tmp_path) as url, opened(url) as engine:
        create_tables(engine)
        relay = Relay(engine, server.url)
        with in_background(relay.run(interval=0.05)) as relaying:
            for count in range(1, OFTEN + 2):
                if count > OFTEN:
                    # psycopg forgets what it has prepared in a session that alters something.
                    with opened(url) as other, other.begin() as connection:
                        connection.exec_driver_sql("ALTER TABLE half_message ALTER COLUMN transaction_id TYPE text")
                outbox(url, unique, range(4 * count, 4 * count + 1))
                relaying.until(lambda count=count: relay.total.sent == count, "the row to be sent")  # type: ignore[misc]
