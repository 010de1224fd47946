"""A MySQL or MariaDB server as a child process, which a test may kill, start again, and make a replica."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from notify.testing.guardian import register
from notify.testing.ports import free_port
from notify.testing.reachable import wait_for, wait_for_file
from notify.testing.statements import execute


class BinlogServer(ABC):
    """A server in a directory, with a binlog for bridges. The subclasses have what differs between the two."""

    USER = "shop"

    def __init__(self, directory: Path, server_id: int, options: Sequence[str]) -> None:
        """`options` come last on the server's command line, so that they win."""
        self.directory = directory
        self.server_id = server_id
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._options = options

    # --- what the servers do differently ----------------------------------------------------------------------

    @property
    @abstractmethod
    def _program(self) -> list[str]:
        """The server's program and its own options."""

    @abstractmethod
    def _make_data(self) -> None:
        """Make the data directory. Raises RuntimeError with what the server says."""

    @property
    @abstractmethod
    def gtids(self) -> str:
        """The GTIDs of what is in the binlog."""

    @abstractmethod
    def forget_binlogs(self) -> None:
        """Empty the binlog; the next transaction has the first GTID."""

    @abstractmethod
    def restore_variables(self) -> None:
        """Reset the variables that tests of bridges change to the values that a bridge needs."""

    @abstractmethod
    def follow(self, primary: Self, port: int = 0) -> None:
        """Become a replica of another server, by GTID. `port`: the port of a proxy in between; 0: there is no proxy."""

    @abstractmethod
    def wait_until_it_has(self, gtids: str, seconds: float = 60) -> None:
        """Wait until this replica has these GTIDs. Raises TimeoutError if it gets none of them for `seconds`: how long
        all of them take depends on how far it is behind, because it writes one transaction after another."""

    @abstractmethod
    def promote(self) -> None:
        """Stop being a replica, and accept writes."""

    # --- what they do alike -----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database `shop`, for a user with all rights."""
        return f"mysql+pymysql://{self.USER}:shop@127.0.0.1:{self.port}/shop"

    @property
    def _socket(self) -> Path:
        return self.directory / "s.sock"

    @property
    def _root_url(self) -> str:
        return f"mysql+pymysql://root@localhost/mysql?unix_socket={self._socket}"

    @property
    def _account(self) -> str:
        """The account of this process, which the server runs as."""
        return pwd.getpwuid(os.getuid()).pw_name

    def create(self) -> Self:
        """Make the data directory, start the server, and make the database and its user."""
        self._make_data()
        self.start()
        self.execute(
            "SET sql_log_bin = 0",  # each replica makes its own database and user
            "CREATE DATABASE shop CHARACTER SET utf8mb4",
            f"CREATE USER {self.USER}@'127.0.0.1' IDENTIFIED BY 'shop'",
            f"GRANT ALL ON *.* TO {self.USER}@'127.0.0.1' WITH GRANT OPTION",
        )
        return self

    def start(self) -> None:
        """Start on the same data and port, and wait until the server accepts connections."""
        self._socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                *self._program, f"--user={self._account}", f"--datadir={self.directory}/data",
                f"--tmpdir={self.directory}", "--bind-address=127.0.0.1", f"--port={self.port}",
                f"--socket={self._socket}", f"--pid-file={self.directory}/pid", "--log-bin=bin",
                f"--server-id={self.server_id}", "--binlog-row-metadata=FULL", "--max-connections=500",
                *self._options,
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )  # fmt: skip
        register(self.process.pid)
        with ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            wait_for_file(self._socket)
            wait_for(self._root_url)
            unless_ready.pop_all()

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """Run statements as root on one connection, and return the rows of the last one."""
        return execute(self._root_url, *statements)

    def kill(self) -> None:
        """Kill the server with SIGKILL, as if it had crashed."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def freeze(self) -> None:
        """Freeze the server: its connections stay open, and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server continue."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop the server if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.thaw()  # a frozen server would not notice
            self.process.wait(60)
