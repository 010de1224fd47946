"""One real binlog, read with mysql-replication's decoder and with ours: both see the same messages."""

from __future__ import annotations

import pytest

from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_server import MySqlServer
from tests.support.binlog_difference import compare


# mysql-replication still names the database as PyMySQL did once.
@pytest.mark.filterwarnings("ignore:'db' is deprecated:DeprecationWarning")
@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_both_decoders_read_the_same_messages(binlog_url: str, binlog_server: BinlogServer, count: int) -> None:
    kind = "mysql" if isinstance(binlog_server, MySqlServer) else "mariadb"
    compared = compare(binlog_url, kind, count)
    assert compared.first_difference == "" and compared.messages == count
