"""A MariaDB server on this machine as a child process, which a test may kill, start again, and make a replica."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from notify.testing.binlog_server import BinlogServer
from notify.testing.reachable import NotAvailable


class MariaDbServer(BinlogServer):
    """A MariaDB server in a directory, with a binlog for bridges."""

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
        self._mariadbd, self._install = program, install
        self._common = [] if durable else ["--innodb-flush-method=nosync"]
        self._common += [] if home is None else [f"--basedir={home}"]
        super().__init__(directory, server_id, [f"--sync-binlog={int(durable)}", *options])

    @property
    def _program(self) -> list[str]:
        return [
            self._mariadbd, "--no-defaults", "--binlog-format=ROW", "--gtid-strict-mode=ON", "--log-slave-updates=ON",
            *self._common,
        ]  # fmt: skip

    def _make_data(self) -> None:
        installed = subprocess.run(
            [
                self._install, "--no-defaults", f"--datadir={self.directory}/data", f"--user={self._account}",
                # A server that starts removes all temporary tables in its tmpdir, so each needs its own directory.
                f"--tmpdir={self.directory}", "--skip-test-db", "--auth-root-authentication-method=normal",
                *self._common,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if installed.returncode:
            raise RuntimeError(f"{self._install} ended with {installed.returncode}: {installed.stdout[-3000:]}")

    @property
    def gtids(self) -> str:
        return str(self.execute("SELECT @@gtid_binlog_pos")[0][0])

    def forget_binlogs(self) -> None:
        self.execute("RESET MASTER")

    def restore_variables(self) -> None:
        self.execute(
            "SET GLOBAL binlog_format = 'ROW', GLOBAL binlog_row_image = 'FULL', GLOBAL binlog_row_metadata = 'FULL', "
            "GLOBAL log_bin_compress = OFF"
        )

    def follow(self, primary: Self, port: int = 0) -> None:
        self.execute(
            "SET GLOBAL read_only = ON",
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port or primary.port}, MASTER_USER='{self.USER}', "
            "MASTER_PASSWORD='shop', MASTER_USE_GTID=current_pos, MASTER_CONNECT_RETRY=1",
            "START SLAVE",
        )

    def wait_until_it_has(self, gtids: str, seconds: float = 60) -> None:
        had = None
        while self.execute(f"SELECT MASTER_GTID_WAIT('{gtids}', {seconds})")[0][0] != 0:
            has = self.execute("SELECT @@gtid_slave_pos")[0][0]
            if has == had:
                status = self.execute("SHOW SLAVE STATUS")
                raise TimeoutError(f"the replica stays at {has} and does not reach {gtids}: {status}")
            had = has

    def promote(self) -> None:
        self.execute("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = OFF")
