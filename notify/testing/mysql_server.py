"""A MySQL server on this machine as a child process, which a test may kill, start again, and make a replica."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_programs import MySqlPrograms, mysql_programs

_INITIAL = "--lower-case-table-names"
"""An option that is set when the data directory is made, and never again."""


class MySqlServer(BinlogServer):
    """A MySQL server in a directory, with a binlog for bridges and GTIDs."""

    def __init__(
        self,
        directory: Path,
        server_id: int = 1,
        options: Sequence[str] = (),
        *,
        durable: bool = True,
        programs: MySqlPrograms | None = None,
    ) -> None:
        """Raises NotAvailable with the reason if no MySQL can be had here.

        Without `durable` the server does not sync: its data survives kill -9, but not a loss of power. `programs`: of
        another folder.
        """
        self._programs = programs or mysql_programs()
        # Group commits do not wait for the disk: the kernel has everything that a killed server wrote.
        synced = [] if durable else ["--innodb-flush-method=nosync", "--innodb-flush-log-at-trx-commit=2"]
        super().__init__(directory, server_id, [f"--sync-binlog={int(durable)}", *synced, *options])

    @property
    def _program(self) -> list[str]:
        return [
            *self._programs.mysqld, "--gtid-mode=ON", "--enforce-gtid-consistency=ON", "--mysqlx=0",
            "--secure-file-priv=", "--local-infile=ON", "--innodb-redo-log-capacity=64M",
        ]  # fmt: skip

    def _make_data(self) -> None:
        data = self.directory / "data"
        initial = [option for option in self._options if option.startswith(_INITIAL)]
        if self._programs.data is not None and not initial:
            shutil.copytree(self._programs.data, data)
            return
        made = subprocess.run(
            [*self._programs.mysqld, "--initialize-insecure", f"--user={self._account}", f"--datadir={data}", *initial],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"mysqld --initialize-insecure ended with {made.returncode}: {made.stdout[-3000:]}")

    @property
    def gtids(self) -> str:
        return str(self.execute("SELECT @@gtid_executed")[0][0]).replace("\n", "")

    def forget_binlogs(self) -> None:
        self.execute("RESET BINARY LOGS AND GTIDS")

    def restore_variables(self) -> None:
        self.execute(
            "SET GLOBAL binlog_format = 'ROW', GLOBAL binlog_row_image = 'FULL', GLOBAL binlog_row_metadata = 'FULL', "
            "GLOBAL binlog_transaction_compression = OFF, GLOBAL binlog_row_value_options = ''"
        )

    def follow(self, primary: Self, port: int = 0) -> None:
        self.execute(
            "SET GLOBAL super_read_only = ON",
            f"CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1', SOURCE_PORT={port or primary.port}, "
            f"SOURCE_USER='{self.USER}', SOURCE_PASSWORD='shop', SOURCE_AUTO_POSITION=1, SOURCE_CONNECT_RETRY=1, "
            "SOURCE_RETRY_COUNT=0, "  # for ever: by default it gives up after 10 tries, and a start may take longer
            "GET_SOURCE_PUBLIC_KEY=1",
            "START REPLICA",
        )

    def wait_until_it_has(self, gtids: str, seconds: float = 60) -> None:
        had = None
        while self.execute(f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{gtids}', {seconds})")[0][0] != 0:
            has = self.gtids
            if has == had:
                status = self.execute("SHOW REPLICA STATUS")
                raise TimeoutError(f"the replica stays at {has} and does not reach {gtids}: {status}")
            had = has

    def promote(self) -> None:
        self.execute(
            "STOP REPLICA", "RESET REPLICA ALL", "SET GLOBAL super_read_only = OFF", "SET GLOBAL read_only = OFF"
        )
