"""The traps of check-back, on each database: an answer is right, or it is UNKNOWN."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from notify.check import CheckMessageListener, CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome, question
from notify.check.question import read_source
from notify.client import (
    AsyncTransactionProducer,
    Message,
    TransactionProducer,
)
from notify.client.producer.packing import pack
from notify.client.tables.definitions import half_message, notify_source
from notify.errors import TransactionRefused
from notify.runtime.databases import database_now
from notify.testing import InMemoryServer
from tests.support import dying
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.dying import lose_outcomes
from tests.support.http import admin, call, post
from tests.support.proxy import Proxy, unencrypted
from tests.support.shop import Order, items, make_engine
from tests.support.transactions import half_request, new_id, when_free


@pytest.fixture
def engine(shared_engine: sa.Engine) -> Iterator[sa.Engine]:
    """The engine of a database without halves and orders, whose notify_source a test may change."""
    with shared_engine.begin() as connection:
        connection.execute(sa.delete(Order))
        connection.execute(sa.delete(half_message))
        source = dict(connection.execute(sa.select(notify_source)).mappings().one())
    yield shared_engine
    with shared_engine.begin() as connection:
        connection.execute(notify_source.update().values(source))


def half_of(engine: sa.Engine, transaction_id: str | None = None, shard: str = "main") -> HalfMessage:
    with engine.connect() as connection:
        source = read_source(connection)[0]
    return HalfMessage(transaction_id or new_id(), "g", shard, source, 1, ())


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


def test_no_row_is_a_rollback_that_stays_one(engine: sa.Engine) -> None:
    """The question leaves a tombstone: a producer that inserts later is refused, and rolls back."""
    half = half_of(engine)
    assert when_free(lambda: LocalTransactionCheck(engine).check(half)) is Outcome.ROLLBACK
    with pytest.raises(sa.exc.DBAPIError), engine.begin() as connection:
        connection.execute(INSERT, row(half.id))
    assert when_free(lambda: LocalTransactionCheck(engine).check(half)) is Outcome.ROLLBACK


@contextmanager
def in_flight(engine: sa.Engine, transaction_id: str) -> Iterator[sa.Connection]:
    """A transaction that has inserted its row and has not committed."""
    with engine.connect() as connection:
        transaction = connection.begin()
        connection.execute(INSERT, row(transaction_id))
        yield connection
        if transaction.is_active:
            transaction.rollback()


WAITING = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND wait_event_type = 'Lock'",
    "mariadb": "SELECT count(*) FROM information_schema.innodb_trx JOIN information_schema.processlist "
    "ON trx_mysql_thread_id = id WHERE db = DATABASE() AND trx_state = 'LOCK WAIT'",
}
"""SQL for the number of sessions of this database that wait for a lock."""


def answer_to_one_that_waits(engine: sa.Engine, half: HalfMessage, end: Callable[[], None]) -> Outcome:
    """The answer of a question that waits for a transaction in flight, until `end` ends that."""

    def waits() -> bool:
        if kind_of(engine) == "mariadb":
            time.sleep(0.15)  # InnoDB renews this table only if nobody has read it for 0.1 s
        with engine.connect() as connection:
            return bool(connection.exec_driver_sql(WAITING[kind_of(engine)]).scalar())

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(LocalTransactionCheck(engine).check, half)
        try:
            eventually(waits, "the question to wait for the lock")
        finally:
            end()
        return asked.result(PATIENCE_SECONDS)


def kind_of(engine: sa.Engine) -> str:
    return "mariadb" if engine.dialect.name == "mysql" else engine.dialect.name


@pytest.fixture
def patient_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions wait until the test ends the transaction, also on a slow machine."""
    monkeypatch.setattr(question, "LOCK_TIMEOUT_MS", round(PATIENCE_SECONDS * 1000))


@pytest.mark.usefixtures("patient_questions")
def test_a_transaction_that_ends_while_the_question_waits(engine: sa.Engine) -> None:
    """The question waits for the lock, and then reads how the transaction ended."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one lock: the question's wait is a poll, covered by tests/contract/test_dialects.py")
    for commit in (True, False):
        half = half_of(engine)
        with in_flight(engine, half.id) as connection:
            outcome = answer_to_one_that_waits(engine, half, connection.commit if commit else connection.rollback)
        assert outcome is (Outcome.COMMIT if commit else Outcome.ROLLBACK)


@pytest.mark.usefixtures("patient_questions")
def test_repeatable_read_as_the_engine_default_does_not_mislead_the_question(engine: sa.Engine) -> None:
    """The question reads in READ COMMITTED: in a snapshot older than the commit a plain read would miss the row."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite transactions are serialised by BEGIN IMMEDIATE")
    repeatable = sa.create_engine(engine.url, isolation_level="REPEATABLE READ")
    half = half_of(repeatable)
    with in_flight(repeatable, half.id) as connection:
        assert answer_to_one_that_waits(repeatable, half, connection.commit) is Outcome.COMMIT
    repeatable.dispose()


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
    assert when_free(lambda: LocalTransactionCheck(engine).check(half)) is Outcome.ROLLBACK


def test_a_half_older_than_a_forced_purge_is_unknown(engine: sa.Engine) -> None:
    half = half_of(engine)
    with engine.begin() as connection:
        connection.execute(notify_source.update().values(purged_before=1 << 50))
    with pytest.raises(CheckUnavailable, match="purged"):
        LocalTransactionCheck(engine).check(half)


def test_an_unreachable_database_is_unknown() -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:9/none")
    half = HalfMessage(new_id(), "g", "main", "s", 1, ())
    with pytest.raises(CheckUnavailable, match="cannot be reached"):
        LocalTransactionCheck(engine).check(half)
    engine.dispose()


def test_a_commit_that_comes_after_its_check_says_so(engine: sa.Engine, memory: InMemoryServer, unique: str) -> None:
    """It was an IntegrityError about a table that the service does not know."""
    if kind_of(engine) == "sqlite":
        pytest.skip("a check waits for the transaction, which holds SQLite's lock")
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        store_half = producer.outgoing.store_half

        def checked(transaction_id: str, messages: Any, source: str) -> Any:
            item = store_half(transaction_id, messages, source)
            half = HalfMessage(transaction_id, unique, "main", source, 1, ())
            assert when_free(lambda: LocalTransactionCheck(engine).check(half)) is Outcome.ROLLBACK
            return item

        producer.outgoing.store_half = checked  # type: ignore[method-assign]
        with pytest.raises(TransactionRefused, match="longer than check_after") as raised:
            with Session(engine) as session, session.begin():
                producer.send(session, Message(unique, "x"))
        assert raised.value.retryable


def test_a_naive_check_is_wrong_where_this_one_is_not(engine: sa.Engine) -> None:
    """This file's planted fault: a plain SELECT while the transaction is in flight answers ROLLBACK, wrongly."""
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
    assert seen is None  # a naive listener would have answered ROLLBACK
    assert LocalTransactionCheck(engine).check(half) is Outcome.COMMIT


# --- asked by a server ------------------------------------------------------------------------------------------

PAST_THE_FIRST_CHECK = 60.0
"""Seconds; without `check_after` the first check comes after 5."""


def state_of(server: InMemoryServer, transaction_id: str) -> str:
    """A transaction's state, once it is decided."""
    server.advance(PAST_THE_FIRST_CHECK)

    def decided() -> str:
        state = str(admin(server.url, "GET", f"transactions/{transaction_id}")["state"])
        return "" if state == "PREPARED" else state

    return eventually(decided, f"the outcome of {transaction_id}")


def test_a_half_whose_commit_never_came_is_rolled_back_by_check(
    engine: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    """The connection dies between half and COMMIT: the client cannot know the outcome, and the check finds it."""
    with TransactionProducer(memory.url, group=unique, engine=engine) as producer:
        item = producer.outgoing.store_half(new_id(), [pack(Message(unique, "x"))], half_of(engine).source)
        assert state_of(memory, item.id) == "ROLLED_BACK"


def test_a_listener_of_the_users_own(memory: InMemoryServer, unique: str) -> None:
    asked: list[HalfMessage] = []

    class Listener(CheckMessageListener):
        topics = (unique,)

        def check(self, half: HalfMessage) -> Outcome:
            asked.append(half)
            if half.attempt == 1:
                return Outcome.UNKNOWN
            return Outcome.COMMIT if half.messages[0].body == b"good" else Outcome.ROLLBACK

    with TransactionProducer(memory.url, group=unique) as producer:
        producer.add_check_listener(Listener())
        good, bad = (
            producer.outgoing.store_half(new_id(), [pack(Message(unique, body))], "").id for body in ("good", "bad")
        )
        assert state_of(memory, good) == "COMMITTED"
        assert state_of(memory, bad) == "ROLLED_BACK"
    assert {half.attempt for half in asked} == {1, 2}


@pytest.mark.parametrize("begin", ["constructed in the loop", "start", "async with"])
def test_an_async_producer_answers_before_it_sends(
    begin: str, memory: InMemoryServer, unique: str, sqlite_engine: sa.Engine, async_engine: AsyncEngine
) -> None:
    """After a kill and a restart the producer answers checks before it sends its first message."""
    with TransactionProducer(memory.url, group=unique, engine=sqlite_engine, answer_checks=False) as killed:
        lose_outcomes(killed)
        with Session(sqlite_engine) as session, session.begin():
            killed.send(session, Message(unique, "x"))
    before_the_loop = AsyncTransactionProducer(memory.url, group=unique, engine=async_engine)

    async def scenario() -> None:
        producer = before_the_loop
        if begin == "constructed in the loop":
            producer = AsyncTransactionProducer(memory.url, group=unique, engine=async_engine)
        elif begin == "start":
            await producer.start()
        else:
            await producer.__aenter__()
        memory.advance(PAST_THE_FIRST_CHECK)
        await eventually_async(lambda: not memory.halves(unique), "the answer to the check")
        await producer.close()

    asyncio.run(scenario())
    assert [m.text for m in memory.messages(unique)] == ["x"]


def test_only_answers_unknown_are_counted_as_such(memory: InMemoryServer, unique: str) -> None:
    """The console said "Checks answered 0" beside an answer that it showed: it counts those that use up a check."""
    request = half_request(unique, topic=unique)
    (half,) = request["transactions"]
    post(memory.url, "/v1/transactions", request)

    def answered(**answer: object) -> str:
        admin(memory.url, "POST", f"transactions/{half['id']}/check", {})
        asked = {"producer_group": unique, "instance": "i", "wait": 30}
        (check,) = post(memory.url, "/v1/checks/poll", asked)["checks"]
        outcomes = [{"id": half["id"], "check": check["token"], "outcome": "UNKNOWN"} | answer]
        post(memory.url, "/v1/transactions/outcomes", {"producer_group": unique, "outcomes": outcomes})
        return str(call(memory.url, "GET", f"/transactions/{half['id']}"))

    page = answered(unavailable=True, reason="the database is unreachable")
    assert "unavailable: the database is unreachable" in page and "<dt>UNKNOWN answers</dt><dd>0;" in page
    page = answered()
    assert "<dt>UNKNOWN answers</dt><dd>1;" in page and "answered</dt>" not in page


def test_a_parked_transaction_of_a_group_without_producers_waits_for_a_decision() -> None:
    """The console's list said that its next check was 12 minutes ago."""
    with InMemoryServer() as server:
        admin(server.url, "PUT", "settings", {"values": {"check_attempts": 1}})
        request = half_request("g", topic="t")
        (half,) = request["transactions"]
        post(server.url, "/v1/transactions", request)
        admin(server.url, "POST", f"transactions/{half['id']}/check", {})
        (check,) = post(server.url, "/v1/checks/poll", {"producer_group": "g", "instance": "i", "wait": 30})["checks"]
        outcome = {"id": half["id"], "check": check["token"], "outcome": "UNKNOWN"}
        post(server.url, "/v1/transactions/outcomes", {"producer_group": "g", "outcomes": [outcome]})
        server.advance(3600)
        assert "</span>, to decide<" in str(call(server.url, "GET", "/transactions"))


# --- outcomes that a producer cannot know: a commit cut off, an answer lost, a process killed ---------------------


@pytest.fixture
def proxied(engine: sa.Engine) -> Iterator[tuple[Proxy, sa.Engine]]:
    """A proxy in front of the database, and an engine through it."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite is a file: its COMMIT has no connection that could be cut")
    with Proxy(engine.url.host or "", engine.url.port or 0) as proxy:
        through = sa.create_engine(unencrypted(engine.url).set(host="127.0.0.1", port=proxy.port))
        yield proxy, through
        through.dispose()


def sell(engine: sa.Engine, producer: TransactionProducer, topic: str, item: str) -> None:
    """An order and its message in one transaction."""
    with Session(engine) as session, session.begin():
        session.add(Order(item=item))
        producer.send(session, Message(topic, item))


def delivered(server: InMemoryServer, topic: str) -> list[str]:
    """The messages in the order of the queue, once the server has checked every half without an outcome."""
    server.advance(PAST_THE_FIRST_CHECK)
    eventually(lambda: not server.halves(topic), "the outcome of every half")
    return [m.text for m in server.messages(topic)]


@pytest.mark.parametrize("executed", [False, True], ids=["before it arrives", "before its answer arrives"])
def test_a_commit_that_is_cut_off(
    proxied: tuple[Proxy, sa.Engine], executed: bool, memory: InMemoryServer, unique: str
) -> None:
    """The service sees an error either way; the message is delivered if, and only if, the database committed."""
    proxy, engine = proxied
    with TransactionProducer(memory.url, group=unique, engine=engine, check_after=PAST_THE_FIRST_CHECK - 1) as producer:
        sell(engine, producer, unique, "first")  # from here on the server knows the source
        # Checks must be over: a check commits, too, and would be cut off instead.
        eventually(lambda: not memory.halves(unique), "the outcome of the first")
        proxy.cut_at(rb"COMMIT(\0|$)", answer=executed)
        with pytest.raises(sa.exc.DBAPIError):
            sell(engine, producer, unique, "ambiguous")
        assert proxy.cuts == 1
        assert delivered(memory, unique) == (["first", "ambiguous"] if executed else ["first"])
        sell(engine, producer, unique, "last")
        assert delivered(memory, unique) == items(engine)
    assert items(engine) == (["first", "ambiguous", "last"] if executed else ["first", "last"])


def test_a_connection_that_is_lost_before_the_commit(
    proxied: tuple[Proxy, sa.Engine], memory: InMemoryServer, unique: str
) -> None:
    """A connection lost between half and COMMIT rolls the half back at once, and the pool continues."""
    proxy, engine = proxied
    with TransactionProducer(memory.url, group=unique, engine=engine, answer_checks=False) as producer:
        sell(engine, producer, unique, "first")
        proxy.cut_at(rb"(?i)into half_message", answer=False)
        with pytest.raises(sa.exc.OperationalError):
            sell(engine, producer, unique, "lost")
        assert proxy.cuts == 1
        sell(engine, producer, unique, "last")
        assert delivered(memory, unique) == ["first", "last"]
    assert items(engine) == ["first", "last"]


def test_a_half_whose_answer_is_lost(engine: sa.Engine, memory: InMemoryServer, unique: str) -> None:
    """The server stored the half, the producer does not know: nothing is committed, and the check rolls it back."""
    address = urlsplit(memory.url)
    with Proxy(address.hostname or "", address.port or 0) as proxy:
        proxy.drop_answers = True
        with TransactionProducer(
            f"http://127.0.0.1:{proxy.port}", group=unique, engine=engine, half_timeout=0.3, answer_checks=False
        ) as producer:

            def is_lost() -> bool:
                with pytest.raises(TransactionRefused) as refused:
                    sell(engine, producer, unique, "lost")
                assert refused.value.retryable
                return bool(memory.halves(unique))

            # On a slow machine the time may be over before the half is sent: then the next one counts.
            eventually(is_lost, "a half that reached the server")
    with TransactionProducer(memory.url, group=unique, engine=engine):  # answers the check
        assert delivered(memory, unique) == []
    assert items(engine) == []


@pytest.mark.parametrize("point", dying.POINTS)
def test_a_producer_killed_at_its_worst_moments(
    point: str, engine: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    dsn = engine.url.render_as_string(hide_password=False)
    assert dying.order_and_die(memory.url, unique, dsn, point) == -signal.SIGKILL
    assert len(memory.halves(unique)) == 1
    with TransactionProducer(memory.url, group=unique, engine=engine):  # another instance answers
        assert delivered(memory, unique) == items(engine)
    assert items(engine) == ([] if point == "after half" else [point])
