"""A connection of the service's pool is given back as it was: by each thing that borrows one, over each driver.

The session's variables, its locks, and what the driver and SQLAlchemy keep of it are compared before and after, also
where the borrower fails. An engine has one connection, so that the next borrower gets the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from notify.check import CheckUnavailable, HalfMessage, Outcome
from notify.check.local import answer
from notify.check.question import read_source
from notify.check.sources import Sources
from notify.client import create_tables, use_explicit_begin
from notify.client.inbox.inbox import check as check_inbox
from notify.client.inbox.rows import Guard, claim, claim_all
from notify.client.tables.definitions import SENDS, half_message, notify_source
from notify.client.tables.half_rows import MODES, HalfRows
from notify.client.tables.old_rows import delete_transactions, instant_before, note_purged, oldest_transactions
from notify.client.tables.schemas import Places
from notify.errors import InvalidRequest
from notify.protocol.message import ReceivedMessage
from notify.protocol.wire import PackedMessage
from notify.runtime.databases import database_now
from tests.support.databases import DATABASES, empty_database
from tests.support.transactions import new_id, when_free

if TYPE_CHECKING:
    from notify.testing import InMemoryServer
    from tests.support.django_project.shop import Shop as DjangoShop

DRIVERS = {
    "sqlite": ("sqlite", ""),
    "aiosqlite": ("sqlite", "aiosqlite"),
    "psycopg": ("postgresql", "psycopg"),
    "psycopg_async": ("postgresql", "psycopg"),
    "psycopg2": ("postgresql", "psycopg2"),
    "asyncpg": ("postgresql", "asyncpg"),
    "pymysql": ("mysql", "pymysql"),
    "mysqldb": ("mysql", "MySQLdb"),
    "aiomysql": ("mysql", "aiomysql"),
    "asyncmy": ("mysql", "asyncmy"),
}
"""SQLAlchemy's name of each driver: the kind of database, and the module without which it is skipped."""
CASES = [
    pytest.param((server, driver, module), id=f"{driver}-{server}")
    for driver, (kind, module) in DRIVERS.items()
    for server in (("mysql", "mariadb") if kind == "mysql" else (kind,))
]

SETTINGS = {
    "sqlite": ("PRAGMA busy_timeout = 7777", "PRAGMA foreign_keys = ON"),
    "postgresql": (
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "SET lock_timeout = '7s'",
        "SET statement_timeout = '33s'",
    ),
    "mysql": (
        "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "SET SESSION innodb_lock_wait_timeout = 7, lock_wait_timeout = 77, wait_timeout = 777",
    ),
}
"""A service's own settings, which it gives each new connection."""


@dataclass(frozen=True)
class Service:
    """A service's engine, of one connection. `run` calls a function with it, as Notify borrows it."""

    engine: Any
    url: str

    @property
    def is_async(self) -> bool:
        return hasattr(self.engine, "sync_engine")

    @property
    def kind(self) -> str:
        return str(self.engine.dialect.name)

    def run(self, *borrowers: Callable[[sa.Connection], Any]) -> list[Any]:
        """The results of functions, each with the pool's connection; an exception is a result, too."""
        if not self.is_async:
            results = []
            for borrow in borrowers:
                try:
                    with self.engine.connect() as connection:
                        results.append(borrow(connection))
                except Exception as error:
                    results.append(error)
            return results

        async def run() -> list[Any]:
            results = []
            try:
                for borrow in borrowers:
                    try:
                        async with self.engine.connect() as connection:
                            results.append(await connection.run_sync(borrow))
                    except Exception as error:
                        results.append(error)
            finally:
                await self.engine.dispose()
            return results

        return asyncio.run(run())


_VOLATILE = {
    *("timestamp", "rand_seed1", "rand_seed2", "pseudo_thread_id", "last_insert_id", "insert_id", "identity"),
    *("error_count", "warning_count", "in_transaction", "last_gtid", "statement_id", "original_commit_timestamp"),
}
"""Variables of MySQL and MariaDB that each statement changes; so do those of GTIDs."""
_PRAGMAS = (
    *("busy_timeout", "foreign_keys", "journal_mode", "synchronous", "locking_mode", "query_only", "cache_size"),
    *("temp_store", "recursive_triggers", "defer_foreign_keys", "read_uncommitted", "secure_delete"),
)
_OF_DRIVERS = ("isolation_level", "autocommit", "autocommit_mode", "get_autocommit", "read_only", "deferrable")


def state_of(connection: sa.Connection) -> dict[str, Any]:
    """All that a service could notice of a pool's connection: variables, locks, and the driver's own settings."""
    pooled = connection.connection
    return state_of_driver(connection.dialect.name, pooled.dbapi_connection, pooled.driver_connection)


def state_of_driver(kind: str, driver: Any, *real: Any) -> dict[str, Any]:
    """`driver` has the DB-API's functions; `real`: what is behind it."""
    cursor = driver.cursor()

    def rows(statement: str) -> list[Any]:
        cursor.execute(statement)
        return list(cursor.fetchall())

    state: dict[str, Any] = {}
    if kind == "sqlite":
        state |= {pragma: rows(f"PRAGMA {pragma}") for pragma in _PRAGMAS}
    elif kind == "postgresql":
        state |= dict(map(tuple, rows("SELECT name, setting FROM pg_settings")))
        locks = "SELECT classid, objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        state |= {"locks": rows(locks), "channels": rows("SELECT pg_listening_channels()")}
    else:
        variables = dict(map(tuple, rows("SHOW SESSION VARIABLES")))
        state |= {
            name: value for name, value in variables.items() if name not in _VOLATILE and not name.startswith("gtid_")
        }
    cursor.close()
    for each in (driver, *real):
        for attribute in _OF_DRIVERS:
            value = getattr(each, attribute, None)
            if attribute == "get_autocommit" and callable(value):
                value = value()
            if not callable(value):
                state[f"{type(each).__name__}.{attribute}"] = str(value)
    driver.rollback()
    return state


@pytest.fixture(scope="module")
def urls(database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A function from a kind of database to the URL of one with Notify's tables."""
    with contextlib.ExitStack() as stack:
        made: dict[str, str] = {}

        def url_of(kind: str) -> str:
            if kind not in made:
                directory: Path = tmp_path_factory.mktemp("borrowed")
                made[kind] = stack.enter_context(empty_database(kind, database_urls, directory))
                engine = sa.create_engine(made[kind], poolclass=sa.NullPool)
                create_tables(engine)
            return made[kind]

        yield url_of


OWN = "own settings"
LEVELS = [
    "",
    f"{OWN}, autocommit of the driver",
    pytest.param(OWN, marks=pytest.mark.long),
    pytest.param("AUTOCOMMIT", marks=pytest.mark.long),
    pytest.param("SERIALIZABLE", marks=pytest.mark.long),
]


@pytest.fixture(params=LEVELS)
def habit(request: pytest.FixtureRequest) -> str:
    """How the service has set up its engine: SQLAlchemy's isolation level, or what it does with each connection."""
    return str(request.param)


@pytest.fixture(params=CASES)
def driver(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kind of database and the driver."""
    kind, driver, module = request.param
    if module:
        pytest.importorskip(module)
    return kind, driver


@pytest.fixture
def service(driver: tuple[str, str], habit: str, urls: Callable[[str], str]) -> Iterator[Service]:
    kind, name = driver
    url = sa.make_url(urls(kind)).set(
        drivername=f"{'mysql' if kind == 'mariadb' else kind}+{name}".removesuffix("+sqlite")
    )
    if name == "mysqldb":
        url = url.update_query_dict({"charset": "utf8mb4"})
    options: dict[str, Any] = {"pool_size": 1, "max_overflow": 0}
    if habit in ("AUTOCOMMIT", "SERIALIZABLE"):
        options["isolation_level"] = habit
    is_async = bool(url.get_dialect().is_async)
    engine: Any = create_async_engine(url, **options) if is_async else sa.create_engine(url, **options)
    _give_habit(engine, SETTINGS["mysql" if kind == "mariadb" else kind] if OWN in habit else [], habit)
    yield Service(engine, urls(kind))
    if not is_async:
        engine.dispose()


def _give_habit(engine: Any, statements: Sequence[str], habit: str) -> None:
    sync_engine = getattr(engine, "sync_engine", engine)
    if sync_engine.dialect.name == "sqlite" and "autocommit" not in habit.lower():
        use_explicit_begin(engine)

    @event.listens_for(sync_engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        cursor.close()
        connection.commit()
        if "autocommit of the driver" in habit:
            sync_engine.dialect.set_isolation_level(connection, "AUTOCOMMIT")


@pytest.fixture
def borrowed_shop(urls: Callable[[str], str], kind: str, memory: InMemoryServer, unique: str) -> Iterator[DjangoShop]:
    """A shop on a database of Django's, whose lender has borrowed nothing yet."""
    pytest.importorskip("django")
    from tests.support.django_project import shop as shops

    with shops.added(f"borrowed_{kind}_{unique}", shops.database_of(urls(kind), CONN_MAX_AGE=None)) as alias:
        made = shops.Shop(alias, memory, unique)
        yield made
        made.producer.close()


@pytest.fixture(params=DATABASES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


ROW = half_message.insert().values(
    message_no=0, producer_group="g", mode="half", state="COMMITTED", shards="main", topic="t", relayed=1,
    created_at=database_now(),
)  # fmt: skip


def half_of(url: str, transaction_id: str = "") -> HalfMessage:
    """A half of the database at a URL."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return HalfMessage(transaction_id or new_id(), "g", "main", read_source(connection)[0], 1, ())


@contextlib.contextmanager
def blocked(url: str, transaction_id: str) -> Iterator[None]:
    """While a transaction holds the row of an id."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.execute(ROW, {"transaction_id": transaction_id})
        yield
        connection.rollback()


def with_row(url: str) -> str:
    """The id of a committed row."""
    transaction_id = new_id()
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(ROW, {"transaction_id": transaction_id})
    return transaction_id


def message(body: bytes = b"x") -> ReceivedMessage:
    return ReceivedMessage(f"{new_id()}.0", "t", 0, 0, body, None, None, {}, 1, "")


def claiming(connection: sa.Connection) -> bool:
    with connection.begin():
        is_new = claim(connection, "g", message())
        with Guard(connection) as guard:
            guard.release()
    return is_new


def failing_handler(connection: sa.Connection) -> None:
    with connection.begin():
        claim_all(connection, "g", [message(), message()])
        with Guard(connection):
            connection.execute(sa.text("SELECT nothing FROM nowhere"))


def sending(connection: sa.Connection) -> None:
    """The rows that a producer inserts into the service's transaction."""
    with connection.begin():
        for mode in MODES:
            place = Places(Sources(), SENDS[mode]).of(connection)
            HalfRows("g", mode).insert(connection, new_id(), "main", [PackedMessage(topic="t", body=b"x")], place)


def purging(connection: sa.Connection) -> int:
    with connection.begin():
        old = oldest_transactions(connection, instant_before(connection, 0.0), 10, waiting=True)
        note_purged(connection, notify_source.c.rows_from, instant_before(connection, 1e9))
        return delete_transactions(connection, [row.id for row in old])


def making(connection: sa.Connection) -> str:
    with connection.begin():
        return create_tables(connection)


def checking_the_inbox(connection: sa.Connection) -> None:
    with connection.begin():
        check_inbox(connection)


def test_a_connection_is_given_back_as_it_was(service: Service) -> None:
    there, absent, locked = (half_of(service.url, name) for name in (with_row(service.url), "", ""))
    elsewhere = replace(absent, source="another database")

    def waiting(connection: sa.Connection) -> Outcome:
        with blocked(service.url, locked.id):
            return answer(connection, locked)

    borrowers: dict[str, Callable[[sa.Connection], Any]] = {
        "a check of a committed row": lambda connection: answer(connection, there),
        "a check without a row": lambda connection: when_free(lambda: answer(connection, absent)),
        "the same check again": lambda connection: when_free(lambda: answer(connection, absent)),
        "a check of another database's half": lambda connection: answer(connection, elsewhere),
        "a check of what is locked": waiting,
        "a claim": claiming,
        "a handler that fails": failing_handler,
        "an inbox's first look": checking_the_inbox,
        "a producer's rows": sending,
        "a purge": purging,
        "create_tables": making,
    }
    steps = [step for borrow in borrowers.values() for step in (borrow, state_of)]
    before, *after = service.run(state_of, *steps)
    results = dict(zip(borrowers, after[::2], strict=True))
    for name, state in zip(borrowers, after[1::2], strict=True):
        changed = {key: (before[key], state[key]) for key in before if state[key] != before[key]}
        assert not changed, f"{name}: {changed}"
    expected = {"a check of a committed row": Outcome.COMMIT, "a check without a row": Outcome.ROLLBACK}
    assert {name: results[name] for name in expected} == expected
    assert results["the same check again"] == Outcome.ROLLBACK
    assert isinstance(results["a check of another database's half"], CheckUnavailable)
    assert isinstance(results["a handler that fails"], sa.exc.DBAPIError | InvalidRequest)
    assert results["create_tables"] == there.source
    assert isinstance(results["a check of what is locked"], CheckUnavailable)
    assert service.run(lambda connection: when_free(lambda: answer(connection, locked))) == [Outcome.ROLLBACK]


@pytest.mark.parametrize("kind", DATABASES, indirect=True)
def test_a_check_works_where_each_transaction_begins_with_a_query(kind: str, urls: Callable[[str], str]) -> None:
    """As where a service names its tenant at the beginning of each transaction: no level can be set after that."""
    engine = sa.create_engine(urls(kind))

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.execute(sa.select(notify_source.c.id))

    absent = half_of(urls(kind))
    with engine.connect() as connection:
        assert when_free(lambda: answer(connection, absent)) is Outcome.ROLLBACK
    engine.dispose()


def test_djangos_connection_is_given_back_as_it_was(borrowed_shop: DjangoShop) -> None:
    from django.db import connections, transaction

    from notify.client.django import DjangoInbox
    from notify.client.django.tables import create_tables as create_for_django
    from notify.client.django.tables import missing_tables

    def failing(given: ReceivedMessage) -> None:
        raise ZeroDivisionError

    def sending() -> None:
        with transaction.atomic(using=borrowed_shop.alias):
            borrowed_shop.send("x")

    def state() -> dict[str, Any]:
        wrapper = connections[borrowed_shop.alias]
        return state_of_driver(wrapper.vendor, wrapper.connection)

    inbox = DjangoInbox(borrowed_shop.alias)
    connections[borrowed_shop.alias].ensure_connection()
    before = state()
    for name, borrow in {
        "the tables that are missing": lambda: missing_tables(borrowed_shop.alias),
        "create_tables": lambda: create_for_django(borrowed_shop.alias),
        "a producer's rows": sending,
        "an inbox": lambda: inbox.run("g", message(), lambda given: None),
        "a handler that fails": lambda: inbox.run("g", message(), failing),
        "the inbox's check": inbox.check,
    }.items():
        with contextlib.suppress(ZeroDivisionError):
            borrow()
        after = state()
        changed = {key: (before[key], after[key]) for key in before if after[key] != before[key]}
        assert not changed, f"{name}: {changed}"
