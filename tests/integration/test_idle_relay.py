"""An idle relay leaves its database alone: it is woken by commits, and looks now and then for rows that wake nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.creation import _WAKE_BODY
from notify.client.tables.definitions import half_message
from notify.movers import refused
from notify.movers.refused import Refusal
from notify.movers.relay import relay as relays
from notify.movers.relay.leases import PostgreSqlLeases
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.runtime.databases import WAKE_CHANNEL, database_now
from notify.testing.process import ServerProcess
from tests.support.background import in_background
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.groups import subscribe
from tests.support.shop import make_engine

NEVER = 290.0
"""A wait, in seconds, that is longer than any test's patience."""


class Outbox:
    """A database with an outbox, an engine for a relay, and one for everybody else."""

    def __init__(self, url: str, topic: str) -> None:
        self.engine, self.relays = make_engine(url), make_engine(url)
        self.topic = topic
        create_tables(self.engine)
        self.statements: list[str] = []
        """The statements of the relay."""
        sa.event.listen(self.relays, "before_cursor_execute", lambda *args: self.statements.append(args[2]))

    def insert(self, connection: sa.Connection) -> str:
        """The id of a new message's row."""
        row = {
            "transaction_id": ids.to_text(ids.new_id()), "message_no": 0, "producer_group": "g", "mode": "outbox",
            "state": "COMMITTED", "shards": "", "topic": self.topic, "key": "k", "body": b"x", "relayed": 0,
        }  # fmt: skip
        connection.execute(half_message.insert().values(row | {"created_at": database_now()}))
        return str(row["transaction_id"])

    def send(self, count: int = 1) -> None:
        for _ in range(count):
            with self.engine.begin() as connection:
                self.insert(connection)

    def execute(self, *statements: str) -> None:
        with self.engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def close(self) -> None:
        self.engine.dispose()
        self.relays.dispose()


@pytest.fixture
def outbox(database_urls: Mapping[str, str], tmp_path: Path, server: ServerProcess, unique: str) -> Iterator[Outbox]:
    subscribe(server.url, unique, unique)
    with empty_database("postgresql", database_urls, tmp_path) as url:
        made = Outbox(url, unique)
        yield made
        made.close()


@contextmanager
def relaying(outbox: Outbox, url: str, interval: float = NEVER) -> Iterator[Callable[[int], object]]:
    """A relay runs, and has sent a message. Yields a function that waits until it has sent so many."""
    relay = Relay(outbox.relays, url)
    with in_background(relay.run(interval=interval)) as running:

        def sent(count: int) -> None:
            running.until(lambda: relay.total.sent == count, f"{count} to be sent")

        outbox.send()
        sent(1)
        yield sent


@pytest.mark.long
def test_an_idle_relay_asks_nothing(outbox: Outbox, server: ServerProcess) -> None:
    """It asked 14 times a second, for ever: a database that is paid by use never slept."""
    with relaying(outbox, server.url, interval=0.05) as sent:
        count = -1
        while count != len(outbox.statements):
            count = len(outbox.statements)
            time.sleep(1)  # a shorter wait would only miss a fault
        outbox.send()
        sent(2)
        assert len(outbox.statements) - count < 25


def test_many_notifications_are_taken_at_once(outbox: Outbox) -> None:
    """The driver keeps those that come beside the answers of other statements, and each of them cost a round: a relay
    that had been busy asked for a minute when nothing was left."""
    leases = PostgreSqlLeases(outbox.relays)
    try:
        assert leases.renew("public")
        payload = "CASE n WHEN 7 THEN '' ELSE 'x' || n END"
        outbox.execute(f"SELECT pg_notify('{WAKE_CHANNEL}', {payload}) FROM generate_series(1, 500) n")
        assert leases.renew("public")  # they come with its answer
        assert leases.wait(NEVER, ["public"]) == {""}
        assert leases.wait(0.2, ["public"]) == leases.arrived() == set()
    finally:
        leases.close()


def test_rows_that_wake_nobody_are_found(
    outbox: Outbox, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a replication or a load writes without triggers."""
    monkeypatch.setattr(relays, "LOOK_SECONDS", 0.2)
    with relaying(outbox, server.url, interval=0.05) as sent:
        with outbox.engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
            outbox.insert(connection)
        sent(2)


@pytest.mark.parametrize(
    "change",
    ["DROP TRIGGER half_message_wake ON half_message", "ALTER TABLE half_message DISABLE TRIGGER half_message_wake"],
)
def test_without_the_trigger_a_relay_looks_at_each_interval(outbox: Outbox, server: ServerProcess, change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(relays, "LOOK_SECONDS", NEVER)
    outbox.execute(change)
    with relaying(outbox, server.url, interval=0.05) as sent:
        for count in (2, 3):
            outbox.send()
            sent(count)


def test_a_commit_beside_the_one_that_woke_the_relay_is_found(
    outbox: Outbox, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first one of two open transactions notifies, and it may commit first."""
    monkeypatch.setattr(relays, "LOOK_SECONDS", NEVER)
    with relaying(outbox, server.url, interval=0.05) as sent:
        with outbox.engine.connect() as first, outbox.engine.connect() as second:
            outbox.insert(first)
            outbox.insert(second)
            first.commit()
            sent(2)
            second.commit()
            sent(3)


def test_a_decision_of_an_operator_wakes_the_relay(outbox: Outbox, server: ServerProcess) -> None:
    """No row is inserted then."""
    with relaying(outbox, server.url) as sent:
        with outbox.engine.begin() as connection:
            name = outbox.insert(connection)
            connection.execute(half_message.update().values(relayed=2).where(half_message.c.relayed == 0))
            refused.note(connection, "relay", [Refusal(name, "g", outbox.topic, 1, 422, "c", "d")])
        with outbox.engine.begin() as connection:
            refused.retry(connection, [name], "mended")
        sent(2)


@pytest.mark.long
def test_with_a_long_interval_no_session_is_kept(
    outbox: Outbox, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that pauses when nobody uses it can do so, and the relay finds the rows at its next look."""
    monkeypatch.setattr(relays, "QUIET_SECONDS", 0.5)
    pool: Any = outbox.relays.pool

    def sessions() -> int:
        with outbox.engine.connect() as connection:
            others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            return int(connection.exec_driver_sql(f"SELECT count(*) {others}").scalar() or 0)

    with relaying(outbox, server.url, interval=2.0) as sent:
        eventually(lambda: sessions() == 0, "the relay to end its sessions")
        outbox.send()
        sent(2)
    assert pool.checkedout() == 0


def test_a_relay_sleeps_on_when_others_are_woken(outbox: Outbox) -> None:
    """Services in other schemas of the database notify on the same channel."""
    leases = PostgreSqlLeases(outbox.relays)
    try:
        leases.arrived()  # from now on it listens
        outbox.execute(f"NOTIFY {WAKE_CHANNEL}, 'other'")
        outbox.send()
        outbox.execute(f"NOTIFY {WAKE_CHANNEL}")
        assert leases.wait(NEVER, ["public"]) >= {"public"}
        outbox.execute(f"NOTIFY {WAKE_CHANNEL}, 'other'")
        assert leases.wait(0.2, ["public"]) <= {""}
    finally:
        leases.close()


def test_an_old_trigger_gets_the_new_function(outbox: Outbox) -> None:
    """The old one took one lock for the whole database, and named no schema."""
    old = (
        "CREATE OR REPLACE FUNCTION half_message_wake() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF "
        f"pg_try_advisory_xact_lock(74003, 0) THEN PERFORM pg_notify('{WAKE_CHANNEL}', ''); END IF; RETURN NULL; END $$"
    )
    outbox.execute(old)
    with outbox.engine.connect() as running:  # it has inserted rows, and nobody waits for it
        outbox.insert(running)
        with outbox.engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
            create_tables(connection)
        running.rollback()
    with outbox.engine.connect() as connection:
        body = connection.exec_driver_sql("SELECT prosrc FROM pg_proc WHERE proname = 'half_message_wake'").scalar()
    assert body == _WAKE_BODY


def test_a_partition_in_another_schema_wakes_the_relay(outbox: Outbox, server: ServerProcess) -> None:
    """pg_partman keeps partitions in a schema of their own."""
    outbox.execute(
        "DROP TABLE half_message CASCADE",
        "CREATE SCHEMA parts",
    )
    with outbox.engine.begin() as connection:
        create_tables(connection)
        connection.exec_driver_sql("ALTER TABLE half_message RENAME TO old")
        connection.exec_driver_sql(
            "CREATE TABLE half_message (LIKE old INCLUDING DEFAULTS INCLUDING INDEXES) "
            "PARTITION BY RANGE (transaction_id)"
        )
        connection.exec_driver_sql("CREATE TABLE parts.all_of_it PARTITION OF half_message DEFAULT")
        connection.exec_driver_sql("DROP TABLE old CASCADE")
    with outbox.engine.begin() as connection:
        create_tables(connection)
    with relaying(outbox, server.url) as sent:
        outbox.send()
        sent(2)
