"""A relay continues past refused messages, a restart of its database, a standby, and relays that freeze."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_refused
from notify.client.tables.outbox import Outbox as OutboxTable
from notify.movers import pages, refused
from notify.movers.outbox import LOCAL, source_name
from notify.movers.refused import DROPPED_STATE
from notify.movers.relay import relay
from notify.movers.relay.leases import BUCKETS, Leases, MySqlLease, PostgreSqlLeases
from notify.movers.relay.relay import Relay
from notify.movers.sinks.queue_server import QueueSink
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.runtime.databases import REFUSED
from notify.testing import forked
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from tests.support.background import Background, in_background
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.groups import bodies, drain, publish, subscribe
from tests.support.http import admin
from tests.support.kafka import committed
from tests.support.returned import DAYS, bring_back
from tests.support.servers import make_storage
from tests.support.shop import make_engine
from tests.support.sql_storage import published, put

START = datetime(2026, 11, 1)


class Outbox:
    """An outbox with rows that no SDK would write."""

    def __init__(self, url: str, topic: str) -> None:
        self.url = url
        self.engine = make_engine(url)
        create_tables(self.engine)
        self._topic = topic
        self._count = 0

    def add(self, *bodies: str | bytes, **fields: Any) -> str:
        """Insert a transaction of these messages; return its id."""
        self._count += 1
        name = ids.to_text(ids.new_id())
        row = {
            "transaction_id": name, "producer_group": "g", "mode": "outbox", "state": "COMMITTED", "shards": "",
            "topic": self._topic, "key": "k", "relayed": 0, "created_at": START + timedelta(seconds=self._count),
        }  # fmt: skip
        rows = [
            row | {"message_no": n, "body": body.encode() if isinstance(body, str) else body} | fields
            for n, body in enumerate(bodies)
        ]
        with self.engine.begin() as connection:
            connection.execute(half_message.insert(), rows)
        return name

    def fill(self, count: int, topic: str) -> None:
        """Insert so many transactions of one message without a key, all at once."""
        self._count += 1
        row = {
            "message_no": 0, "producer_group": "g", "mode": "outbox", "state": "COMMITTED", "shards": "", "key": None,
            "topic": topic, "body": b"x", "relayed": 0, "created_at": START + timedelta(seconds=self._count),
        }  # fmt: skip
        with self.engine.begin() as connection:
            connection.execute(
                half_message.insert(), [row | {"transaction_id": ids.to_text(ids.new_id())} for _ in range(count)]
            )

    def overwrite(self, name: str, column: str, value: object) -> None:
        """Write something into a column that SQLAlchemy would not write."""
        with self.engine.begin() as connection:
            if connection.dialect.name in ("mysql", "mariadb"):
                connection.exec_driver_sql("SET SESSION sql_mode = ''")
            change = sa.text(f"UPDATE half_message SET {column} = :value WHERE transaction_id = :name")
            connection.execute(change, {"value": value, "name": name})

    def listed(self) -> list[tuple[str, str, int]]:
        """The list of refused messages, as (id, code, tries)."""
        with self.engine.connect() as connection:
            return [(r["transaction_id"], r["code"], r["tries"]) for r in refused.listed(connection)]


@pytest.fixture
def outbox(engine_url: str, unique: str, server: ServerProcess) -> Iterator[Outbox]:
    subscribe(server.url, unique, unique)
    made = Outbox(engine_url, unique)
    yield made
    made.engine.dispose()


def relay_once(outbox: Outbox, url: str) -> tuple[int, int]:
    """Relay until the outbox is empty; return how many transactions were sent and refused."""
    total = asyncio.run(Relay(outbox.engine, url).run(once=True))
    return total.sent, total.refused


# --- what the target refuses ------------------------------------------------------------------------------------


def test_refused_transactions_are_listed_and_the_others_move(
    outbox: Outbox, server: ServerProcess, unique: str
) -> None:
    """The relay lists such a row, and continues. It ended the relay, and all later rows waited for ever."""
    outbox.add("0")
    bad = {
        outbox.add("x", topic="no name"): "invalid_name",
        outbox.add("x", producer_group="no name"): "invalid_name",
        outbox.add("x", headers='{"a": 1}'): "invalid_schema",
        outbox.add("x", headers="[no json"): "unreadable",
        outbox.add("x" * (LIMITS.message_bytes + 1)): "too_large",
        outbox.add(*[bytes(LIMITS.message_bytes)] * 10): "request_too_large",
        outbox.add("x", delay=41 * 86_400.0): "out_of_bounds",
        outbox.add("x", "y", producer_group=""): "invalid",
    }
    outbox.add("1", producer_group="h")
    assert relay_once(outbox, server.url) == (2, len(bad))
    assert relay_once(outbox, server.url) == (0, 0)
    assert bodies(drain(server.url, unique, unique, 2)) == ["0", "1"]
    assert outbox.listed() == sorted((name, code, 1) for name, code in bad.items())


def test_a_far_too_large_row_is_not_read(
    outbox: Outbox, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a gigabyte would end the relay for want of memory, again after each start."""
    monkeypatch.setattr("notify.movers.relay.rows.MOST_READ_BYTES", 1000)
    read: list[str] = []
    of_pages = pages.readable

    def readable(connection: sa.Connection, box: OutboxTable, names: list[str]) -> Any:
        read.extend(names)
        return of_pages(connection, box, names)

    monkeypatch.setattr("notify.movers.relay.rows.readable", readable)
    large, small = outbox.add("x" * 600, "x" * 600), outbox.add("x" * 600)
    assert relay_once(outbox, server.url) == (1, 1)
    assert read == [small] and outbox.listed() == [(large, "request_too_large", 1)]


@pytest.mark.long
def test_rows_that_no_driver_can_read_hold_up_no_others(
    outbox: Outbox, server: ServerProcess, unique: str, database: str
) -> None:
    """Any SQL may have written them. Each ended the relay, again after each start."""
    strange: list[object] = {
        "postgresql": ["infinity", "-infinity", "0044-03-15 BC"], "sqlite": ["infinity", 5, b"\xff"],
    }.get(database, ["0000-00-00"])  # fmt: skip
    outbox.add("x", headers="[" * 100_000)
    for column in ("deliver_at", "created_at"):
        for value in strange:
            outbox.overwrite(outbox.add(column, key=None), column, value)
    outbox.add("good")
    count = len(strange)
    assert relay_once(outbox, server.url) == (1 + count, 1 + count)
    assert sorted(bodies(drain(server.url, unique, unique, 1 + count))) == [*["created_at"] * count, "good"]
    assert [code for _, code, _ in outbox.listed()] == ["unreadable"] * (1 + count)


@pytest.mark.long
def test_one_that_is_mended_is_sent_when_a_person_has_it_tried_again(
    outbox: Outbox, server: ServerProcess, unique: str
) -> None:
    mended, dropped = outbox.add("mended", producer_group="no name"), outbox.add("dropped", producer_group="no name")
    assert relay_once(outbox, server.url) == (0, 2)
    t = half_message.c
    with outbox.engine.begin() as connection:
        assert refused.retry(connection, [mended, dropped], "try") == [mended, dropped]
    assert relay_once(outbox, server.url) == (0, 2)
    assert [tries for _, _, tries in outbox.listed()] == [2, 2]
    with outbox.engine.begin() as connection:
        connection.execute(half_message.update().where(t.transaction_id == mended).values(producer_group="g"))
        refused.retry(connection, [mended], "the group's name is mended")
        refused.drop(connection, [dropped], "nobody waits for it")
    assert relay_once(outbox, server.url) == (1, 0)
    assert bodies(drain(server.url, unique, unique, 1)) == ["mended"]
    with outbox.engine.begin() as connection:
        refused.tidy(connection, LOCAL)
        assert [(r["transaction_id"], r["state"]) for r in refused.listed(connection)] == [(dropped, DROPPED_STATE)]


@pytest.mark.long
def test_people_decide_by_command(outbox: Outbox, engine_url: str, server: ServerProcess) -> None:
    names = sorted(outbox.add("x", producer_group="no name") for _ in range(3))
    code, said = cli("relay", "--dsn", engine_url, "--url", server.url, "--once", "--json")
    assert (code, said) == (1, {"sent": 0, "refused": 3})
    with outbox.engine.connect() as connection:
        source = source_name(connection)
    (row,) = [row for row in admin(server.url, "GET", "refused")["sources"] if row["source"] == source]
    assert row["waiting"] == 3 and row["transactions"][0]["id"] == names[0]
    code, said = cli("refused", "list", "--dsn", engine_url, "--json")
    assert (code, said["waiting"], [row["transaction_id"] for row in said["refused"]]) == (1, 3, names)
    assert {row["code"] for row in said["refused"]} == {"invalid_name"}
    first = ("--dsn", engine_url, "--id", names[0], "--reason", "sent by hand", "--json")
    for dry in (["--dry-run"], []):
        assert cli("refused", "drop", *first, *dry)[1]["transactions"] == [names[0]]
    assert cli("refused", "drop", *first) == (1, {"dry_run": False, "transactions": [], "not_on_the_list": [names[0]]})
    code, said = cli("refused", "list", "--dsn", engine_url, "--state", "DROPPED", "--json")
    assert said["waiting"] == 2 and said["refused"][0]["reason"].startswith("sent by hand (")
    code, said = cli("refused", "retry", "--dsn", engine_url, "--all", "--reason", "mended", "--json")
    assert (code, said["transactions"]) == (0, names[1:])
    assert cli("refused", "list", "--dsn", engine_url, "--json")[0] == 0
    assert cli("refused", "retry", "--dsn", engine_url, "--reason", "which")[0] == 2


def test_a_relay_that_ends_by_a_fault_says_so(
    outbox: Outbox, engine_url: str, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault in (RuntimeError("planted"), asyncio.CancelledError("planted")):

        async def fail(self: Relay, fault: BaseException = fault, **_: object) -> None:
            raise fault

        monkeypatch.setattr(Relay, "run", fail)
        code, said = cli("relay", "--dsn", engine_url, "--url", server.url)
        assert code == 2 and "planted" in said["text"]


@pytest.mark.long
def test_a_database_without_the_list_is_relayed_too(
    outbox: Outbox, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an earlier version's tables, and a user who may make none, refused rows are only marked in their table."""
    name = outbox.add("x", producer_group="no name")
    outbox.add("good")
    with outbox.engine.begin() as connection:
        notify_refused.drop(connection)
    with monkeypatch.context() as planted:
        planted.setattr(refused, "ensure", lambda engine: False)
        assert relay_once(outbox, server.url) == (1, 1)
    with outbox.engine.connect() as connection:
        relayed = sa.select(half_message.c.relayed).where(half_message.c.transaction_id == name)
        assert connection.scalar(relayed) == REFUSED
    # Somebody makes the list: what was refused before is on it, with its own reason where it is refused again.
    other = outbox.add("x", topic="no name")
    assert relay_once(outbox, server.url) == (0, 1)
    with outbox.engine.connect() as connection:
        codes = {row["transaction_id"]: row["code"] for row in refused.listed(connection)}
    assert codes == {name: "unlisted", other: "invalid_name"}


@pytest.mark.long
def test_a_relay_finds_a_list_that_is_made_while_it_runs(
    outbox: Outbox, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked once, when it started."""
    monkeypatch.setattr(relay, "LOOK_SECONDS", 0.01)
    outbox.add("x", producer_group="no name")
    with outbox.engine.begin() as connection:
        notify_refused.drop(connection)
    ensure, may_not = refused.ensure, [True]
    monkeypatch.setattr(refused, "ensure", lambda engine: not may_not and ensure(engine))
    moving = Relay(outbox.engine, server.url)
    with in_background(moving.run(interval=0.01)) as relaying:
        relaying.until(lambda: moving.total.refused, "the refusal")
        may_not.clear()
        relaying.until(lambda: moving.listed, "the refusal to be listed")
    assert moving.listed == 1


@pytest.mark.long
@pytest.mark.parametrize("why", ["its backlog is full", "its rate is used up"])
def test_a_topic_that_takes_nothing_holds_up_no_other(
    outbox: Outbox, server: ServerProcess, unique: str, why: str
) -> None:
    """More rows of that topic than a relay reads in a round wait before the others: they were never looked at."""
    full = unique + ".full"
    subscribe(server.url, unique, full)
    if why == "its backlog is full":
        admin(server.url, "PUT", f"topics/{full}", {"backlog": 1})
    else:
        admin(server.url, "PUT", "limits", {"topics": {full: 0.01}})
    outbox.fill(11_000, full)
    outbox.add("mixed", "of both", topic=full, key="a")
    with outbox.engine.begin() as connection:
        t = half_message.c
        connection.execute(half_message.update().where(t.body == b"of both").values(topic=unique))
    outbox.add("behind the mixed one", key="a")
    outbox.add("other")
    relay = Relay(outbox.engine, server.url)
    try:
        with in_background(relay.run(interval=0.05)):
            assert bodies(drain(server.url, unique, unique, 1)) == ["other"] and relay.total.refused == 0
    finally:
        admin(server.url, "PUT", "limits", {})


@pytest.mark.long
def test_an_outbox_that_waits_holds_up_no_other_of_its_database(
    outbox: Outbox, engine_url: str, server: ServerProcess, unique: str
) -> None:
    """A database may have a service's outbox and a server's table."""
    full = unique + ".full"
    subscribe(server.url, unique, full)
    admin(server.url, "PUT", f"topics/{full}", {"backlog": 1})
    publish(server.url, full, ["the only one that it takes"])
    make_storage(engine_url)
    for n in range(2):
        outbox.add(str(n), topic=full, key=None)

    put(engine_url, published(unique, "of the server's table", group="g"))
    with in_background(Relay(outbox.engine, server.url).run(interval=0.05)):
        assert bodies(drain(server.url, unique, unique, 1)) == ["of the server's table"]


# --- rows that a dump brings back: what a target may have already is listed, and an operator releases it -------------


def test_rows_of_weeks_ago_wait_for_an_operator(outbox: Outbox, server: ServerProcess, unique: str) -> None:
    """The queue had forgotten their ids: they were published a second time."""
    old = [bring_back(outbox.engine, unique, age_seconds=age * DAYS, body=b"%d" % age) for age in (20, 8)]
    bring_back(outbox.engine, unique, age_seconds=6 * DAYS, body=b"young")
    assert relay_once(outbox, server.url) == (1, 2)
    assert {name: code for name, code, _ in outbox.listed()} == dict.fromkeys(old, "returned")
    with outbox.engine.begin() as connection:
        refused.retry(connection, [old[1]], "it was never sent")
        refused.drop(connection, [old[0]], "it was sent then")
    assert relay_once(outbox, server.url) == (1, 0)
    assert sorted(bodies(drain(server.url, unique, unique, 2))) == ["8", "young"]
    assert [name for name, _, _ in outbox.listed()] == [old[0]]


@pytest.mark.long
@pytest.mark.parametrize("database", ["postgresql"])
def test_over_kafka_what_is_older_than_what_was_sent_waits(outbox: Outbox, kafka_url: str, unique: str) -> None:
    """Kafka knows no ids. A relay that was stopped for weeks sends what waits: nothing newer was sent before it."""
    bring_back(outbox.engine, unique, age_seconds=30 * DAYS, body=b"first")
    bring_back(outbox.engine, unique, age_seconds=20 * DAYS, body=b"second")
    assert relay_once(outbox, kafka_url) == (2, 0)
    bring_back(outbox.engine, unique, age_seconds=20 * DAYS + 1800, body=b"committed late")
    old = bring_back(outbox.engine, unique, age_seconds=20 * DAYS + 7200, body=b"old")
    bring_back(outbox.engine, unique, age_seconds=10 * DAYS, body=b"third")
    assert relay_once(outbox, kafka_url) == (2, 1)
    assert [(name, code) for name, code, _ in outbox.listed()] == [(old, "returned")]
    with outbox.engine.begin() as connection:
        refused.retry(connection, [old], "it was never sent")
    assert relay_once(outbox, kafka_url) == (1, 0)
    came = [message.value() for message in committed(kafka_url, unique, 5)]
    assert sorted(came) == [b"committed late", b"first", b"old", b"second", b"third"]


# --- the database's failures --------------------------------------------------------------------------------------


@pytest.fixture
def postgresql() -> Iterator[PostgreSqlServer]:
    """A server for this test alone."""
    directory = Path(tempfile.mkdtemp(prefix="notify-relay-"))  # a directory that the database's user can read, too
    try:
        server = PostgreSqlServer(directory, durable=False).create()
        yield server
        server.stop()
    except NotAvailable as reason:
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def relaying(outbox: Outbox, url: str) -> Iterator[tuple[Relay, Background]]:
    engine = make_engine(outbox.url)  # its own: it disposes of its sessions where the database is another one
    relay = Relay(engine, url)
    with in_background(relay.run(interval=300)) as running:
        yield relay, running
    engine.dispose()


@pytest.mark.long
def test_an_idle_relay_outlives_a_restart_of_postgresql_and_a_standby(
    postgresql: PostgreSqlServer, server: ServerProcess, unique: str
) -> None:
    """After a failover the address may be a standby's for a while: the relay waits until it can write again."""
    subscribe(server.url, unique, unique)
    outbox = Outbox(postgresql.url, unique)

    def writing(*statements: str) -> None:
        with outbox.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in ("SET default_transaction_read_only = off", *statements):
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql("RESET default_transaction_read_only")

    def is_read_only() -> bool:
        with outbox.engine.connect() as connection:
            return connection.exec_driver_sql("SHOW default_transaction_read_only").scalar() == "on"

    def become(state: str) -> None:
        writing(f"ALTER SYSTEM SET default_transaction_read_only = {state}", "SELECT pg_reload_conf()")
        eventually(lambda: is_read_only() == (state == "on"), "the setting to hold")

    said: list[str] = []
    with warnings_in(said), relaying(outbox, server.url) as (relay, running):
        outbox.add("a")
        running.until(lambda: relay.total.sent == 1, "the first to be sent")
        postgresql.stop()
        postgresql.start()
        outbox.engine.dispose()
        outbox.add("b")
        running.until(lambda: relay.total.sent == 2, "the second to be sent")
        outbox.add("c", relayed=3)
        become("on")
        writing("UPDATE half_message SET relayed = 0 WHERE relayed = 3", "NOTIFY notify_outbox")
        running.until(lambda: any("read-only" in text for text in said), "the relay to meet a standby")
        assert relay.total.sent == 2
        become("off")
        running.until(lambda: relay.total.sent == 3, "the third to be sent")
    outbox.engine.dispose()
    assert set(bodies(drain(server.url, unique, unique, 3))) == {"a", "b", "c"}


class warnings_in:
    """Adds the relay's log lines to a list while the block runs."""

    def __init__(self, said: list[str]) -> None:
        self._log = logging.getLogger("notify.relay")
        self._handler = logging.Handler()
        self._handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]

    def __enter__(self) -> None:
        self._log.addHandler(self._handler)

    def __exit__(self, *exc: object) -> None:
        self._log.removeHandler(self._handler)


def schema_in(engine: sa.Engine) -> str:
    """The schema with the tables of a database that has no others."""
    return "public" if engine.dialect.name == "postgresql" else str(engine.url.database)


# --- leases that end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_relay_that_is_frozen_loses_its_keys(kind: str, database_urls: dict[str, str], tmp_path: Path) -> None:
    """A frozen relay's lease ends although its session stands, as does that of a machine that is gone."""
    make: Callable[[sa.Engine, float], Leases] = PostgreSqlLeases if kind == "postgresql" else MySqlLease
    with empty_database(kind, database_urls, tmp_path) as url:
        engines = [make_engine(url) for _ in range(2)]
        frozen, other = make(engines[0], 2.0), make(engines[1], 10 * PATIENCE_SECONDS)
        schema = schema_in(engines[0])
        assert frozen.renew(schema)

        def has_all() -> bool:
            return other.renew(schema) and other.all()

        eventually(has_all, "the frozen one's session to end")
        try:
            woke = frozen.renew(schema)
        except sa.exc.OperationalError:
            woke = frozen.renew(schema)
        if isinstance(frozen, PostgreSqlLeases) and isinstance(other, PostgreSqlLeases):
            assert len(other.held) == BUCKETS and not frozen.held
        assert not woke
        for leases, engine in zip((frozen, other), engines, strict=True):
            leases.close()
            engine.dispose()


def relay_that_freezes(dsn: str, url: str, when: str) -> None:
    """In a process of its own: relay, and stop this process once, with a page in hand."""
    pending = [when]

    def freeze() -> None:
        if pending:
            pending.clear()
            os.kill(os.getpid(), signal.SIGSTOP)

    if when == "before it sends":
        put = QueueSink.put

        async def freezes_first(self: QueueSink, *arguments: Any) -> Any:
            freeze()
            return await put(self, *arguments)

        QueueSink.put = freezes_first  # type: ignore[method-assign]
    else:
        note = refused.note

        def freezes_within(*arguments: Any) -> None:
            freeze()
            note(*arguments)

        refused.note = freezes_within
    asyncio.run(Relay(make_engine(dsn), url, lease_seconds=1).run(interval=0.05))


@pytest.mark.long
@pytest.mark.parametrize("when", ["before it sends", "while it marks"])
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_another_goes_on_for_a_relay_process_that_is_stopped(
    kind: str, when: str, server: ServerProcess, database_urls: dict[str, str], unique: str, tmp_path: Path
) -> None:
    """A stopped process answers nothing, and its sessions stand. Continued, it does again nothing that was done."""
    subscribe(server.url, unique, unique)
    with empty_database(kind, database_urls, tmp_path) as dsn:
        outbox = Outbox(dsn, unique)
        for n in range(20):
            outbox.add(str(n), key=f"k{n % 3}")

        def waiting() -> int:
            with outbox.engine.connect() as connection:
                return len(LOCAL.oldest(connection, 100))

        def is_stopped() -> bool:
            return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

        process = forked.context().Process(target=relay_that_freezes, args=(dsn, server.url, when), daemon=True)
        process.start()
        assert process.pid is not None

        try:
            eventually(is_stopped, "the relay to stop")
            other = Relay(outbox.engine, server.url, lease_seconds=1)
            with in_background(other.run(interval=0.05)) as relaying:
                relaying.until(lambda: not waiting(), "the other relay to move what the stopped one held")
                os.kill(process.pid, signal.SIGCONT)
                for n in range(20, 30):
                    outbox.add(str(n), key=f"k{n % 3}")
                relaying.until(lambda: not waiting(), "both to move what came then")
            for n in range(30, 40):
                outbox.add(str(n), key=f"k{n % 3}")
            eventually(lambda: not waiting(), "the one that woke to move the rest")
        finally:
            process.kill()
            process.join(PATIENCE_SECONDS)
            outbox.engine.dispose()
    came = [int(body) for body in bodies(drain(server.url, unique, unique, 40))]
    assert sorted(came) == list(range(40))
    for key in range(3):
        assert [n for n in came if n % 3 == key] == list(range(key, 40, 3))


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_relay_that_waits_keeps_its_keys(kind: str, database_urls: dict[str, str], tmp_path: Path) -> None:
    """A relay uses the session of its leases while it waits for rows, several times within what it may be silent."""
    leases_of_kind: type[PostgreSqlLeases] | type[MySqlLease]
    leases_of_kind = PostgreSqlLeases if kind == "postgresql" else MySqlLease
    pauses: list[float] = []
    uses: list[int] = []

    class Waiting(leases_of_kind):  # type: ignore[misc, valid-type]
        def _is_woken(self, seconds: float) -> bool:
            pauses.append(seconds)
            return False

        def _named(self, seconds: float) -> set[str]:
            pauses.append(seconds)
            return set()

    with empty_database(kind, database_urls, tmp_path) as url:
        engines = [make_engine(url) for _ in range(2)]
        waiting = Waiting(engines[0], 60.0, monotonic=lambda: sum(pauses))
        other = leases_of_kind(engines[1], 60.0)
        schema = schema_in(engines[0])
        assert waiting.renew(schema)
        sa.event.listen(engines[0], "before_cursor_execute", lambda *_: uses.append(len(pauses)))
        waiting.wait(150.0, [schema])
        assert sum(pauses) == 150.0 and max(pauses) <= 60.0 / 2
        assert set(uses) >= set(range(1, len(pauses))), "it was silent between two pauses"
        assert waiting.renew(schema) and not (other.renew(schema) and other.all())
        for leases, engine in zip((waiting, other), engines, strict=True):
            leases.close()
            engine.dispose()
