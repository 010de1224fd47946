"""A PostgreSQL server on this machine as a child process, which a test may kill and start again."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from notify.testing.guardian import register
from notify.testing.ports import free_port
from notify.testing.reachable import NotAvailable, wait_for


class PostgreSqlServer:
    """A PostgreSQL server in a directory."""

    def __init__(
        self, directory: Path, *, durable: bool = True, settings: Sequence[str] = (), programs: Path | None = None
    ) -> None:
        """Raises NotAvailable if PostgreSQL is not installed.

        Without `durable` the server does not sync: its data survives kill -9, but not a loss of power. `settings`:
        further settings, as `name=value`. `programs`: the directory of another version's.
        """
        self._programs = programs or self.programs()
        self._settings = [word for setting in settings for word in ("-c", setting)]
        self._unsynced = [] if durable else ["-c", "fsync=off", "-c", "full_page_writes=off"]
        self.directory = directory
        self.port = free_port()
        # PostgreSQL refuses to run as root, so root runs it as Debian's user. None: the user of this process.
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user is not None:
            shutil.chown(directory, self._user)
        self.process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def programs() -> Path:
        """The directory with the programs of the newest installed version. Raises NotAvailable."""
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        if not programs:
            raise NotAvailable("no PostgreSQL: neither NOTIFY_TEST_POSTGRESQL, nor Docker, nor Debian's postgresql")
        return programs[-1].parent

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database `postgres`."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def create(self) -> PostgreSqlServer:
        """Make the data directory and start the server."""
        subprocess.run(
            [
                self._programs / "initdb", "-D", self.directory / "data", "-A", "trust", "-U", "postgres", "-E", "UTF8",
                "--locale=C", *(["--no-sync"] if self._unsynced else []),
            ],
            check=True, cwd=self.directory, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
            user=self._user, group=self._user,
        )  # fmt: skip
        self.start()
        return self

    def follow(self, primary: PostgreSqlServer) -> PostgreSqlServer:
        """Copy the data of another server, and start as its standby."""
        subprocess.run(
            [
                self._programs / "pg_basebackup", "-D", self.directory / "data", "-h", "127.0.0.1",
                "-p", str(primary.port), "-U", "postgres", "-c", "fast", "-R",
                *(["--no-sync"] if self._unsynced else []),
            ],
            check=True, cwd=self.directory, stdout=subprocess.DEVNULL, user=self._user, group=self._user,
        )  # fmt: skip
        self.start()
        return self

    def start(self) -> None:
        """Start on the same data and port, and wait until the server accepts connections."""
        self.process = subprocess.Popen(
            [
                self._programs / "postgres", "-D", self.directory / "data", "-p", str(self.port), "-k", self.directory,
                "-h", "127.0.0.1", "-c", "max_connections=300", *self._unsynced, *self._settings,
            ],
            cwd=self.directory, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, user=self._user, group=self._user,
        )  # fmt: skip
        register(self.process.pid)
        with ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            wait_for(self.url)
            unless_ready.pop_all()

    def kill(self) -> None:
        """Kill the whole server, as if its machine had crashed, and wait until its child processes have ended."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        # The child processes end by themselves. A new server cannot start before.
        deadline = time.monotonic() + 60
        pid = self.directory / "data" / "postmaster.pid"
        while time.monotonic() < deadline and self._children():
            time.sleep(0.1)  # the pause between two polls
        pid.unlink(missing_ok=True)

    def _children(self) -> bool:
        """Whether a process of this server still runs (Linux)."""
        data = str(self.directory / "data")
        for cwd in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if os.readlink(cwd) == data:
                    return True
            except OSError:
                continue
        return False

    def stop(self) -> None:
        """Stop the server if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(2)
            self.process.wait(60)
