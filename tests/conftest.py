"""Fixtures that several folders share: databases, a server, an engine per database."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import structlog

from notify.client import create_tables, use_explicit_begin
from notify.testing.process import ServerProcess
from tests.integration import databases

# Recovery reports every fault that a test plants.
structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

DATABASES = ("sqlite", "postgresql", "mariadb")


WAIT = ("contract", "browser", "integration", "crash")
"""Folders whose tests wait for servers and watch the clock: one after the other, in this order."""


def folder(nodeid: str) -> str:
    return nodeid.split("/")[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: WAIT.index(folder(item.nodeid)) if folder(item.nodeid) in WAIT else -1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two workers (`make test`): one for the tests that wait, one for those that compute, Spark's above all."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByKind(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "waits" if folder(nodeid) in WAIT else "computes"

    return ByKind(config, log)


@pytest.fixture(scope="session")
def database_urls() -> Iterator[dict[str, str]]:
    """URLs of started databases by name, filled on first use."""
    with ExitStack() as stack:

        class Lazy(dict[str, str]):
            def __missing__(self, name: str) -> str:
                try:
                    url = stack.enter_context(getattr(databases, name)())
                except databases.NotAvailable as reason:
                    pytest.skip(str(reason))
                self[name] = url
                return url

        yield Lazy()


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine_url(database: str, database_urls: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of its own."""
    with empty_database(database, database_urls, tmp_path) as url:
        yield url


@pytest.fixture(scope="session")
def binlog_server() -> Iterator[databases.MariaDbServer]:
    """A MariaDB of its own for bridges: its variables are changed, its binlogs purged, and nobody else fills them."""
    directory = Path(tempfile.mkdtemp(prefix="notify-bridge-"))
    try:
        try:
            server = databases.MariaDbServer(directory).create()
        except databases.NotAvailable as reason:
            pytest.skip(str(reason))
        yield server
        server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def binlog_url(binlog_server: databases.MariaDbServer) -> Iterator[str]:
    """An empty database behind an empty binlog; the server's variables are put right again afterwards."""
    name = "d" + uuid.uuid4().hex[:10]
    binlog_server.execute("RESET MASTER", f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    yield sa.make_url(binlog_server.url).set(database=name).render_as_string(hide_password=False)
    binlog_server.execute(
        "SET GLOBAL binlog_format = 'ROW', GLOBAL binlog_row_image = 'FULL', GLOBAL binlog_row_metadata = 'FULL', "
        "GLOBAL log_bin_compress = OFF",
        f"DROP DATABASE {name}",
    )


@contextmanager
def empty_database(database: str, database_urls: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a database that is dropped afterwards."""
    if database == "sqlite":
        yield f"sqlite:///{tmp_path}/shop.db"
        return
    url = sa.make_url(database_urls[database])
    name = "t" + uuid.uuid4().hex[:12]
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield url.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name}" + (" WITH (FORCE)" if database == "postgresql" else ""))
    admin.dispose()


def make_engine(url: str) -> sa.Engine:
    """An engine as a careful service makes it."""
    if url.startswith("sqlite"):
        engine = sa.create_engine(url, connect_args={"timeout": 20})
        use_explicit_begin(engine)
        return engine
    return sa.create_engine(url)


@pytest.fixture
def engine(engine_url: str) -> Iterator[sa.Engine]:
    engine = make_engine(engine_url)
    create_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for tests that do not disturb it; they use topics and groups of their own."""
    process = ServerProcess(
        tmp_path_factory.mktemp("server"), environment={"NOTIFY_CHECK_BACKOFF_SECONDS": "0.2"}
    ).start()
    yield process
    process.stop()


@pytest.fixture
def unique() -> str:
    """A name no other test uses."""
    return "n" + uuid.uuid4().hex[:12]
