"""The inbox: claim and effect are one transaction; an engine or table that would part them is refused at the start."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, ReceivedMessage, create_tables, use_explicit_begin
from notify.errors import DeadLetter, InboxUnavailable, InvalidRequest
from notify.testing import InMemoryServer
from notify.testing.statements import execute
from tests.support.clock import PATIENCE_SECONDS
from tests.support.shop import Base, Order, items, make_engine

MESSAGE = ReceivedMessage("01a1fc5e-3817-71f6-bdb9-9ebd1a8e445d.0", "t", 0, 0, b"x", None, None, {}, 1, "")


def effect(message: ReceivedMessage, session: Session) -> None:
    session.add(Order(item=message.text))


# --- SQLite's transactions --------------------------------------------------------------------------------------


def implicit(tmp_path: Path) -> sa.Engine:
    """An engine as `create_engine` makes it, without `use_explicit_begin`."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    Base.metadata.create_all(engine)
    return engine


def test_sqlite_that_begins_late_is_refused(tmp_path: Path) -> None:
    """Such an engine's first released savepoint would commit the claim alone: a retry would then have no effect."""
    engine = implicit(tmp_path)
    inbox = Inbox(engine)

    def failing(message: ReceivedMessage, session: Session) -> None:
        raise ValueError("the handler fails after the claim")

    with pytest.raises(InvalidRequest, match="use_explicit_begin"):
        inbox.run("g", MESSAGE, failing)
    with pytest.raises(InvalidRequest, match="use_explicit_begin"):
        inbox.check()
    use_explicit_begin(engine)
    engine.dispose()
    inbox.check()
    assert inbox.run("g", MESSAGE, effect) and len(items(engine)) == 1
    engine.dispose()


def test_sqlite_that_begins_late_is_refused_as_the_consumer_starts(
    tmp_path: Path, notify_server: InMemoryServer
) -> None:
    engine = implicit(tmp_path)
    consumer = Consumer(notify_server.url, group="g", inbox=Inbox(engine))
    consumer.subscribe("t")(effect)
    with pytest.raises(InvalidRequest, match="use_explicit_begin"):
        consumer.run(signals=False)
    engine.dispose()


@pytest.mark.long
def test_asynchronous_sqlite_that_begins_late_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
        async with engine.begin() as connection:
            await connection.run_sync(create_tables)

        async def handle(message: ReceivedMessage, session: Any) -> None:
            raise AssertionError("the handler must not run")

        with pytest.raises(InvalidRequest, match="use_explicit_begin"):
            await Inbox(engine).run_async("g", MESSAGE, handle)
        with pytest.raises(InvalidRequest, match="use_explicit_begin"):
            await Inbox(engine).check_async()
        await engine.dispose()

    asyncio.run(run())


def impatient(url: str) -> dict[str, Any]:
    """Arguments of an engine of SQLite that waits for no lock."""
    return {"url": url, "connect_args": {"timeout": 0}, "pool_size": 8}


def test_threads_take_turns_at_sqlites_writer(tmp_path: Path) -> None:
    """They fought for its lock: with 16 of them, messages failed with "database is locked", and were tried again."""
    engine = sa.create_engine(**impatient(f"sqlite:///{tmp_path}/shop.db"))
    use_explicit_begin(engine)
    create_tables(engine)
    Base.metadata.create_all(engine)
    inboxes = [Inbox(engine), Inbox(engine)]
    gate = threading.Barrier(8)

    def handle(n: int) -> None:
        gate.wait(PATIENCE_SECONDS)
        message, inbox = replace(MESSAGE, id=f"{MESSAGE.id[:-1]}{n}"), inboxes[n % 2]
        if n < 4:
            assert inbox.run("g", message, effect)
        else:
            assert inbox.run_batch("g", [message], lambda messages, session: effect(messages[0], session)) == 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(handle, range(8)))
    assert len(items(engine)) == 8
    engine.dispose()


def test_coroutines_take_turns_at_sqlites_writer(tmp_path: Path) -> None:
    async def run() -> None:
        engine = create_async_engine(**impatient(f"sqlite+aiosqlite:///{tmp_path}/shop.db"))
        use_explicit_begin(engine)
        async with engine.begin() as connection:
            await connection.run_sync(create_tables)
            await connection.run_sync(Base.metadata.create_all)
        inbox = Inbox(engine)

        async def handle(message: ReceivedMessage, session: Any) -> None:
            session.add(Order(item=message.text))

        messages = [replace(MESSAGE, id=f"{MESSAGE.id[:-1]}{n}") for n in range(8)]
        assert await asyncio.gather(*(inbox.run_async("g", m, handle) for m in messages)) == [True] * 8
        await engine.dispose()

    asyncio.run(run())


def test_autocommit_is_refused(shop_engine: sa.Engine) -> None:
    """The claim would be committed before the handler runs."""
    with pytest.raises(InvalidRequest, match="AUTOCOMMIT"):
        Inbox(shop_engine.execution_options(isolation_level="AUTOCOMMIT")).run("g", MESSAGE, effect)
    assert len(items(shop_engine)) == 0
    assert Inbox(shop_engine).run("g", MESSAGE, effect)


@pytest.mark.long
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_autocommit_of_the_driver_is_refused(shop_engine: sa.Engine, engine_url: str) -> None:
    engine = sa.create_engine(engine_url, connect_args={"autocommit": True})
    if engine.dialect.name == "mysql":  # SQLAlchemy sets PyMySQL's autocommit off unless a listener comes after it
        sa.event.listen(engine, "connect", lambda connection, record: connection.autocommit(True))
    with pytest.raises(InvalidRequest, match="AUTOCOMMIT"):
        Inbox(engine).run("g", MESSAGE, effect)
    assert len(items(shop_engine)) == 0
    engine.dispose()


# --- tables -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_missing_table_is_refused_as_the_consumer_starts(engine_url: str, notify_server: InMemoryServer) -> None:
    engine = make_engine(engine_url)
    consumer = Consumer(notify_server.url, group="g", inbox=Inbox(engine))
    consumer.subscribe("t")(effect)
    with pytest.raises(InvalidRequest, match="create_tables"):
        consumer.run(signals=False)
    engine.dispose()


@pytest.mark.parametrize("level", [None, pytest.param("REPEATABLE READ", marks=pytest.mark.long)])
def test_processes_that_make_the_tables_at_once_all_succeed(engine_url: str, level: str | None) -> None:
    """A service's first processes start together on an empty database: each of them finds the tables missing. At
    REPEATABLE READ some failed on PostgreSQL, and did not see the others' tables."""
    gate = threading.Barrier(4)

    def make() -> str:
        engine = make_engine(engine_url)
        if level and engine.dialect.name != "sqlite":
            engine = engine.execution_options(isolation_level=level)
        try:
            gate.wait(PATIENCE_SECONDS)
            return create_tables(engine)
        finally:
            engine.dispose()

    with ThreadPoolExecutor(4) as threads:
        sources = [made.result() for made in [threads.submit(make) for _ in range(4)]]
    assert len(set(sources)) == 1
    engine = make_engine(engine_url)
    Inbox(engine).check()
    engine.dispose()


# --- the handler's transaction ----------------------------------------------------------------------------------


def commit(session: Session) -> None:
    session.commit()


def commit_the_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def commit_the_connection(session: Session) -> None:
    session.connection().commit()


def commit_its_transaction(session: Session) -> None:
    transaction = session.connection().get_transaction()
    assert transaction is not None
    transaction.commit()


def commit_in_sql(session: Session) -> None:
    session.flush()
    session.execute(sa.text("COMMIT"))


def roll_back_in_sql(session: Session) -> None:
    session.flush()
    session.execute(sa.text("ROLLBACK"))


def roll_back_the_driver(session: Session) -> None:
    session.flush()
    session.connection().connection.rollback()


COMMITS = [commit, commit_the_transaction, commit_the_connection, commit_its_transaction]


@pytest.mark.parametrize("how", COMMITS)
def test_a_handler_that_commits_by_itself_is_refused(shop_engine: sa.Engine, how: Callable[[Session], None]) -> None:
    """A commit inside the handler is refused: if the handler failed after it, the retry would meet the claim."""

    def committing(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        how(session)
        raise ValueError("after the commit")

    with pytest.raises(InvalidRequest, match="must not commit"):
        Inbox(shop_engine).run("g", MESSAGE, committing)
    assert len(items(shop_engine)) == 0
    assert Inbox(shop_engine).run("g", MESSAGE, effect) and len(items(shop_engine)) == 1


def test_a_handler_that_rolls_back_and_returns_is_refused(shop_engine: sa.Engine) -> None:
    """A rollback inside the handler takes the claim along: the message is not handled."""

    def rolling_back(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        session.rollback()

    with pytest.raises(InvalidRequest, match="ended the inbox's transaction"):
        Inbox(shop_engine).run("g", MESSAGE, rolling_back)
    assert Inbox(shop_engine).run("g", MESSAGE, effect) and len(items(shop_engine)) == 1


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("how", [commit_in_sql, roll_back_in_sql, roll_back_the_driver])
def test_a_transaction_that_ends_behind_the_session_is_noticed(
    shop_engine: sa.Engine, how: Callable[[Session], None], in_batches: bool
) -> None:
    """After a rollback the message counted as handled, and neither its effect nor its row was there."""

    def ending(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        how(session)

    inbox = Inbox(shop_engine)
    with pytest.raises(InvalidRequest, match="ended the inbox's transaction"):
        if in_batches:
            inbox.run_batch("g", [MESSAGE], lambda messages, session: ending(messages[0], session))
        else:
            inbox.run("g", MESSAGE, ending)
    assert inbox.run("g", MESSAGE, effect) is (how is not commit_in_sql)
    assert len(items(shop_engine)) == 1


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_replay_that_rolls_back_by_itself_is_tried_again(shop_engine: sa.Engine, in_batches: bool) -> None:
    """It became a dead letter: the claim of the first delivery was taken for the replay's."""
    inbox = Inbox(shop_engine)
    assert inbox.run("g", MESSAGE, effect)
    replayed = replace(MESSAGE, replay=1)

    def ending(session: Session) -> None:
        roll_back_in_sql(session)
        raise ValueError("after the rollback")

    with pytest.raises(Exception) as failure:
        if in_batches:
            inbox.run_batch("g", [replayed], lambda messages, session: ending(session))
        else:
            inbox.run("g", replayed, lambda message, session: ending(session))
    assert not isinstance(failure.value, DeadLetter)
    assert inbox.run("g", replayed, effect) and len(items(shop_engine)) == 2


def commit_by_the_driver(session: Session) -> None:
    session.flush()
    session.connection().connection.commit()


def define(session: Session) -> None:
    """MariaDB commits with it, and nobody asked for a commit."""
    session.flush()
    session.execute(sa.text("CREATE TABLE surplus (id INTEGER PRIMARY KEY)"))


def fail(message: ReceivedMessage, session: Session) -> None:
    raise ValueError("after the commit")


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("then", [fail, effect])
@pytest.mark.parametrize("how", [commit_in_sql, commit_by_the_driver, define])
def test_a_part_of_an_effect_that_a_handler_commits_does_not_count_as_all_of_it(
    shop_engine: sa.Engine, how: Callable[[Session], None], then: Callable[..., None], in_batches: bool
) -> None:
    """The claim stands then: an attempt that followed was acknowledged, although the rest was never done."""

    def committing(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        how(session)
        then(message, session)

    def run() -> None:
        if in_batches:
            inbox.run_batch("g", [MESSAGE], lambda messages, session: committing(messages[0], session))
        else:
            inbox.run("g", MESSAGE, committing)

    inbox = Inbox(shop_engine)
    kind = shop_engine.dialect.name
    if how is define and kind not in ("mysql", "mariadb"):
        with contextlib.ExitStack() as stack:
            if then is fail:
                stack.enter_context(pytest.raises(ValueError, match="after the commit"))
            run()
        assert len(items(shop_engine)) == (0 if then is fail else 2)
    else:
        with pytest.raises(DeadLetter, match="a part of its effect may be committed"):
            run()
        # SQLite commits each later statement by itself.
        assert len(items(shop_engine)) == (2 if then is effect and kind == "sqlite" else 1)


def test_a_rollback_that_a_statement_follows_is_noticed(shop_engine: sa.Engine) -> None:
    """The driver is in a transaction again by then, which has no claim: its commit would be that of a part."""

    def going_on(message: ReceivedMessage, session: Session) -> None:
        roll_back_in_sql(session)
        effect(message, session)

    with pytest.raises(InvalidRequest, match="ended the inbox's transaction"):
        Inbox(shop_engine).run("g", MESSAGE, going_on)
    assert Inbox(shop_engine).run("g", MESSAGE, effect)
    assert len(items(shop_engine)) == (2 if shop_engine.dialect.name == "sqlite" else 1)


def test_an_error_that_a_handler_catches_does_not_lose_the_effect(shop_engine: sa.Engine, engine_url: str) -> None:
    """PostgreSQL aborts the transaction then, and its COMMIT is a rollback without an error: the message counted as
    handled, and nothing was done."""

    def careless(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        session.flush()
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT nothing FROM nowhere"))

    async def carelessly(message: ReceivedMessage, session: Any) -> None:
        await session.run_sync(lambda session: careless(message, session))

    async def run_async() -> bool:
        url = sa.make_url(engine_url)
        engine = create_async_engine(url.set(drivername=ASYNC_DRIVERS[url.get_backend_name()]))
        if url.get_backend_name() == "sqlite":
            use_explicit_begin(engine)
        try:
            return await Inbox(engine).run_async("async", MESSAGE, carelessly)
        finally:
            await engine.dispose()

    runs = (lambda: Inbox(shop_engine).run("g", MESSAGE, careless), lambda: asyncio.run(run_async()))
    for number, run in enumerate(runs, 1):
        if shop_engine.dialect.name == "postgresql":
            with pytest.raises(InvalidRequest, match="was aborted"):
                run()
            assert len(items(shop_engine)) == 0
        else:
            assert run() and len(items(shop_engine)) == number


SESSION_OF = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
END_OF = {"postgresql": "SELECT pg_terminate_backend({})", "mysql": "KILL {}"}


@pytest.mark.parametrize("is_running", [False, True])
def test_a_lost_connection_is_an_error_of_sqlalchemy(shop_engine: sa.Engine, engine_url: str, is_running: bool) -> None:
    """The statements on the savepoint pass SQLAlchemy by, which has to hear of it: its pool would keep connections."""
    kind = sa.make_url(engine_url).get_backend_name().replace("mariadb", "mysql")
    if kind not in SESSION_OF:
        pytest.skip("no server")
    inbox = Inbox(shop_engine)
    numbers: list[Any] = []

    def noting(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        session.flush()
        numbers.append(session.execute(sa.text(SESSION_OF[kind])).scalar())
        if is_running and len(numbers) == 1:
            execute(engine_url, END_OF[kind].format(numbers[0]))

    if not is_running:
        assert inbox.run("other", MESSAGE, noting)
        execute(engine_url, END_OF[kind].format(numbers[0]))
    with pytest.raises(sa.exc.DBAPIError if is_running else InboxUnavailable) as lost:
        inbox.run("g", MESSAGE, noting)
    error = lost.value if is_running else lost.value.__cause__
    assert isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    assert inbox.run("g", MESSAGE, noting)
    assert len(items(shop_engine)) == (1 if is_running else 2)


def test_the_transaction_has_the_isolation_level_of_its_engine(engine_url: str) -> None:
    """psycopg's BEGIN is the inbox's own, in one round trip with the savepoint."""
    if not engine_url.startswith("postgresql"):
        pytest.skip("of PostgreSQL")
    engine = sa.create_engine(engine_url, isolation_level="SERIALIZABLE")
    create_tables(engine)
    levels: list[Any] = []
    inbox = Inbox(engine)
    for number in range(2):  # at first, the inbox looks for its tables
        message = replace(MESSAGE, id=f"{MESSAGE.id}{number}")
        inbox.run("g", message, lambda _, session: levels.append(session.scalar(sa.text("SHOW transaction_isolation"))))
    assert levels == ["serializable"] * 2
    engine.dispose()


def test_sqlites_lock_is_an_error_of_sqlalchemy(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    holding, waiting = make_engine(url), sa.create_engine(url, connect_args={"timeout": 0})
    use_explicit_begin(waiting)
    create_tables(holding)
    with holding.begin():
        with pytest.raises(InboxUnavailable, match="locked") as locked:
            Inbox(waiting).run("g", MESSAGE, effect)
        assert isinstance(locked.value.__cause__, sa.exc.OperationalError)

        async def unused(message: ReceivedMessage, session: Any) -> None: ...

        async def run_async() -> None:
            engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"), connect_args={"timeout": 0})
            use_explicit_begin(engine)
            try:
                await Inbox(engine).run_async("g", MESSAGE, unused)
            finally:
                await engine.dispose()

        with pytest.raises(InboxUnavailable, match="locked") as locked:
            asyncio.run(run_async())
        assert isinstance(locked.value.__cause__, sa.exc.OperationalError)
    for engine in (holding, waiting):
        engine.dispose()


def test_a_handler_may_use_savepoints(shop_engine: sa.Engine) -> None:
    def careful(message: ReceivedMessage, session: Session) -> None:
        with session.begin_nested():
            effect(message, session)
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            effect(message, session)
            session.flush()
            raise ZeroDivisionError
        session.begin_nested()  # left open: the inbox's commit releases it
        effect(message, session)

    assert Inbox(shop_engine).run("g", MESSAGE, careful)
    assert not Inbox(shop_engine).run("g", MESSAGE, careful)
    assert len(items(shop_engine)) == 2


ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+aiomysql"}


@pytest.mark.parametrize("how", COMMITS)
def test_an_asynchronous_handler_that_commits_by_itself_is_refused(
    shop_engine: sa.Engine, engine_url: str, how: Callable[[Session], None]
) -> None:
    url = sa.make_url(engine_url)

    async def committing(message: ReceivedMessage, session: Any) -> None:
        session.add(Order(item=message.text))
        await session.run_sync(how)

    async def good(message: ReceivedMessage, session: Any) -> None:
        session.add(Order(item=message.text))

    async def run(engine: AsyncEngine) -> list[bool]:
        with pytest.raises(InvalidRequest, match="must not commit"):
            await Inbox(engine).run_async("g", MESSAGE, committing)
        done = [await Inbox(engine).run_async("g", MESSAGE, good) for _ in range(2)]
        await engine.dispose()
        return done

    engine = create_async_engine(url.set(drivername=ASYNC_DRIVERS[url.get_backend_name()]))
    if url.get_backend_name() == "sqlite":
        use_explicit_begin(engine)
    assert asyncio.run(run(engine)) == [True, False]
    assert len(items(shop_engine)) == 1


def test_an_asynchronous_handler_that_commits_a_part_of_its_effect(shop_engine: sa.Engine, engine_url: str) -> None:
    url = sa.make_url(engine_url)

    async def committing(message: ReceivedMessage, session: Any) -> None:
        session.add(Order(item=message.text))
        await session.run_sync(commit_in_sql)
        session.add(Order(item="the rest"))

    async def in_a_batch(messages: list[ReceivedMessage], session: Any) -> None:
        await committing(messages[0], session)
        raise ValueError("after the commit")

    async def run(engine: AsyncEngine) -> None:
        with pytest.raises(DeadLetter, match="ended the inbox's transaction"):
            await Inbox(engine).run_async("g", MESSAGE, committing)
        with pytest.raises(DeadLetter, match="after the commit"):
            await Inbox(engine).run_batch_async("h", [MESSAGE], in_a_batch)
        await engine.dispose()

    engine = create_async_engine(url.set(drivername=ASYNC_DRIVERS[url.get_backend_name()]))
    if url.get_backend_name() == "sqlite":
        use_explicit_begin(engine)
    asyncio.run(run(engine))
    assert len(items(shop_engine)) == (3 if url.get_backend_name() == "sqlite" else 2)


BEFORE_EACH_ROW = {
    "sqlite": "CREATE TRIGGER careful BEFORE INSERT ON notify_inbox BEGIN SELECT RAISE(ABORT, 'not now'); END",
    "postgresql": "ALTER TABLE notify_inbox ADD COLUMN tenant INTEGER NOT NULL",
    "mysql": "ALTER TABLE notify_inbox ADD CONSTRAINT stranger "
    "FOREIGN KEY (consumer_group) REFERENCES strangers (name)",
}
"""By database, a rule of one's own that no row of the inbox keeps, and that raises an IntegrityError."""
AFTERWARDS = {
    "sqlite": "DROP TRIGGER careful",
    "postgresql": "ALTER TABLE notify_inbox DROP COLUMN tenant",
    "mysql": "ALTER TABLE notify_inbox DROP FOREIGN KEY stranger",
}


def test_a_row_that_breaks_another_constraint_is_not_taken_for_a_repetition(shop_engine: sa.Engine) -> None:
    """It counted as the row of a message that had taken effect: the message was acknowledged, and nothing was done."""
    kind = shop_engine.dialect.name
    with shop_engine.begin() as connection:
        if kind == "mysql":
            column = "name VARCHAR(127) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY"
            connection.exec_driver_sql(f"CREATE TABLE strangers ({column})")
        connection.exec_driver_sql(BEFORE_EACH_ROW[kind])
    inbox = Inbox(shop_engine)
    with pytest.raises(sa.exc.IntegrityError):
        inbox.run("g", MESSAGE, effect)
    with pytest.raises(sa.exc.IntegrityError):
        inbox.run_batch("g", [MESSAGE], lambda messages, session: effect(messages[0], session))
    assert len(items(shop_engine)) == 0
    with shop_engine.begin() as connection:
        connection.exec_driver_sql(AFTERWARDS[kind])
    assert [inbox.run("g", MESSAGE, effect) for _ in range(2)] == [True, False]
    assert len(items(shop_engine)) == 1
