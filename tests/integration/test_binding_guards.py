"""A change never commits without its message, nor a message without its change: each way is refused, or works."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from notify.client import (
    AsyncTransactionProducer,
    Inbox,
    Message,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.client.producer import checker
from notify.client.tables.definitions import half_message
from notify.errors import BindingRefused, InvalidRequest, TransactionRefused, Unavailable
from notify.testing import InMemoryServer
from tests.support.shop import Order, Shop, make_async_engine, make_engine

# --- a message is sent as it was at its `send` --------------------------------------------------------------------


def test_a_body_that_changes_after_its_send_was_sent_as_it_was(shop: Shop) -> None:
    body: dict[str, int] = {}
    headers: dict[str, str] = {}
    with shop.sessions() as session, session.begin():
        for n in range(3):
            body["n"] = n
            headers["h"] = str(n)
            shop.send(session, body, headers=headers)
        body["n"] = 9
    assert [m.json() for m in shop.messages()] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_message_that_cannot_be_sent_is_refused_by_send(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        session.add(Order(item="a"))
        for wrong in ({"headers": {"n": 1}}, {"tag": 5}, {"key": "\ud800"}, {"delay": 41 * 86_400.0}):
            with pytest.raises(InvalidRequest):
                shop.send(session, "a", **wrong)
        with pytest.raises(InvalidRequest, match="JSON"):
            shop.send(session, object())
        shop.send(session, "b")
    assert shop.delivered() == ["b"]
    assert shop.items() == ["a"]


def test_a_transaction_carries_at_most_100_messages(shop: Shop) -> None:
    with shop.sessions() as session, session.begin():
        for n in range(100):
            shop.send(session, str(n))
        with pytest.raises(InvalidRequest, match="at most 100"):
            shop.send(session, "one more")
    assert len(shop.delivered()) == 100


def test_a_late_key_that_cannot_be_sent_stops_the_commit(shop: Shop) -> None:
    with pytest.raises(InvalidRequest, match="key"), shop.sessions() as session, session.begin():
        session.add(Order(item="a"))
        shop.send(session, "a", key=lambda: "\ud800")
    assert shop.items() == []
    assert shop.delivered() == []


@pytest.mark.parametrize("is_expired", [True, False])
def test_a_late_key_that_fails_stops_the_commit_and_is_named(shop: Shop, is_expired: bool) -> None:
    """SQLAlchemy's words for an object of another session said neither what failed nor what to do."""
    with shop.sessions() as session:
        order = Order(item="before")
        session.add(order)
        session.commit()
    key = (lambda: order.id) if is_expired else (lambda: 1 / 0)
    said = "the key of a message to .* failed: (DetachedInstanceError|ZeroDivisionError).*in this session"
    with pytest.raises(InvalidRequest, match=said), shop.sessions() as session, session.begin():
        session.add(Order(item="a"))
        shop.send(session, "a", key=key)
    assert shop.items() == ["before"]
    assert shop.delivered() == []


# --- closed producers ---------------------------------------------------------------------------------------------


def test_a_closed_producer_sends_no_more(shop: Shop) -> None:
    shop.producer.close()
    with shop.sessions() as session:
        session.add(Order(item="a"))
        with pytest.raises(Unavailable, match="closed"):
            shop.send(session, "a")
        with pytest.raises(Unavailable, match="closed"), shop.producer.transaction(session) as tx:
            tx.send(Message(shop.topic, "a"))
    with pytest.raises(Unavailable, match="closed") as refused:
        shop.producer.publish(Message(shop.topic, "a"))
    assert not refused.value.retryable and refused.value.code == "closed"


@pytest.fixture
def impatient_checkers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that is closed within a transaction waits in vain for its checker, which waits for SQLite's lock."""
    monkeypatch.setattr(checker, "ANSWER_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient_checkers")
def test_a_commit_after_the_close_of_its_producer_fails(shop: Shop) -> None:
    with shop.sessions() as session:
        session.add(Order(item="a"))
        shop.send(session, "a")
        shop.producer.close()
        with pytest.raises(TransactionRefused, match="closed"):
            session.commit()
    with shop.engine.connect() as connection, connection.begin():
        connection.execute(sa.insert(Order).values(item="b"))  # a transaction without a message commits
    assert shop.items() == ["b"]
    assert shop.delivered() == []


@pytest.mark.usefixtures("impatient_checkers")
def test_a_commit_after_the_close_of_its_outbox_producer_fails(emptied_shop: sa.Engine, unique: str) -> None:
    producer = TransactionProducer("http://127.0.0.1:9", group=unique, engine=emptied_shop, mode="outbox")
    with Session(emptied_shop) as session:
        session.add(Order(item="a"))
        producer.send(session, Message(unique, "a"))
        producer.close()
        with pytest.raises(TransactionRefused, match="closed"):
            session.commit()
        session.rollback()
        assert session.scalars(sa.select(Order.item)).all() == []


@pytest.mark.long
def test_a_closed_async_producer_sends_no_more(memory: InMemoryServer, unique: str, async_engine: AsyncEngine) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        producer = AsyncTransactionProducer(memory.url, group=unique, engine=engine)
        async with AsyncSession(engine) as session:
            session.add(Order(item="a"))
            await producer.send(session, Message(unique, "a"))
            await producer.close()
            with pytest.raises(TransactionRefused, match="closed"):
                await session.commit()
        async with AsyncSession(engine) as session:
            for send in (producer.send(session, Message(unique, "b")), producer.publish(Message(unique, "b"))):
                with pytest.raises(Unavailable, match="closed"):
                    await send
            assert (await session.scalars(sa.select(Order.item))).all() == []
        with pytest.raises(Unavailable, match="closed"):
            await producer.start()

    asyncio.run(scenario(async_engine))
    assert memory.messages(unique) == []


# --- which engine, which connection -------------------------------------------------------------------------------


def test_a_producer_on_an_engine_with_options_sees_every_commit(
    emptied_shop: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    """Listeners on such an engine do not hear of connections that the engine below it made; the producer does."""
    with_options = emptied_shop.execution_options(logging_token="shop")
    with TransactionProducer(memory.url, group=unique, engine=with_options) as producer:
        for engine in (emptied_shop, with_options, emptied_shop.execution_options(logging_token="other")):
            with Session(engine) as session, session.begin():
                session.add(Order(item="a"))
                producer.send(session, Message(unique, "a"))
        memory.wait_for(unique, 3)


def test_an_engine_that_only_shares_the_pool_is_refused(shop: Shop) -> None:
    other = sa.create_engine(shop.engine.url, pool=shop.engine.pool)
    with Session(other) as session, pytest.raises(BindingRefused, match="same transaction"):
        shop.send(session, "a")


def test_two_phase_transactions_of_a_connection_are_refused(shop: Shop) -> None:
    if shop.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no two-phase commit")
    with shop.engine.connect() as connection:
        with connection.begin():
            shop.producer.binding.send_in_connection(connection, Message(shop.topic, "a"))
        two_phase = connection.begin_twophase()
        connection.execute(sa.insert(Order).values(item="b"))
        with (
            pytest.raises(BindingRefused, match=r"two-phase.*commit in one"),
            shop.producer.transaction(connection) as tx,
        ):
            tx.send(Message(shop.topic, "b"))
        two_phase.rollback()
        two_phase = connection.begin_twophase()
        connection.execute(sa.insert(Order).values(item="c"))
        two_phase.commit()  # a transaction without a message is left alone
    assert shop.items() == ["c"]


def test_a_session_that_chooses_an_engine_with_options_has_one_transaction(shop: Shop) -> None:
    chosen = shop.engine.execution_options(logging_token="chosen")

    class Choosing(Session):
        def get_bind(self, *args: Any, **kw: Any) -> Any:
            return kw.get("bind") or chosen

    begun: list[int] = []  # the thread counts: the producer's own thread uses the database, too

    def begin(connection: sa.Connection) -> None:
        begun.append(threading.get_ident())

    sa.event.listen(shop.engine, "begin", begin)
    try:
        with Choosing() as session, session.begin():
            shop.send(session, "first")
            session.add(Order(item="a"))
            session.flush()
            shop.send(session, "second")
    finally:
        sa.event.remove(shop.engine, "begin", begin)
    assert begun.count(threading.get_ident()) == 1
    assert shop.items() == ["a"]
    assert shop.delivered() == ["first", "second"]


def test_a_session_with_two_transactions_of_one_database_is_refused(shop: Shop) -> None:
    """Two transactions are refused: one could fail after the other has committed the half's row."""
    if shop.engine.dialect.name == "sqlite":
        pytest.skip("SQLite lets nobody begin a second one")
    chosen = shop.engine.execution_options(logging_token="chosen")
    with Session(shop.engine) as session:
        shop.send(session, "a")
        session.connection(bind_arguments={"bind": chosen}).execute(sa.insert(Order).values(item="a"))
        with pytest.raises(BindingRefused, match="several"):
            session.commit()
    with Session(shop.engine) as session:
        session.connection(bind_arguments={"bind": chosen})
        session.connection(bind_arguments={"bind": shop.engine})
        with pytest.raises(BindingRefused, match="several"):
            shop.send(session, "b")
    assert shop.items() == []
    assert shop.delivered() == []


class Elsewhere(DeclarativeBase):
    pass


class Invoice(Elsewhere):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_a_second_database_that_the_commit_itself_opens_is_refused(shop: Shop, tmp_path: Path) -> None:
    second = make_engine(f"sqlite:///{tmp_path}/second.db")
    Elsewhere.metadata.create_all(second)
    with Session(binds={Order: shop.engine, Invoice: second}) as session:
        session.add(Order(item="a"))
        shop.send(session, "a")
        session.add(Invoice(id=1))  # the commit begins with a flush, which opens the second database
        with pytest.raises(BindingRefused, match="several"):
            session.commit()
    with second.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(Invoice)) == 0
    second.dispose()
    assert shop.items() == []
    assert shop.delivered() == []


def test_a_second_connection_of_the_last_moment_is_refused(shop: Shop, tmp_path: Path) -> None:
    """A listener behind the binding's own opens the second connection, with nothing left to flush."""
    second = make_engine(f"sqlite:///{tmp_path}/second.db")
    with Session(shop.engine) as session:
        shop.send(session, "a")
        sa.event.listen(session, "before_commit", lambda s: s.connection(bind_arguments={"bind": second}))
        with pytest.raises(BindingRefused, match="several"):
            session.commit()
    second.dispose()
    assert shop.delivered() == []


def test_a_driver_that_commits_each_statement_is_refused(
    emptied_shop: sa.Engine, memory: InMemoryServer, unique: str
) -> None:
    if emptied_shop.dialect.name == "sqlite":
        pytest.skip("on SQLite the producer asks for use_explicit_begin, and sees whether a transaction is open")
    url = emptied_shop.url.render_as_string(hide_password=False)
    engine = sa.create_engine(url, connect_args={"autocommit": True})
    with TransactionProducer(memory.url, group=unique, engine=engine) as producer:
        with Session(engine) as session, pytest.raises(BindingRefused, match="commits each statement"):
            producer.send(session, Message(unique, "a"))
    engine.dispose()
    plain = sa.create_engine(url)
    with TransactionProducer(memory.url, group=unique, engine=plain) as producer:
        with plain.connect() as connection:
            with pytest.raises(BindingRefused, match="commits each statement"), connection.begin():
                producer.binding.send_in_connection(connection, Message(unique, "b"))
                driver: Any = connection.connection.driver_connection
                driver.rollback()
                driver.autocommit = True if plain.dialect.name == "postgresql" else driver.autocommit(True)
    plain.dispose()
    with emptied_shop.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(half_message)) == 0


def test_the_guards_with_asyncio_drivers(emptied_shop: sa.Engine, memory: InMemoryServer, unique: str) -> None:
    async def scenario() -> None:
        engine = make_async_engine(emptied_shop.url)
        with_options = engine.execution_options(logging_token="shop")
        async with AsyncTransactionProducer(memory.url, group=unique, engine=with_options) as producer:
            for refused in (engine, with_options):
                async with AsyncSession(refused) as session, session.begin():
                    session.add(Order(item="a"))
                    await producer.send(session, Message(unique, "a"))
            async with AsyncSession(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
                with pytest.raises(BindingRefused, match="commits each statement"):
                    await producer.send(session, Message(unique, "b"))
            async with engine.connect() as connection:
                driver: Any = (await connection.get_raw_connection()).driver_connection
                if engine.dialect.name == "mysql":
                    await driver.autocommit(True)
                elif engine.dialect.name == "postgresql":
                    await driver.set_autocommit(True)
                if engine.dialect.name != "sqlite":
                    with pytest.raises(BindingRefused, match="commits each statement"):
                        async with producer.transaction(connection) as tx:
                            await tx.send(Message(unique, "b"))
                await connection.invalidate()
        await engine.dispose()

    asyncio.run(scenario())
    assert [m.text for m in memory.wait_for(unique, 2)] == ["a", "a"]


# --- sessions of a registry ---------------------------------------------------------------------------------------


def test_a_scoped_session_sends_what_it_commits(shop: Shop) -> None:
    scoped = scoped_session(sessionmaker(shop.engine))
    scoped.add(Order(item="a"))
    shop.producer.send(scoped, Message(shop.topic, "a"))
    scoped.commit()
    with shop.producer.transaction(scoped) as tx:
        scoped.add(Order(item="b"))
        tx.send(Message(shop.topic, "b"))
    shop.producer.send(scoped, Message(shop.topic, "c"))
    scoped.rollback()
    scoped.remove()
    assert shop.items() == ["a", "b"]
    assert shop.delivered() == ["a", "b"]


def test_an_async_scoped_session_sends_what_it_commits(
    memory: InMemoryServer, unique: str, async_engine: AsyncEngine
) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        async with AsyncTransactionProducer(memory.url, group=unique, engine=engine) as producer:
            scoped.add(Order(item="a"))
            await producer.send(scoped, Message(unique, "a"))
            await scoped.commit()
            async with producer.transaction(scoped) as tx:
                scoped.add(Order(item="b"))
                await tx.send(Message(unique, "b"))
            await scoped.remove()

    asyncio.run(scenario(async_engine))
    assert sorted(m.text for m in memory.wait_for(unique, 2)) == ["a", "b"]


# --- a session that drops messages says so ------------------------------------------------------------------------


def test_a_session_that_is_closed_before_its_commit_says_what_it_drops(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "notify.client")
    with shop.sessions() as session:
        shop.send(session, "a")
        shop.send(session, "b")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "notify.client"]
    assert "2 messages" in said and shop.topic in said and "commit" in said
    caplog.clear()
    with shop.sessions() as session:
        shop.send(session, "c")
        session.rollback()  # an explicit rollback needs no warning
    with pytest.raises(ZeroDivisionError), shop.sessions() as session, session.begin():
        shop.send(session, "d")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), shop.sessions() as session:
        shop.send(session, "e")
        raise ZeroDivisionError  # the error is raised instead of a warning
    with shop.sessions() as session, session.begin():
        shop.send(session, "f")
    assert not [record for record in caplog.records if record.name == "notify.client"]
    assert shop.delivered() == ["f"]


@pytest.mark.long
def test_a_session_that_is_forgotten_says_what_it_drops(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Without a close the session fires no event: it is only garbage at some time."""
    caplog.set_level(logging.WARNING, "notify.client")
    session = shop.sessions()
    shop.send(session, "a")
    del session
    gc.collect()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "notify.client"]
    assert "1 messages" in said and shop.topic in said and "commit" in said
    caplog.clear()
    committed, rolled_back, closed = shop.sessions(), shop.sessions(), shop.sessions()
    shop.send(committed, "b")
    committed.commit()
    shop.send(rolled_back, "c")
    rolled_back.rollback()
    shop.send(closed, "d")
    closed.close()
    caplog.clear()
    del committed, rolled_back, closed
    gc.collect()
    assert not [record for record in caplog.records if record.name == "notify.client"]
    assert shop.delivered() == ["b"]


def test_explicit_begin_reaches_connections_that_are_there_already(
    memory: InMemoryServer, unique: str, tmp_path: Path
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/plain.db")
    create_tables(engine)
    with engine.connect() as connection:
        connection.execute(sa.select(1))
    with TransactionProducer(memory.url, group=unique, engine=engine) as producer:
        with Session(engine) as session:
            session.execute(sa.select(1))
            use_explicit_begin(engine)
            with pytest.raises(BindingRefused, match="began before"):
                producer.send(session, Message(unique, "early"))
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "a"))
        memory.wait_for(unique, 1)
    engine.dispose()


def test_create_tables_says_how_an_async_engine_is_used(async_engine: Any) -> None:
    for given in (async_engine, async_engine.sync_engine):
        with pytest.raises(InvalidRequest, match="run_sync"):
            create_tables(given)


def test_the_engine_within_an_async_engine_is_refused(async_engine: Any) -> None:
    """Its messages were sent, but no check was answered, and nothing said so."""
    for make in (lambda given: TransactionProducer("http://127.0.0.1:9", group="g", engine=given), Inbox):
        with pytest.raises(InvalidRequest, match=r"driver for asyncio.* not its sync_engine"):
            make(async_engine.sync_engine)
