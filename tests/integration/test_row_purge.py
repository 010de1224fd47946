"""Purging half_message rows: a commit whose row is gone is never taken for a rollback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from notify.check import CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome, local, question
from notify.check.question import read_source
from notify.client import AsyncTransactionProducer, Inbox, TransactionProducer, create_tables
from notify.client.inbox import inbox as inboxes
from notify.client.tables import left_rows
from notify.client.tables import purge as purging
from notify.client.tables.database_calls import DatabaseCalls
from notify.client.tables.definitions import half_message, notify_inbox, notify_source
from notify.client.tables.old_rows import DAY, delete_transactions, note_purged
from notify.client.tables.purge import RowPurge, purge, purge_by_force
from notify.client.transport.http import HttpClient
from notify.client.transport.servers import Servers
from notify.errors import InvalidRequest, Timeout, Unavailable
from notify.protocol import ids
from notify.testing import InMemoryServer
from tests.support.background import repeated
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.databases import empty_database
from tests.support.http import post
from tests.support.transactions import when_free
from tests.support.wal import insert

HOUR = 3600.0


@pytest.fixture
def engine(emptied_shop: sa.Engine) -> Iterator[sa.Engine]:
    """The engine of a database without rows; afterwards its notify_source is restored."""
    with emptied_shop.connect() as connection:
        source = dict(connection.execute(sa.select(notify_source)).mappings().one())
    yield emptied_shop
    with emptied_shop.begin() as connection:
        connection.execute(notify_source.update().values(source))


def id_of(seconds_ago: float) -> str:
    """The id of a transaction that began so many seconds ago by its producer's clock."""
    made_ms = round((time.time() - seconds_ago) * 1000)
    return ids.to_text(made_ms.to_bytes(6) + ids.new_id()[6:])


def commit_row(
    engine: sa.Engine, transaction_id: str, seconds_ago: float, shards: str = "main", **fields: Any
) -> HalfMessage:
    """Insert a row committed so many seconds ago by the database's clock; return the half that a server checks."""
    values: dict[str, Any] = {
        "transaction_id": transaction_id, "message_no": 0, "producer_group": "g", "mode": "half", "state": "COMMITTED",
        "shards": shards, "topic": "t", "relayed": 1,
        "created_at": datetime.now(UTC).replace(tzinfo=None) - timedelta(seconds=seconds_ago),
    } | fields  # fmt: skip
    with engine.begin() as connection:
        connection.execute(half_message.insert().values(values))
        return HalfMessage(transaction_id, "g", "main", read_source(connection)[0], 1, ())


def answer(engine: sa.Engine, half: HalfMessage) -> Outcome:
    return when_free(lambda: LocalTransactionCheck(engine).check(half))


def rows(engine: sa.Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.scalars(sa.select(half_message.c.transaction_id)))


def test_background_work_waits_for_a_locked_table_within_a_bound(engine: sa.Engine) -> None:
    """A relay that looked for what was left behind, while a migration had the table, did not end before that did."""
    if engine.dialect.name == "sqlite":
        pytest.skip("a lock is the whole file's, and the driver's timeout bounds the wait")
    locking = {"postgresql": "LOCK TABLE half_message IN ACCESS EXCLUSIVE MODE"}.get(
        engine.dialect.name, "LOCK TABLES half_message WRITE"
    )
    database = DatabaseCalls(engine, lock_seconds=0.2)
    schema = "public" if engine.dialect.name == "postgresql" else engine.url.database or ""
    with engine.connect() as other:
        other.exec_driver_sql(locking)
        with pytest.raises(sa.exc.OperationalError, match=r"lock timeout|Lock wait timeout"):
            asyncio.run(database.call(left_rows.groups, schema=schema))
        other.invalidate()  # ends the lock
    asyncio.run(database.call(left_rows.groups, schema=schema))


def test_a_forced_purge_knows_ids_of_a_clock_that_is_ahead(engine: sa.Engine) -> None:
    """A forced purge covers ids of a producer whose clock was five minutes ahead of the database's."""
    half = commit_row(engine, id_of(HOUR - 300), HOUR)
    assert purge_by_force(engine, older_than=HOUR - 60).rows == 1
    with pytest.raises(CheckUnavailable, match="purged"):
        LocalTransactionCheck(engine).check(half)
    assert rows(engine) == set()  # and no tombstone


def test_checks_after_a_forced_purge_are_answered(engine: sa.Engine) -> None:
    gone = commit_row(engine, id_of(HOUR), 2 * HOUR)
    kept = commit_row(engine, id_of(2 * HOUR), HOUR / 2)  # its producer's clock is behind
    later = HalfMessage(id_of(0), "g", "main", gone.source, 1, ())
    assert purge_by_force(engine, older_than=HOUR).rows == 1
    assert answer(engine, kept) is Outcome.COMMIT
    assert answer(engine, later) is Outcome.ROLLBACK
    with pytest.raises(CheckUnavailable, match="purged"):
        LocalTransactionCheck(engine).check(gone)


def test_a_purge_between_the_parts_of_a_question(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    half = commit_row(engine, id_of(2 * HOUR), 2 * HOUR)

    def purge_then_ask(*given: Any) -> question.LocalRow:
        purge_by_force(engine, older_than=HOUR)
        return question.ask(*given)

    monkeypatch.setattr(local, "ask", purge_then_ask)
    with pytest.raises(CheckUnavailable, match="purged"):
        LocalTransactionCheck(engine).check(half)
    assert rows(engine) == set()


def test_a_row_is_asked_for_at_its_own_shard(engine: sa.Engine, memory: InMemoryServer) -> None:
    """A row is purged only if its own shard knows its outcome: this server has the shard `main` only."""
    own_id, foreign_id, shared_id = (id_of(10 * HOUR + n) for n in range(3))
    for transaction_id, shards in ((own_id, "main"), (foreign_id, "elsewhere"), (shared_id, "main,elsewhere")):
        commit_row(engine, transaction_id, 10 * HOUR, shards)
    result = asyncio.run(purge(engine, memory.url, older_than=HOUR, ids_retention=2 * HOUR))
    assert (result.looked_at, result.rows, result.kept) == (3, 1, 2)
    assert rows(engine) == {foreign_id, shared_id}


def test_the_ids_retention_counts_by_the_databases_clock(engine: sa.Engine, memory: InMemoryServer) -> None:
    """An id's time is the producer's, and may be ten minutes off: a row within ten minutes of the bound stays."""
    old, young = id_of(2 * HOUR + 900), id_of(2 * HOUR + 300)
    for transaction_id in (old, young):
        commit_row(engine, transaction_id, 3 * HOUR)
    result = asyncio.run(purge(engine, memory.url, older_than=HOUR, ids_retention=2 * HOUR))
    assert (result.rows, result.kept) == (1, 1)
    assert rows(engine) == {young}


def test_a_purge_ends_while_rows_are_written(
    engine: sa.Engine, memory: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows became old as it looked at, and the rows of other schemas waited for ever."""
    monkeypatch.setattr(purging, "SMALL_BATCH", 1)
    monkeypatch.setattr(purging, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(purging, "BATCH", 1)

    def write() -> None:
        commit_row(engine, id_of(0), 0, producer_group=unique)

    for _ in range(3):
        write()
    with ThreadPoolExecutor(1) as pool, repeated(write, threads=2, pause_seconds=0.001, passing=()):
        looked_at = pool.submit(purge_once, engine, memory.url, unique, 0.0).result(PATIENCE_SECONDS).looked_at
        assert looked_at >= 3
        assert pool.submit(purge_by_force, engine, older_than=0.0).result(PATIENCE_SECONDS).rows >= looked_at
    assert rows(engine)


@pytest.mark.parametrize("table", ["half_message", "notify_inbox"])
def test_a_purge_and_open_transactions_do_not_wait_for_each_other(
    table: str, database_urls: Mapping[str, str], tmp_path: Path
) -> None:
    """MySQL's purge looked at the whole table and waited there, and the service waited for it, up to a deadlock."""
    old = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=10)
    names = [ids.to_text(ids.new_id()) for _ in range(302)]
    goes, (first, second) = names[:200], names[300:]

    def write(connection: sa.Connection, name: str) -> None:
        if table == "notify_inbox":
            values = {"consumer_group": "g", "message_id": name, "created_at": old if name in goes else sa.func.now()}
            connection.execute(notify_inbox.insert().values(values))
        else:
            insert(connection, "t", 0, transaction_id=name)

    with empty_database("mysql", database_urls, tmp_path) as url:
        hurried = sa.make_url(url).update_query_dict({"init_command": "SET SESSION innodb_lock_wait_timeout = 1"})
        engine = sa.create_engine(hurried)
        create_tables(engine)
        with engine.begin() as connection:
            for name in names[:300]:
                write(connection, name)
        with engine.begin() as service:
            write(service, first)

            def purge_in_between(connection: sa.Connection) -> int:
                if table == "notify_inbox":
                    deleted = inboxes.delete_noted(connection, 1000)
                else:
                    deleted = delete_transactions(connection, goes)
                write(service, second)
                return deleted

            if table == "notify_inbox":
                with engine.begin() as connection:
                    note_purged(connection, notify_source.c.inbox_from, old + timedelta(days=1))
                assert Inbox(engine).call(purge_in_between) == len(goes)
            else:
                calls = DatabaseCalls(engine)
                assert asyncio.run(calls.call(purge_in_between, schema=hurried.database or "")) == len(goes)
        engine.dispose()


# --- by producers ---------------------------------------------------------------------------------------------------


def on_the_server(url: str, group: str, transaction_id: str, outcome: str = "") -> str:
    """Store a half with this id on the server, and decide it; return the id."""
    half = {"id": transaction_id, "messages": [{"topic": group, "body": "b"}]}
    assert post(url, "/v1/transactions", {"producer_group": group, "transactions": [half]})["items"][0]["status"] == 201
    if outcome:
        outcomes = [{"id": transaction_id, "outcome": outcome}]
        assert (
            post(url, "/v1/transactions/outcomes", {"producer_group": group, "outcomes": outcomes})["items"][0][
                "status"
            ]
            == 200
        )
    return transaction_id


def purge_once(engine: sa.Engine, url: str, group: str, purge_after: float = DAY) -> purging.Purged:
    async def run() -> purging.Purged:
        http = Servers(url, "transactions")
        try:
            return await RowPurge(http, group, engine, purge_after).once()
        finally:
            await http.aclose()

    return asyncio.run(run())


def test_a_producer_purges_what_is_final_and_nothing_else(
    engine: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    group, other = unique, unique + "-other"
    url = memory.url
    goes = {
        on_the_server(url, group, id_of(2 * DAY), "COMMIT"),
        on_the_server(url, group, id_of(2 * DAY), "ROLLBACK"),
        id_of(8 * DAY),  # the server has forgotten this id
    }
    bridged = on_the_server(url, group, id_of(2 * DAY), "COMMIT")  # a bridge marks no row of the outbox
    in_doubt = on_the_server(url, group, id_of(30 * DAY))
    elsewhere, unknown, waits = id_of(8 * DAY), id_of(6 * DAY), id_of(8 * DAY)
    young = on_the_server(url, group, id_of(DAY / 2), "COMMIT")
    foreign = on_the_server(url, other, id_of(2 * DAY), "COMMIT")
    for name in goes | {in_doubt, unknown}:
        commit_row(engine, name, 2 * DAY, producer_group=group)
    commit_row(engine, elsewhere, 2 * DAY, shards="elsewhere", producer_group=group)
    commit_row(engine, young, DAY / 2, producer_group=group)
    commit_row(engine, foreign, 2 * DAY, producer_group=other)
    for name in (bridged, waits):
        commit_row(engine, name, 2 * DAY, shards="", mode="outbox", relayed=0, producer_group=group)
    done = purge_once(engine, url, group)
    assert rows(engine) == {in_doubt, elsewhere, unknown, waits, young, foreign}
    assert (done.rows, done.kept) == (4, 4)
    with engine.connect() as connection:
        rows_from = connection.execute(sa.select(notify_source.c.rows_from)).scalar_one()
    assert abs(rows_from / 1000 - (time.time() - DAY)) < HOUR, "the audit needs to know since when rows are whole"
    # A transaction in doubt for long is still answered.
    half = HalfMessage(in_doubt, group, "main", source_of(engine), 1, ())
    assert LocalTransactionCheck(engine).check(half) is Outcome.COMMIT


def test_a_purge_asks_each_log_or_none(
    engine: sa.Engine, memory: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that names no shard may be of any log. When no server said which logs there are, one was asked for all, and
    what that did not know was purged after a week."""
    ask = HttpClient.call

    async def call(self: HttpClient, method: str, path: str, *rest: Any) -> bytes:
        if path == "/v1/members":
            raise Timeout("no answer")
        return await ask(self, method, path, *rest)

    waits_elsewhere = id_of(8 * DAY)
    commit_row(engine, waits_elsewhere, 2 * DAY, shards="", producer_group=unique)
    with monkeypatch.context() as changed:
        changed.setattr(HttpClient, "call", call)
        with pytest.raises(Unavailable, match=f"no answer from {memory.url}"):
            purge_once(engine, memory.url, unique)
    assert rows(engine) == {waits_elsewhere}


def source_of(engine: sa.Engine) -> str:
    with engine.connect() as connection:
        return read_source(connection)[0]


def test_a_producers_purge_goes_in_small_batches(
    engine: sa.Engine, memory: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge passes rows that stay, and deletes only rows of transactions that the server calls decided."""
    monkeypatch.setattr(purging, "SMALL_BATCH", 3)
    monkeypatch.setattr(purging, "PAUSE_SECONDS", 0.0)
    deleted: list[int] = []
    delete = purging.delete_transactions
    monkeypatch.setattr(
        purging,
        "delete_transactions",
        lambda connection, names: deleted.append(len(names)) or delete(connection, names),
    )
    kept = {on_the_server(memory.url, unique, id_of(3 * DAY + n)) for n in range(4)}
    gone = [on_the_server(memory.url, unique, id_of(2 * DAY + n), "COMMIT") for n in range(7)]
    for name in (*kept, *gone):
        commit_row(engine, name, 2 * DAY, producer_group=unique)
    assert purge_once(engine, memory.url, unique).rows == 7
    assert rows(engine) == kept and max(deleted) <= 3
    with pytest.raises(Unavailable):
        purge_once(engine, "http://127.0.0.1:9", unique)
    assert rows(engine) == kept


def test_a_running_producer_purges_by_itself_unless_told_not_to(
    engine: sa.Engine, memory: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "EVERY_SECONDS", 0.01)
    others = unique + "-keeps"
    old = on_the_server(memory.url, unique, id_of(31 * DAY), "COMMIT")
    young = on_the_server(memory.url, unique, id_of(29 * DAY), "COMMIT")
    kept = on_the_server(memory.url, others, id_of(31 * DAY), "COMMIT")
    commit_row(engine, old, 31 * DAY, producer_group=unique)
    commit_row(engine, young, 29 * DAY, producer_group=unique)
    commit_row(engine, kept, 31 * DAY, producer_group=others)
    with (
        TransactionProducer(memory.url, group=others, engine=engine, purge_after=None),
        TransactionProducer(memory.url, group=unique, engine=engine),
    ):
        eventually(lambda: old not in rows(engine), "the producer to purge")
        assert rows(engine) == {young, kept}


def test_a_running_async_producer_purges_by_itself(
    memory: InMemoryServer,
    unique: str,
    sqlite_engine: sa.Engine,
    async_engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(purging, "EVERY_SECONDS", 0.01)
    old = on_the_server(memory.url, unique, id_of(2 * DAY), "COMMIT")
    commit_row(sqlite_engine, old, 2 * DAY, producer_group=unique)

    async def run() -> None:
        async with AsyncTransactionProducer(memory.url, group=unique, engine=async_engine, purge_after=DAY):
            # The check runs in a thread: between two turns of this loop the purge holds SQLite's one lock.
            await asyncio.to_thread(eventually, lambda: old not in rows(sqlite_engine), "the producer to purge")

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [0, -1, DAY - 1, float("nan")])
def test_a_producer_keeps_rows_for_a_day_at_least(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="purge_after"):
        TransactionProducer("http://127.0.0.1:9", group="g", purge_after=seconds)
