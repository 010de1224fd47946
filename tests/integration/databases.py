"""Real database servers for tests: a DSN from the environment, else a container, else a local server of our own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa


class NotAvailable(Exception):
    """Why a database cannot run here; the tests that need it are skipped with this reason."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def wait_for(url: str, seconds: float = 60) -> None:
    """Until a connection to the database works. Raises the last failure."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    deadline = time.monotonic() + seconds
    while True:
        try:
            with engine.connect():
                return
        except sa.exc.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _wait_for_file(path: Path, seconds: float = 60) -> None:
    """PyMySQL leaks its socket when a connect fails: first see that there is something to connect to."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise NotAvailable(f"the database server did not make {path}")
        time.sleep(0.05)


@contextmanager
def postgresql() -> Iterator[str]:
    """A SQLAlchemy URL of a PostgreSQL server."""
    given = os.environ.get("NOTIFY_TEST_POSTGRESQL")
    if given:
        yield given
        return
    if _docker_answers():
        from testcontainers.postgres import PostgresContainer

        with PostgresContainer("postgres:15", driver="psycopg") as container:
            yield container.get_connection_url()
        return
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        raise NotAvailable("no PostgreSQL: neither NOTIFY_TEST_POSTGRESQL, nor Docker, nor Debian's postgresql")
    programs = found[-1].parent
    directory = Path(tempfile.mkdtemp(prefix="notify-pg-"))
    user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    if os.getuid() == 0:
        shutil.chown(directory, user)
    drop = {"user": user, "group": user} if os.getuid() == 0 else {}
    data = directory / "data"
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        subprocess.run(
            [programs / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C"],
            check=True, cwd=directory, **quiet, **drop,
        )  # fmt: skip
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(port), "-k", directory, "-h", "127.0.0.1"],
            cwd=directory, **quiet, **drop,
        )  # fmt: skip
        try:
            url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
            wait_for(url)
            yield url
        finally:
            server.send_signal(2)
            server.wait(30)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def mariadb() -> Iterator[str]:
    """A SQLAlchemy URL of a MariaDB server, binlog on."""
    given = os.environ.get("NOTIFY_TEST_MARIADB")
    if given:
        yield given
        return
    if _docker_answers():
        from testcontainers.mysql import MySqlContainer

        with MySqlContainer("mariadb:10.11", dialect="pymysql") as container:
            yield container.get_connection_url()
        return
    program = shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")
    install = shutil.which("mariadb-install-db")
    if program is None or install is None:
        raise NotAvailable("no MariaDB: neither NOTIFY_TEST_MARIADB, nor Docker, nor Debian's mariadb-server")
    directory = Path(tempfile.mkdtemp(prefix="notify-my-"))
    user = pwd.getpwuid(os.getuid()).pw_name
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        subprocess.run(
            [
                install, "--no-defaults", f"--datadir={directory}/data", f"--user={user}", "--skip-test-db",
                "--auth-root-authentication-method=normal",
            ],
            check=True, **quiet,
        )  # fmt: skip
        server = subprocess.Popen(
            [
                program, "--no-defaults", f"--user={user}", f"--datadir={directory}/data", "--bind-address=127.0.0.1",
                f"--port={port}", f"--socket={directory}/s.sock", f"--pid-file={directory}/pid", "--log-bin=bin",
                "--server-id=1", "--binlog-format=ROW", "--max-connections=500", "--binlog-row-metadata=FULL",
                "--gtid-strict-mode=ON", "--sync-binlog=1",
            ],
            **quiet,
        )  # fmt: skip
        try:
            socket_url = f"mysql+pymysql://root@localhost/mysql?unix_socket={directory}/s.sock"
            _wait_for_file(directory / "s.sock")
            wait_for(socket_url)
            engine = sa.create_engine(socket_url)
            with engine.begin() as connection:
                connection.exec_driver_sql("CREATE DATABASE shop CHARACTER SET utf8mb4")
                connection.exec_driver_sql("CREATE USER shop@'127.0.0.1' IDENTIFIED BY 'shop'")
                connection.exec_driver_sql("GRANT ALL ON *.* TO shop@'127.0.0.1'")
            engine.dispose()
            yield f"mysql+pymysql://shop:shop@127.0.0.1:{port}/shop"
        finally:
            server.terminate()
            server.wait(30)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
