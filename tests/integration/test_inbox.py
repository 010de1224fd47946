"""The inbox: claim and effect are one transaction; an engine or table that would part them is refused at the start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, ReceivedMessage, create_tables, use_explicit_begin
from notify.client.inbox.rows import ASKED_AT_ONCE
from notify.client.tables.definitions import notify_inbox
from notify.errors import DeadLetter, InboxUnavailable, InvalidRequest
from notify.protocol.message import FIRST_ID
from notify.testing import InMemoryServer
from notify.testing.statements import execute
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database
from tests.support.shop import Base, Order, items, make_async_engine, make_engine


@dataclass(frozen=True)
class Way:
    """One of these ways."""

    name: str
    is_async: bool = False
    in_batches: bool = False

    def run(
        self,
        engine: sa.Engine,
        group: str,
        message: ReceivedMessage,
        handle: Callable[[ReceivedMessage, Session], object],
        **options: Any,
    ) -> bool:
        """Handle a message; whether that was done now. `options` are those of an engine for coroutines."""
        if self.is_async:
            return asyncio.run(self._run_async(engine, group, message, handle, options))
        if self.in_batches:
            return Inbox(engine).run_batch(group, [message], lambda given, session: handle(given[0], session)) == 1
        return Inbox(engine).run(group, message, handle)

    async def _run_async(
        self,
        engine: sa.Engine,
        group: str,
        message: ReceivedMessage,
        handle: Callable[[ReceivedMessage, Session], object],
        options: dict[str, Any],
    ) -> bool:
        async def handle_one(given: ReceivedMessage, session: Any) -> None:
            await session.run_sync(lambda session: handle(given, session))

        async def handle_batch(given: list[ReceivedMessage], session: Any) -> None:
            await handle_one(given[0], session)

        pool = make_async_engine(engine.url, **options)
        try:
            if self.in_batches:
                return await Inbox(pool).run_batch_async(group, [message], handle_batch) == 1
            return await Inbox(pool).run_async(group, message, handle_one)
        finally:
            await pool.dispose()


SINGLE, BATCH = Way("single"), Way("batch", in_batches=True)
ASYNC, ASYNC_BATCH = Way("coroutine", is_async=True), Way("batch of coroutines", is_async=True, in_batches=True)


def each_way(*ways: Way | Any) -> pytest.MarkDecorator:
    """Run a test with each of these as `way`."""
    return pytest.mark.parametrize("way", ways, ids=lambda way: way.name)


MESSAGE = ReceivedMessage("01a1fc5e-3817-71f6-bdb9-9ebd1a8e445d.0", "t", 0, 0, b"x", None, None, {}, 1, "")


def effect(message: ReceivedMessage, session: Session) -> None:
    session.add(Order(item=message.text))


# --- SQLite's transactions --------------------------------------------------------------------------------------


def test_sqlite_that_begins_late_is_refused(tmp_path: Path, notify_server: InMemoryServer) -> None:
    """Such an engine's first released savepoint would commit the claim alone: a retry would then have no effect."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    Base.metadata.create_all(engine)
    inbox = Inbox(engine)
    consumer = Consumer(notify_server.url, group="g", inbox=inbox)
    consumer.subscribe("t")(effect)

    def failing(message: ReceivedMessage, session: Session) -> None:
        raise ValueError("the handler fails after the claim")

    with pytest.raises(InvalidRequest, match="use_explicit_begin"):
        inbox.run("g", MESSAGE, failing)
    with pytest.raises(InvalidRequest, match="use_explicit_begin"):
        inbox.check()
    with pytest.raises(InvalidRequest, match="use_explicit_begin"):
        consumer.run(signals=False)
    use_explicit_begin(engine)
    engine.dispose()
    inbox.check()
    assert inbox.run("g", MESSAGE, effect) and len(items(engine)) == 1
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
        engine = make_async_engine(**impatient(f"sqlite:///{tmp_path}/shop.db"))
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


def test_threads_that_make_the_tables_at_once_all_succeed(engine_url: str) -> None:
    """At REPEATABLE READ some failed on PostgreSQL, and did not see the others' tables."""
    gate = threading.Barrier(4)

    def make(_: object) -> str:
        engine = make_engine(engine_url)
        if engine.dialect.name != "sqlite":
            engine = engine.execution_options(isolation_level="REPEATABLE READ")
        try:
            gate.wait(PATIENCE_SECONDS)
            return create_tables(engine)
        finally:
            engine.dispose()

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(make, range(4)))) == 1


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


def roll_back(session: Session) -> None:
    session.rollback()


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


@each_way(SINGLE, ASYNC)
@pytest.mark.parametrize("how", COMMITS)
def test_a_handler_that_commits_by_itself_is_refused(
    shop_engine: sa.Engine, how: Callable[[Session], None], way: Way
) -> None:
    """A commit inside the handler is refused: if the handler failed after it, the retry would meet the claim."""

    def committing(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        how(session)
        raise ValueError("after the commit")

    with pytest.raises(InvalidRequest, match="must not commit"):
        way.run(shop_engine, "g", MESSAGE, committing)
    assert len(items(shop_engine)) == 0
    assert [way.run(shop_engine, "g", MESSAGE, effect) for _ in range(2)] == [True, False]
    assert len(items(shop_engine)) == 1


@each_way(SINGLE, BATCH)
@pytest.mark.parametrize("how", [commit_in_sql, roll_back, roll_back_in_sql, roll_back_the_driver])
def test_a_transaction_that_the_handler_ends_is_noticed(
    shop_engine: sa.Engine, how: Callable[[Session], None], way: Way
) -> None:
    """After a rollback the message counted as handled, and neither its effect nor its row was there."""

    def ending(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        how(session)

    with pytest.raises(InvalidRequest, match="ended the inbox's transaction"):
        way.run(shop_engine, "g", MESSAGE, ending)
    assert way.run(shop_engine, "g", MESSAGE, effect) is (how is not commit_in_sql)
    assert len(items(shop_engine)) == 1


@each_way(SINGLE, BATCH)
def test_a_replay_that_rolls_back_by_itself_is_tried_again(shop_engine: sa.Engine, way: Way) -> None:
    """It became a dead letter: the claim of the first delivery was taken for the replay's."""
    assert way.run(shop_engine, "g", MESSAGE, effect)
    replayed = replace(MESSAGE, replay=1)

    def ending(message: ReceivedMessage, session: Session) -> None:
        roll_back_in_sql(session)
        raise ValueError("after the rollback")

    with pytest.raises(Exception) as failure:
        way.run(shop_engine, "g", replayed, ending)
    assert not isinstance(failure.value, DeadLetter)
    assert way.run(shop_engine, "g", replayed, effect) and len(items(shop_engine)) == 2


def commit_by_the_driver(session: Session) -> None:
    session.flush()
    session.connection().connection.commit()


def define(session: Session) -> None:
    """MariaDB commits with it, and nobody asked for a commit."""
    session.flush()
    session.execute(sa.text("CREATE TABLE surplus (id INTEGER PRIMARY KEY)"))


def fail(message: ReceivedMessage, session: Session) -> None:
    raise ValueError("after the commit")


@each_way(SINGLE, BATCH, ASYNC, pytest.param(ASYNC_BATCH, marks=pytest.mark.long))
@pytest.mark.parametrize("then", [fail, effect])
@pytest.mark.parametrize("how", [commit_in_sql, commit_by_the_driver, define])
def test_a_part_of_an_effect_that_a_handler_commits_does_not_count_as_all_of_it(
    shop_engine: sa.Engine, how: Callable[[Session], None], then: Callable[..., None], way: Way
) -> None:
    """The claim stands then: an attempt that followed was acknowledged, although the rest was never done."""

    def committing(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        how(session)
        then(message, session)

    kind = shop_engine.dialect.name
    if how is define and kind not in ("mysql", "mariadb"):
        if then is effect:
            assert way.run(shop_engine, "g", MESSAGE, committing)
        else:
            with pytest.raises(ValueError, match="after the commit"):
                way.run(shop_engine, "g", MESSAGE, committing)
        assert len(items(shop_engine)) == (0 if then is fail else 2)
    else:
        with pytest.raises(DeadLetter, match="a part of its effect may be committed"):
            way.run(shop_engine, "g", MESSAGE, committing)
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


@each_way(SINGLE, ASYNC)
def test_an_error_that_a_handler_catches_does_not_lose_the_effect(shop_engine: sa.Engine, way: Way) -> None:
    """PostgreSQL aborts the transaction then, and its COMMIT is a rollback without an error: the message counted as
    handled, and nothing was done."""

    def careless(message: ReceivedMessage, session: Session) -> None:
        effect(message, session)
        session.flush()
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT nothing FROM nowhere"))

    if shop_engine.dialect.name == "postgresql":
        with pytest.raises(InvalidRequest, match="was aborted"):
            way.run(shop_engine, "g", MESSAGE, careless)
        assert len(items(shop_engine)) == 0
    else:
        assert way.run(shop_engine, "g", MESSAGE, careless) and len(items(shop_engine)) == 1


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


@each_way(SINGLE, ASYNC)
def test_sqlites_lock_is_an_error_of_sqlalchemy(tmp_path: Path, way: Way) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    impatient: Any = {"connect_args": {"timeout": 0}}
    holding, waiting = make_engine(url), sa.create_engine(url, **impatient)
    use_explicit_begin(waiting)
    create_tables(holding)
    with holding.begin(), pytest.raises(InboxUnavailable, match="locked") as locked:
        way.run(waiting, "g", MESSAGE, effect, **impatient)
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
    for way in (SINGLE, BATCH):
        with pytest.raises(sa.exc.IntegrityError):
            way.run(shop_engine, "g", MESSAGE, effect)
    assert len(items(shop_engine)) == 0
    with shop_engine.begin() as connection:
        connection.exec_driver_sql(AFTERWARDS[kind])
    assert [SINGLE.run(shop_engine, "g", MESSAGE, effect) for _ in range(2)] == [True, False]
    assert len(items(shop_engine)) == 1


# --- batches ------------------------------------------------------------------------------------------------------


TRANSACTION = "01a1fc5e-3817-71f6-bdb9-9ebd1a8e445d"


def message(number: int, **changed: Any) -> ReceivedMessage:
    name = f"{TRANSACTION}.{number}"
    plain = ReceivedMessage(name, "t", 0, number, f"{number:04}".encode(), None, None, {}, 1, "")
    return replace(plain, **changed)


def again(number: int, of: int) -> ReceivedMessage:
    """A message that is sent again under a new id."""
    return message(number, headers={FIRST_ID: f"{TRANSACTION}.{of}"})


class Effects:
    """A handler that orders an item for each message, under the test's own name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[list[str]] = []

    def __call__(self, messages: list[ReceivedMessage], session: Session) -> None:
        self.calls.append([m.text for m in messages])
        session.add_all([Order(item=f"{self.name} {m.text}") for m in messages])
        session.flush()

    def committed(self, engine: sa.Engine) -> list[str]:
        with Session(engine) as session:
            named = session.scalars(sa.select(Order.item).where(Order.item.startswith(self.name)))
            return sorted(item.rpartition(" ")[2] for item in named)


def rows(engine: sa.Engine, group: str) -> int:
    """How many inbox rows a group has."""
    with engine.connect() as connection:
        own = notify_inbox.c.consumer_group == group
        return connection.scalar(sa.select(sa.func.count()).select_from(notify_inbox).where(own)) or 0


@pytest.mark.long
def test_a_batch_takes_effect_once(shared_engine: sa.Engine, unique: str) -> None:
    inbox, effects = Inbox(shared_engine), Effects(unique)
    size = ASKED_AT_ONCE + 1
    batch = [message(n) for n in range(size)]
    assert inbox.run_batch(unique, batch, effects) == size
    assert inbox.run_batch(unique, batch, effects) == 0
    assert inbox.run_batch(unique, [*batch[:3], message(size), *batch[3:5], message(size + 1)], effects) == 2
    assert [len(call) for call in effects.calls] == [size, 2], "nothing to handle is no call"
    assert effects.committed(shared_engine) == [f"{n:04}" for n in range(size + 2)]
    assert rows(shared_engine, unique) == size + 2


def test_single_messages_and_batches_know_each_other(shared_engine: sa.Engine, unique: str) -> None:
    inbox, effects = Inbox(shared_engine), Effects(unique)
    assert inbox.run(unique, message(1), lambda m, session: effects([m], session))
    assert inbox.run_batch(unique, [message(0), message(1), message(2)], effects) == 2
    assert not inbox.run(unique, message(2), lambda m, session: effects([m], session))
    assert effects.committed(shared_engine) == ["0000", "0001", "0002"]


def test_a_batch_that_fails_leaves_nothing(shared_engine: sa.Engine, unique: str) -> None:
    inbox, effects = Inbox(shared_engine), Effects(unique)

    def fail(messages: list[ReceivedMessage], session: Session) -> None:
        effects(messages, session)
        raise ValueError("after its effect")

    def commit(messages: list[ReceivedMessage], session: Session) -> None:
        effects(messages, session)
        session.commit()

    with pytest.raises(ValueError, match="after its effect"):
        inbox.run_batch(unique, [message(0), message(1)], fail)
    with pytest.raises(InvalidRequest, match="must not commit"):
        inbox.run_batch(unique, [message(0), message(1)], commit)
    assert rows(shared_engine, unique) == 0 and effects.committed(shared_engine) == []


def test_a_message_twice_in_a_batch_is_handled_once(shared_engine: sa.Engine, unique: str) -> None:
    """The same message, or one that was dead beside itself under its new id; other replays are other effects."""
    inbox, effects = Inbox(shared_engine), Effects(unique)
    batch = [message(0), message(0), again(7, of=0), again(8, of=3), message(3), message(0, replay=1)]
    assert inbox.run_batch(unique, batch, effects) == 3
    assert effects.calls == [["0000", "0008", "0000"]]
    assert rows(shared_engine, unique) == 5, "0, 7, 8, 3, and the replay of 0: an audit counts each id's effect"
    assert inbox.run_batch(unique, batch, effects) == 0


def test_an_effect_that_stands_under_either_id_stands(shared_engine: sa.Engine, unique: str) -> None:
    """Also where a row has been purged, or was inserted by a version that knew one id."""
    inbox, effects = Inbox(shared_engine), Effects(unique)
    assert inbox.run_batch(unique, [message(3), message(7)], effects) == 2
    for one in (again(7, of=0), again(8, of=3)):
        assert not inbox.run(unique, one, lambda m, session: effects([m], session))
    assert inbox.run_batch(unique, [again(7, of=1), again(9, of=3)], effects) == 0
    assert effects.committed(shared_engine) == ["0003", "0007"]


def test_two_transactions_with_the_same_messages(shared_engine: sa.Engine, unique: str) -> None:
    """The second waits for the first, and handles what that one has not."""
    inbox, effects = Inbox(shared_engine), Effects(unique)
    has_claimed, may_end = threading.Event(), threading.Event()

    def slow(messages: list[ReceivedMessage], session: Session) -> None:
        effects(messages, session)
        has_claimed.set()
        assert may_end.wait(PATIENCE_SECONDS)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(inbox.run_batch, unique, [message(n) for n in (1, 2, 3)], slow)
        assert has_claimed.wait(PATIENCE_SECONDS)
        second = pool.submit(inbox.run_batch, unique, [message(n) for n in (4, 3, 2, 0)], effects)
        assert not second.done()
        may_end.set()
        assert (first.result(PATIENCE_SECONDS), second.result(PATIENCE_SECONDS)) == (3, 2)
    assert effects.calls == [["0001", "0002", "0003"], ["0004", "0000"]]
    assert effects.committed(shared_engine) == [f"{n:04}" for n in range(5)]


@pytest.mark.parametrize("kind", ["mariadb", "mysql"])
def test_a_claim_that_is_seen_and_not_committed_is_no_effect(
    kind: str, database_urls: Mapping[str, str], tmp_path: Path, unique: str
) -> None:
    """At READ UNCOMMITTED a consumer sees the claim of another one, whose handler then fails."""
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = sa.create_engine(url, isolation_level="READ UNCOMMITTED")
        create_tables(engine)
        Base.metadata.create_all(engine)
        inbox, effects = Inbox(engine), Effects(unique)
        has_claimed, may_fail = threading.Event(), threading.Event()

        def fail(messages: list[ReceivedMessage], session: Session) -> None:
            has_claimed.set()
            assert may_fail.wait(PATIENCE_SECONDS)
            raise ValueError("after the other one has looked")

        @sa.event.listens_for(engine, "after_cursor_execute")
        def looked(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            if has_claimed.is_set() and statement.startswith("SELECT") and "notify_inbox" in statement:
                may_fail.set()

        assert inbox.run_batch(unique, [message(0)], effects) == 1
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(inbox.run_batch, unique, [message(1)], fail)
            assert has_claimed.wait(PATIENCE_SECONDS)
            assert inbox.run_batch(unique, [message(0), message(1)], effects) == 1
            with pytest.raises(ValueError, match="has looked"):
                first.result(PATIENCE_SECONDS)
        assert effects.committed(engine) == ["0000", "0001"]
        engine.dispose()
