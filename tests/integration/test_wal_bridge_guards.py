"""A PostgreSQL that cannot be bridged without gaps, or that a bridge could fill up, is refused, and says the remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.binlog_bridge import announcing
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Purged, Unfit
from notify.binlog_bridge.postgresql import replication
from notify.binlog_bridge.postgresql import slot as slots
from notify.binlog_bridge.postgresql.slot import Slot, current_position
from notify.binlog_bridge.postgresql.stream import WalStream
from notify.client import create_tables
from notify.client.tables.definitions import notify_refused
from notify.errors import InvalidRequest, Unavailable
from notify.storage.sql import schema
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from tests.support.background import in_background
from tests.support.bridges import move, move_until, numbers, once, outbox, poison
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.databases import drop_slots, empty_database
from tests.support.groups import drain, subscribe
from tests.support.pgbouncer import pgbouncer
from tests.support.wal import execute, insert, setting, slot


@pytest.fixture
def url(wal_url: str) -> str:
    return wal_url


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url)
    create_tables(engine)
    yield engine
    engine.dispose()


@pytest.mark.long
def test_a_log_that_is_not_logical_is_refused(
    database_urls: Mapping[str, str], server: ServerProcess, tmp_path: Path
) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        engine.dispose()
        with pytest.raises(InvalidRequest, match=r"wal_level is replica.*ALTER SYSTEM SET wal_level = 'logical'"):
            move(url, server)


@pytest.mark.long
def test_a_log_without_a_bound_is_refused_unless_it_is_accepted(
    url: str, engine: sa.Engine, wal_server: PostgreSqlServer, server: ServerProcess
) -> None:
    with setting(wal_server, "max_slot_wal_keep_size", "-1"):
        with pytest.raises(InvalidRequest, match=r"max_slot_wal_keep_size is unlimited.*--accept-unbounded-wal"):
            move(url, server)
        asyncio.run(Bridge([url], server.url, accept_unbounded_wal=True).run(once=True))


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_a_pooler_is_refused(url: str, engine: sa.Engine, server: ServerProcess, tmp_path: Path, mode: str) -> None:
    try:
        with pgbouncer(url, mode, tmp_path) as pooled, pytest.raises(InvalidRequest, match="pooler such as PgBouncer"):
            move(pooled, server)
    except NotAvailable as reason:
        pytest.skip(str(reason))


def test_a_bridge_that_is_away_keeps_the_log_within_its_bound_and_backfills_what_it_lost(
    url: str, engine: sa.Engine, wal_server: PostgreSqlServer, server: ServerProcess, unique: str
) -> None:
    """The database continues; the bridge stops loudly, and loses nothing."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(4))
    move(url, server)
    with setting(wal_server, "max_slot_wal_keep_size", "1MB"):

        def is_lost() -> bool:
            for n in range(4):
                execute(engine, f"SELECT pg_logical_emit_message(false, 'x', repeat('{n}', 8000000))")
            execute(engine, "SELECT pg_switch_wal()", "CHECKPOINT")
            return bool(slot(engine)["wal_status"] == "lost")

        outbox(url, unique, range(4, 8))
        eventually(is_lost, "the source to give up the slot")
        assert slot(engine)["restart_lsn"] is None
        outbox(url, unique, range(8, 12))
        with pytest.raises(Purged, match=r"has given up slot.*max_slot_wal_keep_size.*--backfill"):
            move(url, server)
        move(url, server, fill=True)
    outbox(url, unique, range(12, 16))
    assert move(url, server).totals.rows == 3
    assert sorted(numbers(server, unique, 12)) == [n for n in range(16) if n % 4 != 3]


@pytest.mark.long
def test_a_quiet_database_lets_the_log_of_others_go(
    url: str, engine: sa.Engine, wal_server: PostgreSqlServer, server: ServerProcess
) -> None:
    """Only other databases write: the slot moves on with the source's keepalives."""
    move(url, server)
    confirmed = slot(engine)["confirmed_flush_lsn"]
    other = sa.create_engine(wal_server.url)
    execute(other, "SELECT pg_logical_emit_message(true, 'other', repeat('x', 1000000))")
    with other.connect() as connection:
        end = connection.exec_driver_sql("SELECT pg_current_wal_flush_lsn()").scalar()
    other.dispose()

    def is_past() -> bool:
        with engine.connect() as connection:
            row = slot(engine)
            behind = "SELECT %s::pg_lsn >= %s::pg_lsn"
            return bool(connection.exec_driver_sql(behind, (row["confirmed_flush_lsn"], end)).scalar())

    assert not is_past() and confirmed
    move_until(url, server, is_past)


@pytest.mark.long
def test_a_message_that_no_queue_takes_does_not_hold_the_slot(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    move(url, server)
    before = slot(engine)["confirmed_flush_lsn"]
    bad = poison(engine)
    outbox(url, unique, range(2, 3))
    bridge = move_until(url, server, lambda: slot(engine)["confirmed_flush_lsn"] != before)
    assert bridge.totals.refused == 1
    assert sorted(numbers(server, unique, 3)) == [0, 1, 2]
    with engine.connect() as connection:
        assert connection.scalars(sa.select(notify_refused.c.transaction_id)).all() == [bad]


@pytest.mark.long
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("DROP PUBLICATION {name}", "has nothing of"),
        ("ALTER PUBLICATION {name} SET (publish = 'update')", "only a part"),
        ("ALTER PUBLICATION {name} SET TABLE half_message WHERE (message_no = 0)", "only a part"),
        ("ALTER PUBLICATION {name} SET TABLE half_message (transaction_id, message_no, topic)", "only a part"),
        ("BEGIN; {away}; {back}; COMMIT", "was changed since"),
    ],
)
def test_a_publication_without_all_rows_stops_a_bridge_that_runs(
    url: str, engine: sa.Engine, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, statement: str, what: str
) -> None:
    monkeypatch.setattr(announcing, "ANNOUNCE_SECONDS", 0.1)
    move(url, server)
    with engine.connect() as connection:
        name = connection.exec_driver_sql("SELECT pubname FROM pg_publication").scalar()
    bridge = Bridge([url], server.url)
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.connections, "the bridge to read")
        away, back = (f'ALTER PUBLICATION "{name}" {which} TABLE half_message' for which in ("DROP", "ADD"))
        execute(engine, statement.format(name=f'"{name}"', away=away, back=back))
        with pytest.raises(Unfit, match=f"{what}.*--backfill"):
            bridging.result()


@pytest.mark.long
@pytest.mark.parametrize(
    ("away", "back"),
    [
        ("ALTER PUBLICATION {name} DROP TABLE half_message", "ALTER PUBLICATION {name} ADD TABLE half_message"),
        ("ALTER PUBLICATION {name} SET (publish = 'update')", "ALTER PUBLICATION {name} SET (publish = 'insert')"),
        (
            "ALTER PUBLICATION {name} SET TABLE half_message WHERE (message_no > 0)",
            "ALTER PUBLICATION {name} SET TABLE half_message",
        ),
        ("DROP TABLE half_message", "ALTER PUBLICATION {name} SET TABLE half_message"),
    ],
)
def test_what_was_published_otherwise_while_it_was_away_stops_it(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str, away: str, back: str
) -> None:
    """The slot lacks what was written in between, and all looks right again (MaterializeInc/materialize#26281)."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    move(url, server)
    name = f'"{slot(engine)["slot_name"]}"'
    execute(engine, away.format(name=name))
    outbox(url, unique, range(4, 6))
    execute(engine, back.format(name=name))
    outbox(url, unique, range(6, 7))
    for _ in range(2):
        with pytest.raises(Purged, match=r"what the source publishes was changed.*Nothing was skipped.*--backfill"):
            move(url, server)
    move(url, server, fill=True)
    outbox(url, unique, range(8, 10))
    assert move(url, server).totals.rows == 2
    assert numbers(server, unique, 7) == [0, 1, 4, 5, 6, 8, 9]


VIEW = (
    "BEGIN; ALTER TABLE half_message RENAME TO rows; CREATE VIEW half_message AS SELECT * FROM rows; COMMIT",
    "BEGIN; DROP VIEW half_message; ALTER TABLE rows RENAME TO half_message; COMMIT",
)
MOVED = (
    "CREATE SCHEMA other; ALTER TABLE half_message SET SCHEMA other",
    "ALTER TABLE other.half_message SET SCHEMA public; DROP SCHEMA other",
)
CHILD = (
    "CREATE TABLE child () INHERITS (half_message)",
    "INSERT INTO half_message SELECT * FROM child; DROP TABLE child",
)
RULE = (
    "CREATE RULE elsewhere AS ON INSERT TO half_message DO INSTEAD NOTHING",
    "DROP RULE elsewhere ON half_message",
)
UNLOGGED = ("ALTER TABLE half_message SET UNLOGGED", "ALTER TABLE half_message SET LOGGED")


@pytest.mark.long
@pytest.mark.parametrize(
    ("away", "into", "back", "what", "options"),
    [
        (VIEW[0], "half_message", VIEW[1], "is a view, not a table", {}),
        (MOVED[0], "other.half_message", MOVED[1], "half_message is gone", {}),
        (CHILD[0], "child", CHILD[1], "has child tables", {}),
        (RULE[0], "half_message", RULE[1], "has the rule elsewhere", {}),
        (UNLOGGED[0], "half_message", UNLOGGED[1], "is UNLOGGED", {"schemas": "public"}),
    ],
    ids=["view", "moved", "child", "rule", "unlogged"],
)
def test_a_table_whose_rows_the_log_no_longer_has_stops_a_bridge_that_runs(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str, monkeypatch: pytest.MonkeyPatch,
    away: str, into: str, back: str, what: str, options: dict[str, str],
) -> None:  # fmt: skip
    """It looked at the tables when it started only. It stops again until a backfill, though all is right by then."""
    monkeypatch.setattr(announcing, "ANNOUNCE_SECONDS", 0.1)
    subscribe(server.url, unique, unique)

    def made() -> Bridge:
        return Bridge([url], server.url, name=unique, **options)

    once(made())
    bridge = made()
    with in_background(bridge.run()) as bridging:
        bridging.until(lambda: bridge.totals.connections, "the bridge to read")
        execute(engine, away)
        with engine.begin() as connection:
            insert(connection, unique, 0, into=into)
        with pytest.raises(Unfit, match=f"{what}.*--backfill"):
            bridging.result()
    execute(engine, back)
    for _ in range(2):
        with pytest.raises(Purged, match=r"did not log all rows.*--backfill"):
            once(made())
    once(made(), fill=True)
    with engine.begin() as connection:
        insert(connection, unique, 1)
    once(made())
    written = [1] if what.startswith("has the rule") else [0, 1]
    assert numbers(server, unique, len(written)) == written


@pytest.mark.long
def test_a_schema_that_was_published_again_while_it_was_away_stops_it(
    url: str, engine: sa.Engine, wal_server: PostgreSqlServer, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    move(url, server)
    name = f'"{slot(engine)["slot_name"]}"'
    whole = "TABLES IN SCHEMA public"
    try:
        execute(engine, f"DROP PUBLICATION {name}", f"CREATE PUBLICATION {name} FOR {whole}")
    except sa.exc.ProgrammingError:
        pytest.skip("PostgreSQL 14 publishes no schemas")
    execute(engine, f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true)")
    move(url, server, fill=True)
    outbox(url, unique, range(2))
    assert move(url, server).totals.rows == 2
    execute(engine, f"ALTER PUBLICATION {name} DROP {whole}")
    outbox(url, unique, range(4, 6))
    execute(engine, f"ALTER PUBLICATION {name} ADD {whole}")
    with pytest.raises(Purged, match=r"what the source publishes was changed.*--backfill"):
        move(url, server)
    move(url, server, fill=True)
    assert numbers(server, unique, 4) == [0, 1, 4, 5]


@pytest.mark.long
def test_the_servers_table_has_whole_rows_in_the_log(url: str, server: ServerProcess) -> None:
    engine = sa.create_engine(url)
    schema.upgrade(engine, "main")
    move(url, server)
    identity = "SELECT relreplident::text FROM pg_class WHERE relname = 'server_half_message'"
    with engine.connect() as connection:
        assert connection.exec_driver_sql(identity).scalar() == "f"
    execute(
        engine,
        "ALTER TABLE server_half_message REPLICA IDENTITY DEFAULT",
        "CREATE ROLE reader LOGIN REPLICATION",
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO reader",
    )
    reader = sa.make_url(url).set(username="reader").render_as_string(hide_password=False)
    try:
        with pytest.raises(InvalidRequest, match=r"is not FULL.*ALTER TABLE .*server_half_message REPLICA IDENTITY"):
            move(reader, server)
    finally:
        execute(engine, "DROP OWNED BY reader", "DROP ROLE reader")
        engine.dispose()


@pytest.mark.long
def test_a_role_needs_replication_and_the_tables_only(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    execute(engine, "CREATE ROLE poor LOGIN", "GRANT SELECT, UPDATE ON half_message, notify_source TO poor")
    poor = sa.make_url(url).set(username="poor").render_as_string(hide_password=False)
    try:
        with pytest.raises(InvalidRequest, match="ALTER ROLE poor REPLICATION"):
            move(poor, server)
        execute(engine, "ALTER ROLE poor REPLICATION")
        with pytest.raises(InvalidRequest, match="as their owner: CREATE PUBLICATION") as refused:
            move(poor, server)
        execute(engine, str(refused.value).rpartition("as their owner: ")[2])
        execute(engine, "GRANT SELECT, INSERT, UPDATE, DELETE ON notify_refused TO poor")
        move(poor, server)
        outbox(url, unique, range(4, 6))
        assert move(poor, server).totals.rows == 2
        assert numbers(server, unique, 4) == [0, 1, 4, 5]
    finally:
        execute(engine, "DROP OWNED BY poor", "DROP ROLE poor")


@pytest.mark.long
def test_a_bridge_that_is_given_up_leaves_no_slot(url: str, engine: sa.Engine, server: ServerProcess) -> None:
    name = move(url, server).name
    code, before = cli("doctor", "--dsn", url, "--bridge", "--url", server.url)
    assert code == 1 and f"slot {slot(engine)['slot_name']} has no bridge" in before["text"]
    assert "--drop-slot" in before["text"]
    code, dropped = cli("bridge", "--dsn", f"{name}={url}", "--url", server.url, "--drop-slot")
    assert code == 0, dropped
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM pg_publication").scalar() == 0
        left = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        assert connection.exec_driver_sql(left).scalar() == 0
    assert cli("bridge", "--dsn", f"{name}={url}", "--url", server.url, "--drop-slot")[0] == 1


@pytest.mark.long
def test_a_slot_of_another_history_stops_it(url: str, engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    """Another program has read the slot: what it has confirmed is gone."""
    outbox(url, unique, range(2))
    move(url, server)
    with engine.begin() as connection:
        insert(connection, unique, 2)
    name = slot(engine)["slot_name"]
    execute(engine, f"SELECT pg_replication_slot_advance('{name}', pg_current_wal_flush_lsn())")
    with pytest.raises(Purged, match=r"after this bridge's position.*--backfill"):
        move(url, server)


@pytest.mark.long
def test_bounds_of_a_role_for_its_requests_do_not_hold_for_its_bridge(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """Tables are read as a whole, in one transaction, while the queue takes its time; and refusals are written."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    poison(engine)
    bounds = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout")
    execute(
        engine,
        "CREATE ROLE hurried LOGIN SUPERUSER",
        *(f"ALTER ROLE hurried SET {name} = '200ms'" for name in bounds),
        "ALTER ROLE hurried SET default_transaction_read_only = on",
        "ALTER ROLE hurried SET synchronous_commit = off",
    )
    hurried = sa.make_url(url).set(username="hurried").render_as_string(hide_password=False)
    try:
        assert move(hurried, server).totals.refused == 1
        outbox(url, unique, range(4, 6))
        assert move(hurried, server).totals.rows == 2
        assert numbers(server, unique, 4) == [0, 1, 4, 5]
    finally:
        execute(engine, "DROP OWNED BY hurried", "DROP ROLE hurried")


def test_a_bridge_does_not_wait_for_itself_where_transactions_are_deferrable(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """Its second session waited for the end of its first one's transaction, for ever and without a word."""
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(2))
    reader = [
        f"ALTER ROLE deferring SET default_transaction_{setting}"
        for setting in ("isolation = 'serializable'", "read_only = on", "deferrable = on")
    ]
    execute(engine, "CREATE ROLE deferring LOGIN SUPERUSER", *reader)
    deferring = sa.make_url(url).set(username="deferring").render_as_string(hide_password=False)
    try:
        move(deferring, server)
        outbox(url, unique, range(4, 6))
        with engine.connect().execution_options(isolation_level="SERIALIZABLE") as writer:
            writer.exec_driver_sql("CREATE TABLE written (n int)")
            assert move(deferring, server).totals.rows == 2
        assert numbers(server, unique, 4) == [0, 1, 4, 5]
    finally:
        execute(engine, "DROP OWNED BY deferring", "DROP ROLE deferring")


@pytest.mark.long
def test_a_slot_is_free_again_when_its_readers_machine_is_gone(
    url: str, engine: sa.Engine, wal_server: PostgreSqlServer, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server itself has no wal_sender_timeout."""
    move(url, server)
    name = slot(engine)["slot_name"]
    monkeypatch.setattr(replication, "SENDER_SECONDS", 1.0)
    with engine.connect() as connection:
        position = current_position(connection)
    with setting(wal_server, "wal_sender_timeout", "0"):
        stream = WalStream(engine.url, Slot(name, [name]), position)
        stream.connect()
        assert slot(engine)["active"]
        eventually(lambda: not slot(engine)["active"], "the source to give the slot free")
        stream._release()


def test_a_source_that_waits_longer_for_a_reader_may_do_so(engine: sa.Engine) -> None:
    """PostgreSQL 15 ended the connection in the middle of a large REFRESH MATERIALIZED VIEW, each time again: the
    bridge set the time that it sets where there is none."""
    for value, used in (("5min", "5min"), ("10s", "1min"), ("0", "1min")):
        execute(engine, f"ALTER DATABASE \"{engine.url.database}\" SET wal_sender_timeout = '{value}'")
        with replication.Replication(engine.url) as connection:
            assert connection.command("SHOW wal_sender_timeout") == [[used]]


@pytest.mark.long
def test_a_slot_that_waits_for_a_transaction_is_given_up_by_the_source_too(
    url: str, engine: sa.Engine, wal_server: PostgreSqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would notice only after that transaction that nobody waits any more, and keep the log (rocicorp/mono#5874)."""
    monkeypatch.setattr(slots, "MAKE_SECONDS", 1.0)
    mine = "FROM pg_replication_slots WHERE slot_name IN ('notify_waits', 'notify_waits_fill')"
    with engine.connect() as writer:
        writer.exec_driver_sql("SELECT pg_current_xact_id()")
        for make in (slots.make, slots.snapshot):
            with pytest.raises(Unavailable, match="waits for the end of transactions that write"):
                make(engine, "notify_waits")
            with engine.connect() as connection:
                assert connection.exec_driver_sql(f"SELECT slot_name {mine}").all() == []


@pytest.mark.long
def test_it_waits_for_a_lock_that_another_session_holds(
    url: str, engine: sa.Engine, server: ServerProcess, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """VACUUM and migrations hold such locks, and end."""
    outbox(url, unique, range(2))
    bridge = Bridge([url], server.url)
    with engine.connect() as other:
        other.exec_driver_sql("LOCK TABLE half_message IN SHARE UPDATE EXCLUSIVE MODE")
        with in_background(bridge.run(once=True)) as bridging:
            bridging.until(lambda: "waits for a lock" in caplog.text, "the bridge to wait")
            assert not bridging.has_ended
            other.rollback()
            bridging.result()
    assert bridge.totals.stored == 2


def encoded(server: PostgreSqlServer, encoding: str) -> sa.URL:
    """The address of a new database with this encoding."""
    other = sa.create_engine(server.url)
    name = f"wal_{encoding.lower()}"
    options = f"TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
    execute(other, f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name} {options}")
    other.dispose()
    return sa.make_url(server.url).set(database=name)


@pytest.mark.long
def test_texts_of_a_database_that_is_not_utf8_arrive(
    wal_server: PostgreSqlServer, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    url = encoded(wal_server, "LATIN1").render_as_string(hide_password=False)
    latin = sa.create_engine(url)
    create_tables(latin)
    try:
        move(url, server)
        with latin.begin() as connection:
            insert(connection, unique, 0, key="schlüssel", headers='{"h": "ß"}')
        assert move(url, server).totals.rows == 1
        (message,) = drain(server.url, unique, unique, 1)
        assert (message["key"], message["headers"]) == ("schlüssel", {"h": "ß"})
    finally:
        drop_slots(url)
        latin.dispose()


def test_a_database_without_an_encoding_is_refused(wal_server: PostgreSqlServer, server: ServerProcess) -> None:
    """The source sends its bytes as they are, and nobody knows what they mean."""
    url = encoded(wal_server, "SQL_ASCII").render_as_string(hide_password=False)
    plain = sa.create_engine(url, connect_args={"client_encoding": "utf8"})
    create_tables(plain)
    plain.dispose()
    with pytest.raises(InvalidRequest, match=r"encoding SQL_ASCII.*UTF8"):
        move(url, server)


@pytest.mark.long
def test_forgetting_a_bridge_first_shows_its_waiting_rows(url: str, engine: sa.Engine, server: ServerProcess) -> None:
    name = move(url, server).name
    dropping = ("bridge", "--dsn", f"{name}={url}", "--url", server.url, "--drop-slot", "--json")
    eventually(lambda: not slot(engine)["active"], "the bridge's connection to be closed")
    code, shown = cli(*dropping, "--dry-run")
    assert code == 0 and shown["dry_run"] is True
    (found,) = shown["slots"]
    assert (found["slot"], found["found"], found["publications"]) == (slot(engine)["slot_name"], True, [found["slot"]])
    assert found["retained_bytes"] >= 0
    code, dropped = cli(*dropping)
    assert code == 0 and dropped["slots"][0]["found"] is True and dropped["dry_run"] is False
    assert cli(*dropping, "--dry-run")[0] == 1


@pytest.mark.long
def test_a_slot_is_dropped_also_where_the_publications_are_of_another_role(
    url: str, engine: sa.Engine, server: ServerProcess
) -> None:
    """The log is what fills the disk; publications keep nothing."""
    name = move(url, server).name
    execute(engine, "CREATE ROLE poor LOGIN REPLICATION", "GRANT SELECT ON half_message, notify_source TO poor")
    poor = sa.make_url(url).set(username="poor").render_as_string(hide_password=False)
    eventually(lambda: not slot(engine)["active"], "the bridge's connection to be closed")
    try:
        code, dropped = cli("bridge", "--dsn", f"{name}={poor}", "--url", server.url, "--drop-slot", "--json")
        assert code == 1 and "DROP PUBLICATION" in dropped["slots"][0]["left"], dropped
        with engine.connect() as connection:
            left = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
            assert connection.exec_driver_sql(left).scalar() == 0
    finally:
        execute(engine, "DROP OWNED BY poor", "DROP ROLE poor")
