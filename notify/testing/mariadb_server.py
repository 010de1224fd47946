"""A MariaDB server on this machine as a child process, which a test may kill, start again, and make a replica."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from notify.testing.ports import free_port
from notify.testing.reachable import NotAvailable, wait_for, wait_for_file
from notify.testing.statements import execute


class MariaDbServer:
    """A MariaDB server in a directory, with a binlog for bridges."""

    USER = "shop"

    def __init__(
        self,
        directory: Path,
        server_id: int = 1,
        options: Sequence[str] = (),
        *,
        durable: bool = True,
        home: Path | None = None,
    ) -> None:
        """`home`: the directory of a MariaDB to use instead of the installed one. Raises NotAvailable if there is none.

        Without `durable` the server does not sync: its data survives kill -9, but not a loss of power.
        """
        path = None if home is None else f"{home}/bin:{home}/scripts"
        program = shutil.which("mariadbd", path=path) or (None if home else shutil.which("mariadbd", path="/usr/sbin"))
        install = shutil.which("mariadb-install-db", path=path)
        if program is None or install is None:
            raise NotAvailable("no MariaDB: neither NOTIFY_TEST_MARIADB, nor Docker, nor Debian's mariadb-server")
        self._program, self._install = program, install
        self._user = pwd.getpwuid(os.getuid()).pw_name
        self.directory = directory
        self.server_id = server_id
        # A server that starts removes all temporary tables in its tmpdir, so each server needs its own directory.
        self._common = [f"--tmpdir={directory}"] + ([] if durable else ["--innodb-flush-method=nosync"])
        self._common += [] if home is None else [f"--basedir={home}"]
        self._options = [f"--sync-binlog={int(durable)}", *self._common, *options]
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database `shop`, for a user with all rights."""
        return f"mysql+pymysql://{self.USER}:shop@127.0.0.1:{self.port}/shop"

    @property
    def _socket(self) -> Path:
        return self.directory / "s.sock"

    def create(self) -> MariaDbServer:
        """Make the data directory, start the server, and make the database and its user."""
        installed = subprocess.run(
            [
                self._install, "--no-defaults", f"--datadir={self.directory}/data", f"--user={self._user}",
                "--skip-test-db", "--auth-root-authentication-method=normal", *self._common,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if installed.returncode:
            raise RuntimeError(f"{self._install} ended with {installed.returncode}: {installed.stdout[-3000:]}")
        self.start()
        self.execute(
            "SET sql_log_bin = 0",  # each replica makes its own database and user
            "CREATE DATABASE shop CHARACTER SET utf8mb4",
            f"CREATE USER {self.USER}@'127.0.0.1' IDENTIFIED BY 'shop'",
            f"GRANT ALL ON *.* TO {self.USER}@'127.0.0.1'",
        )
        return self

    def start(self) -> None:
        """Start on the same data and port, and wait until the server accepts connections."""
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
        with ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            wait_for_file(self._socket)
            wait_for(self._root_url)
            unless_ready.pop_all()

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """Run statements as root on one connection, and return the rows of the last one."""
        return execute(self._root_url, *statements)

    @property
    def _root_url(self) -> str:
        return f"mysql+pymysql://root@localhost/mysql?unix_socket={self._socket}"

    def forget_binlogs(self) -> None:
        """Begin the binlog anew, with the first GTID."""
        self.execute("RESET MASTER")

    def restore_variables(self) -> None:
        """Set the variables that tests of bridges change back to the values that a bridge needs."""
        self.execute(
            "SET GLOBAL binlog_format = 'ROW', GLOBAL binlog_row_image = 'FULL', GLOBAL binlog_row_metadata = 'FULL', "
            "GLOBAL log_bin_compress = OFF"
        )

    def follow(self, primary: MariaDbServer, port: int = 0) -> None:
        """Become a replica of another server, by GTID. `port`: the port of a proxy in between; 0: there is no proxy."""
        self.execute(
            "SET GLOBAL read_only = ON",
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port or primary.port}, MASTER_USER='{self.USER}', "
            "MASTER_PASSWORD='shop', MASTER_USE_GTID=current_pos, MASTER_CONNECT_RETRY=1",
            "START SLAVE",
        )

    def wait_until_it_has(self, gtids: str, seconds: float = 60) -> None:
        """Wait until this replica has these GTIDs. Raises TimeoutError if it gets none of them for `seconds`: how long
        all of them take depends on how far it is behind, because it writes one transaction after another."""
        had = None
        while self.execute(f"SELECT MASTER_GTID_WAIT('{gtids}', {seconds})")[0][0] != 0:
            has = self.execute("SELECT @@gtid_slave_pos")[0][0]
            if has == had:
                status = self.execute("SHOW SLAVE STATUS")
                raise TimeoutError(f"the replica stays at {has} and does not reach {gtids}: {status}")
            had = has

    def promote(self) -> None:
        """Stop being a replica, and accept writes."""
        self.execute("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = OFF")

    def kill(self) -> None:
        """Kill the server with SIGKILL, as if it had crashed."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        """Stop the server if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
