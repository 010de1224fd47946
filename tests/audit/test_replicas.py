"""Databases that follow others: what a copy lacks because it lags is no finding."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_inbox, notify_source
from notify.errors import NotifyError, Unavailable
from notify.protocol import ids
from notify.spark.audit import Audit
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.pacing import Pace, waiting_sql
from notify.spark.inputs.replicas import Replica, unseen_from
from notify.spark.result import Inputs, Result
from notify.testing.binlog_server import BinlogServer
from notify.testing.databases import BINLOG_SERVERS
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.reachable import NotAvailable
from tests.audit.audited import AT_ONCE
from tests.audit.trade import WITH_INBOX, Trade, effect_of, make_trade, row_of
from tests.support.clock import eventually
from tests.support.databases import empty_database
from tests.support.proxy import Proxy

SECOND_US = 1_000_000
COPIED = ("shop", WITH_INBOX)
"""The services whose databases are read from the standby."""


def run(url: str, *statements: Any) -> None:
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(sa.text(statement) if isinstance(statement, str) else statement)
    engine.dispose()


def of(url: str, name: str) -> str:
    """The URL of another database of a server."""
    return sa.make_url(url).set(database=name).render_as_string(hide_password=False)


@pytest.fixture(scope="module")
def standby() -> Iterator[tuple[str, str]]:
    """URLs of a primary, and of its standby."""
    servers: list[PostgreSqlServer] = []
    # Not below pytest's directory: PostgreSQL runs as another user than root.
    directories = [Path(tempfile.mkdtemp(prefix="notify-db-")) for _ in range(2)]
    try:
        try:
            servers += [PostgreSqlServer(directory, durable=False) for directory in directories]
        except NotAvailable as reason:
            pytest.skip(str(reason))
        servers[0].create()
        servers[1].follow(servers[0])
        yield servers[0].url, servers[1].url
    finally:
        for server in reversed(servers):
            server.stop()
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


def begin(primary: str, trade: Trade) -> None:
    """Make the tables, with a row each that is replaced later on."""
    at = sa.text("clock_timestamp() AT TIME ZONE 'utc'")
    for service in COPIED:
        run(primary, f"CREATE DATABASE {service}")
        engine = sa.create_engine(of(primary, service))
        create_tables(engine)
        engine.dispose()
        run(of(primary, service), notify_source.update().values(id=trade.source(service)))
    name = ids.to_text(ids.new_id())
    run(of(primary, "shop"), half_message.insert().values(row_of(trade, 0, transaction_id=name, created_at=at)))
    effect = effect_of(trade, 0, message_id=f"{name}.0", created_at=at)
    run(of(primary, WITH_INBOX), notify_inbox.insert().values(effect))


def fill(primary: str, trade: Trade) -> None:
    """Write the rows of a trade instead."""
    for service, table in zip(COPIED, (half_message, notify_inbox), strict=True):
        engine = sa.create_engine(trade.url(service))
        with engine.connect() as connection:
            rows = [dict(row) for row in connection.execute(sa.select(table)).mappings()]
        engine.dispose()
        run(of(primary, service), table.delete(), table.insert().values(rows))


def audited(spark: Any, trade: Trade, copy: str, scratch: Path) -> Result:
    with contextlib.ExitStack() as stack:
        databases = [Database(of(copy, service), service) for service in COPIED]
        databases.append(Database(trade.url("bank"), "bank"))
        for database in databases:
            stack.callback(database.close)
        return Audit(spark, AT_ONCE, Inputs(databases, [LogInput(trade.log)]), scratch).run()


@pytest.mark.long
def test_commits_that_a_standby_lacks_are_pending(spark: Any, standby: tuple[str, str], tmp_path: Path) -> None:
    primary, copy = standby
    begin(primary, Trade(tmp_path / "none", 0))
    database = Database(of(primary, WITH_INBOX), "primary")
    assert database.replica() is None
    database.close()

    def has(service: str, table: sa.Table, count: int) -> bool:
        try:
            with contextlib.closing(Database(of(copy, service), service)) as there:
                return there.rows(f"SELECT count(*) FROM {table.name}")[0][0] == count
        except (NotifyError, sa.exc.SQLAlchemyError):  # the database or its table is not there yet
            return False

    eventually(lambda: has("shop", half_message, 1) and has(WITH_INBOX, notify_inbox, 1), "the copy to have the tables")
    run(copy, "SELECT pg_wal_replay_pause()")
    begun = int(time.time())
    eventually(lambda: time.time() > begun + 2, "the trade to begin after the copy has paused")
    trade = make_trade(tmp_path / "trade", step_us=1000, count=20, ago_us=0)
    fill(primary, trade)
    eventually(lambda: time.time() * 1e6 > trade.at(trade.count) + 2 * SECOND_US, "the trade to be over")
    result = audited(spark, trade, copy, tmp_path / "scratch")
    found = {name: count for name, count in result.counts.items() if count and name != "PENDING"}
    assert (result.verdict, found) == ("INCONCLUSIVE", {})
    assert any("database shop is a copy" in reason for reason in result.reasons), result.reasons

    run(copy, "SELECT pg_wal_replay_resume()")

    def is_current() -> bool:
        run(primary, "SELECT pg_current_xact_id()")  # a commit, which the copy is to replay
        with contextlib.closing(Database(of(copy, "shop"), "shop")) as shop:
            replica = shop.replica()
            assert replica is not None
            return replica.until_us > trade.at(trade.count) + 2 * SECOND_US

    eventually(is_current, "the copy to be current")
    result = audited(spark, trade, copy, tmp_path / "scratch")
    assert (result.verdict, result.reasons) == ("PASS", [])
    assert [line.name for line in result.coverage if line.kind == "copy"] == ["database shop", f"database {WITH_INBOX}"]
    for url in (of(copy, "shop"), of(primary, "shop")):  # neither is behind
        run(url, waiting_sql(3600 * SECOND_US))


def lacks_what_it_does_not_hear_of(primary: BinlogServer, copy: BinlogServer, way: Proxy, database: Database) -> bool:
    """Commit something that a replica does not hear of, and wait for seconds: whether it is said to lack that."""
    primary.execute("CREATE TABLE shop.sold (n INT)")
    eventually(lambda: copy.execute("SHOW TABLES FROM shop LIKE 'sold'"), "the replica to have the table")
    way.drop_answers = True
    primary.execute("INSERT INTO shop.sold VALUES (1)")
    sold_us = time.time_ns() // 1000
    eventually(lambda: time.time() * 1e6 > sold_us + 3 * SECOND_US, "the replica to be seconds behind")
    replica = database.replica()
    assert replica is not None and not copy.execute("SELECT n FROM shop.sold")
    return 0 < replica.until_us < sold_us


def test_a_subscriber_of_logical_replication_proves_nothing(database_urls: dict[str, str], tmp_path: Path) -> None:
    """It was audited as if nobody else wrote its rows, and those that it lacked were findings."""
    with empty_database("postgresql", database_urls, tmp_path) as url:
        engine = sa.create_engine(url)
        create_tables(engine)
        engine.dispose()
        name = f"orders_{sa.make_url(url).database}"
        run(
            url,
            f"CREATE SUBSCRIPTION {name} CONNECTION 'host=127.0.0.1 port=1' PUBLICATION orders "
            "WITH (connect = false, slot_name = none)",
            "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate) "
            f"SELECT oid, CAST('half_message' AS regclass), 'r' FROM pg_subscription WHERE subname = '{name}'",
        )
        try:
            with contextlib.closing(Database(url, "shop")) as database:
                assert database.replica() is None, "it was ended, as after a move to this server"
                run(url, f"UPDATE pg_subscription SET subenabled = true WHERE subname = '{name}'")
                replica = database.replica()
                assert replica is not None and replica.until_us == 0
                assert f"the subscription {name} fills its table half_message" in replica.why
        finally:
            run(url, f"ALTER SUBSCRIPTION {name} DISABLE", f"DROP SUBSCRIPTION {name}")


def _filter(kind: str, copy: BinlogServer) -> object:
    """Let a stopped replica take one table alone, which is none of Notify's; what it says of that."""
    if kind == "mariadb":
        return copy.execute("SET GLOBAL replicate_do_table = 'shop.orders'", "SHOW ALL SLAVES STATUS")
    return copy.execute("CHANGE REPLICATION FILTER REPLICATE_DO_TABLE = (shop.orders)", "SHOW REPLICA STATUS")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "right"), [("mariadb", "REPLICA MONITOR"), ("mysql", "REPLICATION CLIENT")])
def test_a_replica_says_how_current_it_is(kind: str, right: str, tmp_path: Path) -> None:
    servers: list[BinlogServer] = []
    try:
        try:
            for number in (1, 2):
                (tmp_path / str(number)).mkdir()
                servers.append(BINLOG_SERVERS[kind](tmp_path / str(number), number, durable=False))
        except NotAvailable as reason:
            pytest.skip(str(reason))
        primary, copy = (server.create() for server in servers)
        with contextlib.closing(Database(primary.url, "shop")) as database:
            assert database.replica() is None
        copy.execute(
            "SET sql_log_bin = 0", "CREATE USER reader@'127.0.0.1' IDENTIFIED BY 'shop'",
            "GRANT SELECT ON shop.* TO reader@'127.0.0.1'",
        )  # fmt: skip
        way = Proxy("127.0.0.1", primary.port)
        copy.follow(primary, way.port)
        with contextlib.closing(Database(copy.url, "shop")) as database:
            eventually(lambda: (r := database.replica()) is not None and r.until_us > 0, "the replica to be current")
            replica = database.replica()
            assert replica is not None and abs(database.now_us - replica.until_us) < 3600 * SECOND_US
            is_right = lacks_what_it_does_not_hear_of(primary, copy, way, database)
            assert is_right, "it runs and says that it lags by 0 seconds, but hears nothing"
            copy.execute("STOP REPLICA")
            replica = database.replica()
            assert replica is not None and (replica.until_us, replica.why) == (0, "its replication does not run")
            filtered = _filter(kind, copy)
            replica = database.replica()
            assert replica is not None and replica.until_us == 0 and "leaves out changes" in replica.why, replica
            assert "shop.half_message (Replicate_Do_Table shop.orders)" in replica.why, filtered
        url = sa.make_url(copy.url).set(username="reader").render_as_string(hide_password=False)
        with contextlib.closing(Database(url, "shop")) as database:
            replica = database.replica()
            assert replica is not None and replica.until_us == 0 and right in replica.why
    finally:
        for server in servers:
            server.stop()


def test_a_read_waits_while_a_copy_is_behind() -> None:
    states = [Replica(0, "it has replayed nothing"), Replica(50 * SECOND_US), Replica(98 * SECOND_US)]
    slept: list[float] = []

    def pace(states: list[Replica | None], most_lag_us: int = 5 * SECOND_US) -> Pace:
        return Pace("shop", most_lag_us, lambda: states.pop(0), lambda: 100 * SECOND_US, slept.append)

    pace(list(states)).wait()
    assert len(slept) == 2
    slept.clear()
    primary = pace([None])
    primary.wait()
    primary.wait()  # it is not asked again
    pace([], 0).wait()
    assert slept == []
    with pytest.raises(Unavailable, match="database shop: it has been more than 5 s behind for 600 s"):
        pace([Replica(1)] * 600).wait()
    with pytest.raises(Unavailable, match="its replication does not run"):
        pace([Replica(0, "its replication does not run")] * 600).wait()
    assert len(slept) == 1200, "a wait is bounded"


def test_rows_are_unseen_only_where_a_copy_is_behind_the_queues() -> None:
    assert unseen_from([], 100, 7) == 0
    assert unseen_from([107], 100, 7) == 0
    assert unseen_from([200, 106], 100, 7) == 99
    assert unseen_from([0], 100, 7) == 1
