"""A running MySQL 8 server whose binlog tests may reset."""

from __future__ import annotations

from notify.testing.statements import execute


class MySqlServer:
    """A MySQL server, given by the URL of a user with all rights. This class neither starts nor stops the server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """Run statements on one connection, and return the rows of the last one."""
        return execute(self.url, *statements)

    def forget_binlogs(self) -> None:
        """Begin the binlog anew, with the first GTID."""
        version = str(self.execute("SELECT VERSION()")[0][0])
        is_new = tuple(int(part) for part in version.split(".")[:2]) >= (8, 2)
        self.execute("RESET BINARY LOGS AND GTIDS" if is_new else "RESET MASTER")

    def restore_variables(self) -> None:
        """Set the variables that tests of bridges change back to the values that a bridge needs."""
        self.execute(
            "SET GLOBAL binlog_format = 'ROW', GLOBAL binlog_row_image = 'FULL', GLOBAL binlog_row_metadata = 'FULL', "
            "GLOBAL binlog_transaction_compression = OFF"
        )
