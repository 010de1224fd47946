"""Fixtures of several folders, and the distribution of tests among workers."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
import structlog

from notify.client import create_tables
from notify.client.producer.options import ProducerPlan
from notify.client.tables.definitions import half_message
from notify.storage.sql import writer
from notify.testing import forked
from notify.testing.binlog_server import BinlogServer
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from tests.history.processes import Actor, by_fork
from tests.support import databases, virtual_loop, workers
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import (
    MARIADB_11,
    MOST,
    POSTGRESQL_18,
    drop_slots,
    empty_binlog,
    empty_database,
    mariadb11_home,
    own_mariadb,
    own_mysql,
    postgresql18_programs,
)
from tests.support.kafka import KafkaNode
from tests.support.own_server import own_server
from tests.support.queues import Embedded, Queue
from tests.support.shop import Base, Order, Shop, make_engine
from tests.support.wal import setting

if TYPE_CHECKING:
    from notify.testing import InMemoryServer
    from tests.support.django_project.shop import Shop as DjangoShop

# Without bytecode each worker compiles all tests again, and each of hundreds of processes all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# PyMySQL makes a TLS context for each connection, and reading the system's authorities takes 20 ms of CPU each time. No
# test trusts them; those of a test's own are named.
os.environ["SSL_CERT_FILE"] = os.devnull

# A test reads the same output of a program wherever the suite runs: rich breaks lines at COLUMNS, and writes
# colours with FORCE_COLOR, and typer writes them where GITHUB_ACTIONS is set. CI stays: with it pytest cuts nothing.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# A background job of a shell ignores SIGINT, and so would everything that its tests start and end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_the_run(number: int, frame: object) -> None:
    """A run that is told to end (`timeout`, a cancelled job, a closed terminal) ends as by Ctrl-C."""
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, _end_the_run)
if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # it is ignored under nohup
    signal.signal(signal.SIGHUP, _end_the_run)

# Recovery reports every fault that a test plants.
structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

# Some 150 server processes are started, and the imports of each would take a second of CPU.
ServerProcess.launch = staticmethod(forked.launch)
Actor.launch = staticmethod(by_fork)

# On a loaded machine a half may be stored late. A test of a producer that waits in vain says how long it waits.
vars(ProducerPlan)["__init__"].__kwdefaults__["half_timeout"] = PATIENCE_SECONDS

pytest_configure = workers.pytest_configure
pytest_configure_node = workers.pytest_configure_node
pytest_unconfigure = workers.pytest_unconfigure
pytest_collection = workers.pytest_collection
pytest_collection_modifyitems = workers.pytest_collection_modifyitems
pytest_xdist_make_scheduler = workers.pytest_xdist_make_scheduler


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine gets a loop of its own; with the marker `virtual_time` one that never waits."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    run = virtual_loop.run if pyfuncitem.get_closest_marker("virtual_time") else asyncio.run
    run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True


class OrSkip(dict[str, str]):
    """URLs of database servers by kind; a test that needs one that cannot run here is skipped with the reason."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls

    def __missing__(self, kind: str) -> str:
        try:
            return self._urls[kind]
        except NotAvailable as reason:
            pytest.skip(str(reason))


@pytest.fixture(scope="session")
def database_urls(request: pytest.FixtureRequest) -> Iterator[Mapping[str, str]]:
    """URLs of database servers by kind, started on first use."""
    started = workers.databases_of(request.config)
    if started is not None:
        yield OrSkip(databases.UrlsOfWorker(started))
        return
    with ExitStack() as stack:
        yield OrSkip(databases.Urls(stack))


@pytest.fixture(params=MOST)
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine_url(database: str, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of its own."""
    with empty_database(database, database_urls, tmp_path) as url:
        yield url


@pytest.fixture
def patient_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a writer try again until it succeeds after a cut or a deadlock, also on a slow machine."""
    monkeypatch.setattr(writer, "GIVE_UP_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def impatient_writers(patient_writers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a writer give up soon when its database is unreachable."""
    monkeypatch.setattr(writer, "GIVE_UP_SECONDS", 0.5)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what reads a binlog on each kind of server that can be had."""
    if "binlog_server" in metafunc.fixturenames and "/test_bridge" in str(metafunc.definition.path):
        kinds: list[Any] = ["mariadb", "mysql"]
        if metafunc.definition.path.name == "test_bridge_events.py":
            kinds.append(pytest.param(MARIADB_11, marks=pytest.mark.long))
        metafunc.parametrize("binlog_server", kinds, indirect=True)
    if "wal_server" in metafunc.fixturenames and metafunc.definition.path.name == "test_wal_bridge_events.py":
        servers = ["postgresql", pytest.param(POSTGRESQL_18, marks=pytest.mark.long)]
        metafunc.parametrize("wal_server", servers, indirect=True)


@pytest.fixture(scope="session")
def binlog_servers() -> Iterator[Callable[[str], BinlogServer]]:
    """A function from a kind to the worker's server of it: pytest would end one server before it starts another, and
    start it again for the next file."""
    with ExitStack() as stack:

        @cache
        def of(kind: str) -> BinlogServer:
            if kind == "mysql":
                return stack.enter_context(own_mysql())
            return stack.enter_context(own_mariadb(home=mariadb11_home if kind == MARIADB_11 else None))

        yield of


@pytest.fixture(scope="session")
def binlog_server(request: pytest.FixtureRequest, binlog_servers: Callable[[str], BinlogServer]) -> BinlogServer:
    """A separate server for bridges: tests change its variables and purge its binlogs, and no other test writes.

    The parameter says which: this machine's MariaDB, MariaDB 11, or MySQL.
    """
    return binlog_servers(getattr(request, "param", "mariadb"))


@pytest.fixture
def binlog_url(binlog_server: BinlogServer) -> Iterator[str]:
    """An empty database and an empty binlog; the server's variables are restored afterwards."""
    with empty_binlog(binlog_server) as url:
        yield url


@pytest.fixture(scope="session")
def wal_server(request: pytest.FixtureRequest) -> Iterator[PostgreSqlServer]:
    """A separate PostgreSQL for bridges, whose log is decoded logically: tests change its settings. The parameter says
    which: this machine's, or PostgreSQL 18."""
    settings = ("wal_level=logical", "max_replication_slots=40", "max_wal_senders=40", "max_prepared_transactions=10")

    def start(directory: Path) -> PostgreSqlServer:
        programs = postgresql18_programs() if getattr(request, "param", "") == POSTGRESQL_18 else None
        return PostgreSqlServer(directory, durable=False, settings=settings, programs=programs).create()

    with own_server("wal", start) as server, setting(server, "max_slot_wal_keep_size", "2GB"):
        yield server


@pytest.fixture
def wal_url(wal_server: PostgreSqlServer) -> Iterator[str]:
    """An empty database; its slots are dropped afterwards."""
    with empty_database("postgresql", {"postgresql": wal_server.url}, Path()) as url:
        try:
            yield url
        finally:
            drop_slots(url)


@pytest.fixture(scope="session")
def kafka_node() -> Iterator[KafkaNode]:
    """One Kafka node behind a proxy, for tests that do not disturb it; each uses its own topics and sources."""
    pytest.importorskip("confluent_kafka")
    with own_server("kafka", KafkaNode.start) as node:
        yield node


@pytest.fixture(scope="session")
def kafka_url(kafka_node: KafkaNode) -> str:
    """The address of `kafka_node`."""
    return kafka_node.url


@pytest.fixture
def engine(engine_url: str) -> Iterator[sa.Engine]:
    """An engine of an empty database with the SDK's tables."""
    engine = make_engine(engine_url)
    create_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def shop_engine(engine: sa.Engine) -> sa.Engine:
    """`engine` with the shop's orders."""
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture(scope="module", params=MOST)
def shared_engine(
    request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sa.Engine]:
    """As `engine`, with the shop's orders; the tests of a module share it, each with its own groups and rows."""
    with empty_database(request.param, database_urls, tmp_path_factory.mktemp("shared")) as url:
        engine = make_engine(url)
        create_tables(engine)
        Base.metadata.create_all(engine)
        yield engine
        engine.dispose()


@pytest.fixture
def emptied_shop(shared_engine: sa.Engine) -> sa.Engine:
    """`shared_engine` without orders and halves."""
    with shared_engine.begin() as connection:
        connection.execute(sa.delete(Order))
        connection.execute(sa.delete(half_message))
    return shared_engine


@pytest.fixture
def shop(emptied_shop: sa.Engine, memory: InMemoryServer, unique: str) -> Iterator[Shop]:
    """A producer on an emptied database, and a server in memory."""
    made = Shop(emptied_shop, memory, unique)
    yield made
    made.producer.close()


@pytest.fixture(scope="module", params=MOST)
def django_alias(
    request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The alias of a database of Django's with the shop's tables; the tests of a module share it."""
    pytest.importorskip("django", reason="Django is not installed: `make install` has it")
    from tests.support.django_project import shop as shops

    with empty_database(request.param, database_urls, tmp_path_factory.mktemp("django")) as url:
        # A lender keeps what it learns of its alias as long as the process lives: no other module has this one.
        with shops.added(f"shop_{request.param}_{uuid.uuid4().hex[:8]}", shops.database_of(url)) as alias:
            shops.make_tables(alias)
            yield alias


@pytest.fixture
def django_shop(django_alias: str, memory: InMemoryServer, unique: str) -> Iterator[DjangoShop]:
    """A producer on `django_alias`, emptied, and a server in memory."""
    from tests.support.django_project import shop as shops

    shops.empty(django_alias)
    made = shops.Shop(django_alias, memory, unique)
    yield made
    made.producer.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server process for tests that do not disturb it; each uses its own topics and groups."""
    process = ServerProcess(
        tmp_path_factory.mktemp("server"), environment={"NOTIFY_CHECK_BACKOFF_SECONDS": "0.2"}
    ).start()
    yield process
    process.stop()


@pytest.fixture(scope="session", params=["queue server", "Kafka"])
def queue(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    """Where consumers receive: the session's server, or its Kafka node beside a server that shows Kafka's groups."""
    if request.param == "queue server":
        with closing(Embedded(request.getfixturevalue("server").url)) as embedded:
            yield embedded
        return
    kafka_url = request.getfixturevalue("kafka_url")
    from tests.support.kafka_queues import Kafka

    shown = ServerProcess(tmp_path_factory.mktemp("shown"), flags=["--kafka", kafka_url]).start()
    with closing(Kafka(kafka_url, shown.url)) as kafka:
        yield kafka
    shown.stop()


@pytest.fixture(scope="session")
def memory() -> Iterator[InMemoryServer]:
    """A server in memory; tests use topics and groups of their own, and may advance its clock."""
    from notify.testing import InMemoryServer

    with InMemoryServer() as server:
        yield server


@pytest.fixture(scope="session")
def frozen_server() -> Iterator[InMemoryServer]:
    """A server in memory whose clock only `advance` moves; tests use topics and groups of their own."""
    from notify.testing.server import InMemoryServer

    with InMemoryServer() as server:
        server.freeze()
        yield server


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system than `tmp_path`: no file can be linked or renamed from one to the other."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(prefix="notify-disk-", dir=memory) as directory:
        yield Path(directory)


@pytest.fixture
def unique() -> str:
    """A name no other test uses."""
    return "n" + uuid.uuid4().hex[:12]
