"""Real database servers for tests: named by a URL in the environment, or in a container, or started on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

from notify.testing.mariadb_server import MariaDbServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.postgresql_server import PostgreSqlServer


def _docker_answers() -> bool:
    """Whether a container can be started: `testcontainers` is installed and Docker answers."""
    if find_spec("testcontainers") is None or shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def _started_here(
    kind: type[PostgreSqlServer] | type[MariaDbServer] | type[MySqlServer], durable: bool
) -> Iterator[str]:
    """Start a server on this machine, in a directory that is removed at the end. Yields its URL.

    Raises NotAvailable.
    """
    directory = Path(tempfile.mkdtemp(prefix="notify-db-"))
    try:
        server = kind(directory, durable=durable).create()
        try:
            yield server.url
        finally:
            server.kill()  # its data is removed
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def postgresql(*, durable: bool = True) -> Iterator[str]:
    """The SQLAlchemy URL of a PostgreSQL server. Raises NotAvailable if no server can be found or started.

    Without `durable`, a server that is started here does not sync: it is faster, and sufficient for tests.
    """
    configured_url = os.environ.get("NOTIFY_TEST_POSTGRESQL")
    if configured_url:
        yield configured_url
        return
    if _docker_answers():
        from testcontainers.postgres import PostgresContainer

        with PostgresContainer("postgres:15", driver="psycopg") as container:
            yield container.get_connection_url()
        return
    with _started_here(PostgreSqlServer, durable) as url:
        yield url


@contextmanager
def mariadb(*, durable: bool = True) -> Iterator[str]:
    """The SQLAlchemy URL of a MariaDB server with a binlog that a bridge can read. Otherwise like `postgresql`."""
    configured_url = os.environ.get("NOTIFY_TEST_MARIADB")
    if configured_url:
        yield configured_url
        return
    if _docker_answers():
        from testcontainers.mysql import MySqlContainer

        options = "--log-bin=bin --server-id=1 --binlog-format=ROW --binlog-row-metadata=FULL --gtid-strict-mode=ON"
        container = MySqlContainer("mariadb:10.11", dialect="pymysql").with_command(options)
        with container:
            yield container.get_connection_url()
        return
    with _started_here(MariaDbServer, durable) as url:
        yield url


@contextmanager
def mysql(*, durable: bool = True) -> Iterator[str]:
    """The SQLAlchemy URL of a MySQL server with a binlog that a bridge can read. Otherwise like `postgresql`.

    Where no MySQL is installed, its programs are unpacked from Debian's packages into the virtual environment: 50 MB
    are fetched once.
    """
    configured_url = os.environ.get("NOTIFY_TEST_MYSQL")
    if configured_url:
        yield configured_url
        return
    if _docker_answers():
        from testcontainers.mysql import MySqlContainer

        options = "--log-bin=bin --server-id=1 --binlog-row-metadata=FULL --gtid-mode=ON --enforce-gtid-consistency=ON"
        options += " --local-infile=ON"
        with MySqlContainer("mysql:8.4", dialect="pymysql", username="root").with_command(options) as container:
            yield container.get_connection_url()
        return
    with _started_here(MySqlServer, durable) as url:
        yield url


BINLOG_SERVERS: Mapping[str, type[MariaDbServer] | type[MySqlServer]] = {"mariadb": MariaDbServer, "mysql": MySqlServer}
"""The servers that have a binlog for bridges, by kind: to be started here, killed, and made replicas."""

SERVERS: Mapping[str, Callable[..., AbstractContextManager[str]]] = {
    "postgresql": postgresql,
    "mariadb": mariadb,
    "mysql": mysql,
}
"""The functions above by the kind of server."""
