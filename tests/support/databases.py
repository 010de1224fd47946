"""Real database servers for tests: from a DSN in the environment, else in a container, else started here.

When pytest runs several workers, its controller starts one server of each kind for all of them (`ForWorkers`), and each
test gets an empty database of its own (`empty_database`).
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import sqlalchemy as sa

from notify.testing.ports import free_port
from tests.support.clock import eventually

DATABASES = ("sqlite", "postgresql", "mariadb")
"""The kinds of databases that tests of the SDK run on."""


class NotAvailable(Exception):
    """A database cannot run here; tests that need it are skipped with this reason."""


def _docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def wait_for(url: str, seconds: float = 120) -> None:
    """Wait until a connection to the database works. Raises the last failure."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    deadline = time.monotonic() + seconds
    while True:
        try:
            with engine.connect():
                return
        except sa.exc.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # the pause between two tries to connect


def _wait_for_file(path: Path, seconds: float = 120) -> None:
    """Wait for the socket's file, because PyMySQL leaks its socket when a connect fails."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise NotAvailable(f"the database server did not make {path}")
        time.sleep(0.05)  # the pause between two polls


@contextmanager
def postgresql(*, durable: bool = True) -> Iterator[str]:
    """A SQLAlchemy URL of a PostgreSQL server. A benchmark measures a `durable` one; tests need none."""
    given = os.environ.get("NOTIFY_TEST_POSTGRESQL")
    if given:
        yield given
        return
    if _docker_answers():
        from testcontainers.postgres import PostgresContainer

        with PostgresContainer("postgres:15", driver="psycopg") as container:
            yield container.get_connection_url()
        return
    directory = Path(tempfile.mkdtemp(prefix="notify-pg-"))
    try:
        server = PostgreSqlServer(directory, durable=durable).create()
        try:
            yield server.url
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class PostgreSqlServer:
    """A PostgreSQL server in a directory; it may be killed and started again."""

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        """Raises NotAvailable where PostgreSQL is not installed.

        Without `durable` nothing is synced: it survives kill -9, and would not survive a loss of power.
        """
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        if not programs:
            raise NotAvailable("no PostgreSQL: neither NOTIFY_TEST_POSTGRESQL, nor Docker, nor Debian's postgresql")
        self._programs = programs[-1].parent
        self._unsynced = [] if durable else ["-c", "fsync=off", "-c", "full_page_writes=off"]
        self.directory = directory
        self.port = free_port()
        # PostgreSQL refuses to run as root.
        root = os.getuid() == 0
        user = "postgres" if root else pwd.getpwuid(os.getuid()).pw_name
        if root:
            shutil.chown(directory, user)
        self._drop = {"user": user, "group": user} if root else {}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def create(self) -> PostgreSqlServer:
        """Make the data directory and start."""
        subprocess.run(
            [
                self._programs / "initdb", "-D", self.directory / "data", "-A", "trust", "-U", "postgres", "-E", "UTF8",
                "--locale=C", *(["--no-sync"] if self._unsynced else []),
            ],
            check=True, cwd=self.directory, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, **self._drop,
        )  # fmt: skip
        self.start()
        return self

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                self._programs / "postgres", "-D", self.directory / "data", "-p", str(self.port), "-k", self.directory,
                "-h", "127.0.0.1", "-c", "max_connections=300", *self._unsynced,
            ],
            cwd=self.directory, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, **self._drop,
        )  # fmt: skip
        wait_for(self.url)

    def kill(self) -> None:
        """Kill the whole server as a crash of its machine does, and wait for its children to end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        # Its children end by themselves; until then a new one is refused.
        deadline = time.monotonic() + 60
        pid = self.directory / "data" / "postmaster.pid"
        while time.monotonic() < deadline and self._children():
            time.sleep(0.1)  # the pause between two polls
        pid.unlink(missing_ok=True)

    def _children(self) -> bool:
        """Whether a process of this server still runs (Linux)."""
        data = str(self.directory / "data")
        for place in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if os.readlink(place) == data:
                    return True
            except OSError:
                continue
        return False

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(2)
            self.process.wait(60)


class MariaDbServer:
    """A MariaDB server in a directory, with a binlog for bridges; it may be killed, restarted, and made a replica."""

    USER = "shop"

    def __init__(
        self, directory: Path, server_id: int = 1, options: Sequence[str] = (), *, durable: bool = True
    ) -> None:
        """Raises NotAvailable where MariaDB is not installed.

        Without `durable` nothing is synced: it survives kill -9, and would not survive a loss of power.
        """
        program = shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")
        install = shutil.which("mariadb-install-db")
        if program is None or install is None:
            raise NotAvailable("no MariaDB: neither NOTIFY_TEST_MARIADB, nor Docker, nor Debian's mariadb-server")
        self._program, self._install = program, install
        self._user = pwd.getpwuid(os.getuid()).pw_name
        self.directory = directory
        self.server_id = server_id
        self._unsynced = [] if durable else ["--innodb-flush-method=nosync"]
        self._options = [f"--sync-binlog={int(durable)}", *self._unsynced, *options]
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mysql+pymysql://{self.USER}:shop@127.0.0.1:{self.port}/shop"

    @property
    def _socket(self) -> Path:
        return self.directory / "s.sock"

    def create(self) -> MariaDbServer:
        """Make the data directory, start, and make the database and its user."""
        made = subprocess.run(
            [
                self._install, "--no-defaults", f"--datadir={self.directory}/data", f"--user={self._user}",
                "--skip-test-db", "--auth-root-authentication-method=normal", *self._unsynced,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert made.returncode == 0, f"{self._install} ended with {made.returncode}: {made.stdout[-3000:]}"
        self.start()
        self.execute(
            "SET sql_log_bin = 0",  # replicas make their own
            "CREATE DATABASE shop CHARACTER SET utf8mb4",
            f"CREATE USER {self.USER}@'127.0.0.1' IDENTIFIED BY 'shop'",
            f"GRANT ALL ON *.* TO {self.USER}@'127.0.0.1'",
        )
        return self

    def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                self._program, "--no-defaults", f"--user={self._user}", f"--datadir={self.directory}/data",
                "--bind-address=127.0.0.1", f"--port={self.port}", f"--socket={self._socket}",
                f"--pid-file={self.directory}/pid", "--log-bin=bin", f"--server-id={self.server_id}",
                "--binlog-format=ROW", "--binlog-row-metadata=FULL", "--gtid-strict-mode=ON",
                "--log-slave-updates=ON", "--max-connections=500", *self._options,
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _wait_for_file(self._socket)
        wait_for(f"mysql+pymysql://root@localhost/mysql?unix_socket={self._socket}")

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """Run statements as root on one connection, and return the rows of the last one."""
        engine = sa.create_engine(
            f"mysql+pymysql://root@localhost/mysql?unix_socket={self._socket}", isolation_level="AUTOCOMMIT"
        )
        rows: list[tuple[object, ...]] = []
        with engine.connect() as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement)
                rows = [tuple(row) for row in result] if result.returns_rows else []
        engine.dispose()
        return rows

    def follow(self, primary: MariaDbServer) -> None:
        """Become a replica of another server, by GTID."""
        self.execute(
            "SET GLOBAL read_only = ON",
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port}, MASTER_USER='{self.USER}', "
            "MASTER_PASSWORD='shop', MASTER_USE_GTID=current_pos, MASTER_CONNECT_RETRY=1",
            "START SLAVE",
        )

    def wait_until_it_has(self, gtids: str, seconds: float = 60) -> None:
        """Raises TimeoutError if this replica does not get there."""
        if self.execute(f"SELECT MASTER_GTID_WAIT('{gtids}', {seconds})")[0][0] != 0:
            raise TimeoutError(f"the replica does not reach {gtids}")

    def promote(self) -> None:
        """Stop being a replica, take writes."""
        self.execute("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = OFF")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@contextmanager
def mariadb(*, durable: bool = True) -> Iterator[str]:
    """A SQLAlchemy URL of a MariaDB server, with a binlog that can be bridged; `durable` as with PostgreSQL."""
    given = os.environ.get("NOTIFY_TEST_MARIADB")
    if given:
        yield given
        return
    if _docker_answers():
        from testcontainers.mysql import MySqlContainer

        options = "--log-bin=bin --server-id=1 --binlog-format=ROW --binlog-row-metadata=FULL --gtid-strict-mode=ON"
        container = MySqlContainer("mariadb:10.11", dialect="pymysql").with_command(options)
        with container:
            yield container.get_connection_url()
        return
    directory = Path(tempfile.mkdtemp(prefix="notify-my-"))
    try:
        server = MariaDbServer(directory, durable=durable).create()
        try:
            yield server.url
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


SERVERS: Mapping[str, Callable[..., AbstractContextManager[str]]] = {"postgresql": postgresql, "mariadb": mariadb}


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
        self._threads = [threading.Thread(target=self._serve, args=(kind,)) for kind in SERVERS]
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
    """What `ForWorkers` wrote, as a worker reads it. Raises NotAvailable for a kind that cannot run here."""

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
    """The URL of a database that is dropped afterwards; SQLite's file lies in `directory`.

    Raises NotAvailable where its server cannot run here.
    """
    if kind == "sqlite":
        yield f"sqlite:///{directory}/shop.db"
        return
    url = sa.make_url(urls[kind])
    name = "t" + uuid.uuid4().hex[:12]
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name}" + (" WITH (FORCE)" if kind == "postgresql" else ""))
