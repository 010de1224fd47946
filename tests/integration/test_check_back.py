"""The traps of check-back, on each database: the answer is right, or it is UNKNOWN."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify import ids
from notify.check import CheckMessageListener, CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome
from notify.check.question import read_source
from notify.client import Message, TransactionProducer
from notify.client.table import database_now, half_message, notify_source
from notify.testing.process import ServerProcess
from tests.support.groups import drain, subscribe
from tests.support.shop import Base, Order, make_engine


def half_of(engine: sa.Engine, transaction_id: str | None = None, shard: str = "main") -> HalfMessage:
    with engine.connect() as connection:
        source = read_source(connection)[0]
    return HalfMessage(transaction_id or ids.to_text(ids.new_id()), "g", shard, source, 1, ())


def row(transaction_id: str, shards: str = "main") -> dict[str, object]:
    return {
        "transaction_id": transaction_id,
        "message_no": 0,
        "producer_group": "g",
        "mode": "half",
        "state": "COMMITTED",
        "shards": shards,
        "topic": "t",
        "relayed": 1,
    }


INSERT = half_message.insert().values(created_at=database_now())


def test_a_committed_row_is_a_commit(engine: sa.Engine) -> None:
    half = half_of(engine)
    with engine.begin() as connection:
        connection.execute(INSERT, row(half.id))
    assert LocalTransactionCheck(engine).check(half) is Outcome.COMMIT
    assert LocalTransactionCheck(engine).check(half) is Outcome.COMMIT


def test_no_row_is_a_rollback_that_stays_one(engine: sa.Engine) -> None:
    """The question leaves a tombstone: the producer that comes late is refused and rolls back."""
    half = half_of(engine)
    assert LocalTransactionCheck(engine).check(half) is Outcome.ROLLBACK
    with pytest.raises(sa.exc.DBAPIError), engine.begin() as connection:
        connection.execute(INSERT, row(half.id))
    assert LocalTransactionCheck(engine).check(half) is Outcome.ROLLBACK


@contextmanager
def in_flight(engine: sa.Engine, transaction_id: str) -> Iterator[sa.Connection]:
    """A transaction that has inserted its row and not committed."""
    with engine.connect() as connection:
        transaction = connection.begin()
        connection.execute(INSERT, row(transaction_id))
        yield connection
        if transaction.is_active:
            transaction.rollback()


def test_a_transaction_in_flight_is_unknown_never_a_rollback(engine: sa.Engine) -> None:
    half = half_of(engine)
    with in_flight(engine, half.id) as connection:
        with pytest.raises(CheckUnavailable):
            LocalTransactionCheck(engine).check(half)
        connection.commit()
    assert LocalTransactionCheck(engine).check(half) is Outcome.COMMIT


def test_a_transaction_that_ends_while_the_question_waits(engine: sa.Engine) -> None:
    """The question holds until the lock is free, then sees how it ended."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one lock: the question's wait is a poll, covered by the test above")
    for commit in (True, False):
        half = half_of(engine)
        with in_flight(engine, half.id) as connection:
            end = connection.commit if commit else connection.rollback
            timer = threading.Timer(0.1, end)
            timer.start()
            outcome = LocalTransactionCheck(engine).check(half)
            timer.join()
        assert outcome is (Outcome.COMMIT if commit else Outcome.ROLLBACK)


def test_repeatable_read_as_the_engine_default_does_not_mislead_the_question(engine_url: str) -> None:
    """In a snapshot older than the commit a plain read would miss the row: the question asks in READ COMMITTED."""
    if engine_url.startswith("sqlite"):
        pytest.skip("SQLite transactions are serialised by BEGIN IMMEDIATE")
    from notify.client import create_tables

    engine = sa.create_engine(engine_url, isolation_level="REPEATABLE READ")
    create_tables(engine)
    half = half_of(engine)
    with in_flight(engine, half.id) as connection:
        timer = threading.Timer(0.15, connection.commit)
        timer.start()
        assert LocalTransactionCheck(engine).check(half) is Outcome.COMMIT
        timer.join()
    engine.dispose()


def test_another_database_is_unknown(engine: sa.Engine) -> None:
    half = half_of(engine)
    with engine.begin() as connection:
        connection.execute(notify_source.update().values(id=str(uuid.uuid4())))
    with pytest.raises(CheckUnavailable, match="source"):
        LocalTransactionCheck(engine).check(half)
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(half_message)) == 0


def test_a_half_on_a_shard_that_the_row_does_not_list_is_a_rollback(engine: sa.Engine) -> None:
    half = half_of(engine, shard="second")
    with engine.begin() as connection:
        connection.execute(INSERT, row(half.id, shards="first"))
    assert LocalTransactionCheck(engine).check(half) is Outcome.ROLLBACK


def test_a_half_older_than_a_forced_purge_is_unknown(engine: sa.Engine) -> None:
    half = half_of(engine)
    with engine.begin() as connection:
        connection.execute(notify_source.update().values(purged_before=1 << 50))
    with pytest.raises(CheckUnavailable, match="purged"):
        LocalTransactionCheck(engine).check(half)


def test_an_unreachable_database_is_unknown() -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:9/none")
    half = HalfMessage(ids.to_text(ids.new_id()), "g", "main", "s", 1, ())
    with pytest.raises(CheckUnavailable, match="out of reach"):
        LocalTransactionCheck(engine).check(half)


def test_a_naive_check_is_wrong_where_this_one_is_not(engine: sa.Engine) -> None:
    """The planted fault of this file: a plain SELECT while the transaction is in flight says ROLLBACK."""
    half = half_of(engine)
    naive = make_engine(engine.url.render_as_string(hide_password=False))
    if engine.dialect.name == "sqlite":
        naive.dispose()
        naive = sa.create_engine(engine.url)
    with in_flight(engine, half.id) as connection:
        with naive.connect() as other:
            seen = other.scalar(sa.select(half_message.c.state).where(half_message.c.transaction_id == half.id))
        connection.commit()
    naive.dispose()
    assert seen is None  # and a naive listener would have said ROLLBACK
    assert LocalTransactionCheck(engine).check(half) is Outcome.COMMIT


class LostOutcomes(TransactionProducer):
    """A producer whose outcomes never arrive, as if it had been killed after each COMMIT."""

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        return


def test_lost_outcomes_are_asked_back(engine: sa.Engine, server: ServerProcess, unique: str) -> None:
    Base.metadata.create_all(engine)
    subscribe(server.url, unique, unique)
    with LostOutcomes(server.url, group=unique, engine=engine, check_after=0.5) as producer:
        for n in range(5):
            with Session(engine) as session, session.begin():
                session.add(Order(item=str(n)))
                producer.send(session, Message(unique, str(n)))
        found = drain(server.url, unique, unique, 5, wait=15)
    assert sorted(m["body"] for m in found) == [str(n) for n in range(5)]


def test_a_half_whose_commit_never_came_is_rolled_back_by_check(
    engine: sa.Engine, server: ServerProcess, unique: str
) -> None:
    """The connection dies between half and COMMIT: the client cannot know, so it says nothing; the check does."""
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique, engine=engine, check_after=0.5) as producer:
        item = producer.store_half(ids.to_text(ids.new_id()), [_packed(unique)], half_of(engine).source)
        state = _decided(server.url, item.id)
    assert state == "ROLLED_BACK"


def _packed(topic: str):  # type: ignore[no-untyped-def]
    from notify.client.transactions import pack

    return pack(Message(topic, "x"))


def _decided(url: str, transaction_id: str) -> str:
    import json
    import urllib.request

    from tests.support.clock import eventually

    def state() -> str | None:
        with urllib.request.urlopen(f"{url}/v1/admin/transactions/{transaction_id}") as answer:
            found = json.load(answer)["state"]
        return found if found != "PREPARED" else None

    return str(eventually(state, 20))


def test_a_listener_of_the_users_own(server: ServerProcess, unique: str) -> None:
    asked: list[HalfMessage] = []

    class Listener(CheckMessageListener):
        topics = (unique,)

        def check(self, half: HalfMessage) -> Outcome:
            asked.append(half)
            if half.attempt == 1:
                return Outcome.UNKNOWN
            return Outcome.COMMIT if half.messages[0].body == b"good" else Outcome.ROLLBACK

    producer = TransactionProducer(server.url, group=unique, check_after=0.5)
    producer.add_check_listener(Listener())
    ids_of = {}
    for body in ("good", "bad"):
        from notify.client.transactions import pack

        item = producer.store_half(ids.to_text(ids.new_id()), [pack(Message(unique, body))], "")
        ids_of[body] = item.id
    assert _decided(server.url, ids_of["good"]) == "COMMITTED"
    assert _decided(server.url, ids_of["bad"]) == "ROLLED_BACK"
    producer.close()
    assert {h.attempt for h in asked} == {1, 2}
