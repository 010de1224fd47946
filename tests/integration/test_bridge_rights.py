"""The rights of a bridge's user: rights by their scope, through roles and PUBLIC, and revoked in part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL

from notify.binlog_bridge.binlog import rights
from notify.binlog_bridge.binlog.source import findings
from notify.binlog_bridge.errors import Unfit
from notify.movers import refused
from notify.storage.sql.checkup import Finding
from notify.storage.sql.engines import LOCK_SECONDS, opened
from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.process import ServerProcess
from tests.support.bridges import binlog_reader, move, move_until, outbox, poison
from tests.support.groups import subscribe

FEW = "'few'@'127.0.0.1'"


@pytest.fixture
def url(binlog_url: str, unique: str) -> URL:
    """A source with two messages."""
    outbox(binlog_url, unique, range(2))
    return sa.make_url(binlog_url)


@pytest.fixture
def few(url: URL, binlog_server: BinlogServer) -> Iterator[URL]:
    """A user of the source with every right to its database, and none to the binlog."""
    binlog_server.execute(f"CREATE USER {FEW} IDENTIFIED BY 'few'", f"GRANT ALL ON {url.database}.* TO {FEW}")
    yield url.set(username="few", password="few")
    binlog_server.execute(f"DROP USER {FEW}", "DROP ROLE IF EXISTS reader, outer_reader")


def found(url: URL, words: str = "may not read the binlog") -> list[Finding]:
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            return [finding for finding in findings(connection, 4711) if words in str(finding)]
    finally:
        engine.dispose()


def text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def is_mysql(server: BinlogServer) -> bool:
    return isinstance(server, MySqlServer)


@pytest.mark.long
def test_rights_of_one_database_are_not_those_of_the_server(few: URL, binlog_server: BinlogServer) -> None:
    """ALL PRIVILEGES of one database passed, since the word was looked for and not its scope."""
    (finding,) = found(few)
    assert finding.stops and finding.remedy == f"GRANT REPLICATION SLAVE ON *.* TO {FEW}"
    binlog_server.execute(finding.remedy)
    assert found(few) == []


@pytest.mark.long
@pytest.mark.parametrize("right", ["REPLICATION SLAVE", "ALL", "REPLICATION REPLICA"])
def test_any_spelling_of_the_right_is_known(few: URL, binlog_server: BinlogServer, right: str) -> None:
    if right == "REPLICATION REPLICA" and is_mysql(binlog_server):
        pytest.skip("MySQL has no such word")
    binlog_server.execute(f"GRANT {right} ON *.* TO {FEW}")
    assert found(few) == []


@pytest.mark.long
@pytest.mark.parametrize("right", ["REPLICATION CLIENT", "REPLICATION SLAVE ADMIN", "BINLOG MONITOR", "SUPER"])
def test_rights_with_similar_names_are_not_it(few: URL, binlog_server: BinlogServer, right: str) -> None:
    """REPLICATION SLAVE ADMIN has the words of REPLICATION SLAVE, and lets nobody read a binlog."""
    if is_mysql(binlog_server) and right in ("REPLICATION SLAVE ADMIN", "BINLOG MONITOR"):
        right = "REPLICATION_SLAVE_ADMIN"
    binlog_server.execute(f"GRANT {right} ON *.* TO {FEW}")
    assert [finding.stops for finding in found(few)] == [True]


def test_a_role_counts_once_it_is_active(few: URL, binlog_server: BinlogServer) -> None:
    """Also one that has the right from another role. MySQL lists no rights of roles without USING."""
    binlog_server.execute(
        "CREATE ROLE reader", "CREATE ROLE outer_reader", "GRANT REPLICATION SLAVE ON *.* TO reader",
        "GRANT reader TO outer_reader", f"GRANT outer_reader TO {FEW}",
    )  # fmt: skip
    (finding,) = found(few)
    assert "without its role `outer_reader`" in finding.what and "SET DEFAULT ROLE `outer_reader`" in finding.remedy
    binlog_server.execute(finding.remedy)
    assert found(few) == []


def test_the_urls_init_command_holds_for_each_session(
    few: URL, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """It may take the role that has the right. The connection that reads the binlog, and a server's, did without it."""
    rights = "REPLICATION SLAVE, REPLICATION CLIENT"
    binlog_server.execute("CREATE ROLE reader", f"GRANT {rights} ON *.* TO reader", f"GRANT reader TO {FEW}")
    url = few.update_query_dict({"init_command": "SET ROLE reader"})
    assert move(text(url), server).totals.rows == 2
    with opened(text(url)) as engine, engine.connect() as connection:
        row = connection.exec_driver_sql("SELECT CURRENT_ROLE(), @@SESSION.innodb_lock_wait_timeout").one()
        assert "reader" in row[0] and row[1] == LOCK_SECONDS


@pytest.mark.long
def test_roles_that_everyone_has_count(few: URL, binlog_server: BinlogServer) -> None:
    """mandatory_roles of MySQL that are activated at the login, and PUBLIC of MariaDB."""
    if is_mysql(binlog_server):
        binlog_server.execute(
            "CREATE ROLE reader", "GRANT REPLICATION SLAVE ON *.* TO reader", "SET GLOBAL mandatory_roles = 'reader'",
            "SET GLOBAL activate_all_roles_on_login = ON",
        )  # fmt: skip
    else:
        binlog_server.execute("GRANT REPLICATION SLAVE ON *.* TO PUBLIC")
    try:
        assert found(few) == []
    finally:
        if is_mysql(binlog_server):
            binlog_server.execute("SET GLOBAL mandatory_roles = ''", "SET GLOBAL activate_all_roles_on_login = OFF")
        else:
            binlog_server.execute("REVOKE REPLICATION SLAVE ON *.* FROM PUBLIC")


def test_a_right_that_is_revoked_for_one_database_is_missed(few: URL, binlog_server: BinlogServer) -> None:
    """MySQL lists the right to all databases, and the exception in a line of its own (partial_revokes)."""
    binlog_server.execute(f"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {FEW}")
    binlog_server.execute(f"REVOKE ALL ON {few.database}.* FROM {FEW}")
    if is_mysql(binlog_server):
        binlog_server.execute(
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON *.* TO {FEW}", "SET GLOBAL partial_revokes = ON",
            f"REVOKE UPDATE, DELETE ON {few.database}.* FROM {FEW}",
        )  # fmt: skip
        lacking = {"half_message": "UPDATE", "notify_refused": "UPDATE, DELETE"}
    else:
        binlog_server.execute(f"GRANT SELECT, INSERT ON {few.database}.* TO {FEW}")
        lacking = {"half_message": "UPDATE", "notify_refused": "UPDATE, DELETE"}
    try:
        for table, words in lacking.items():
            (finding,) = found(few, f" on {table}: ")
            assert not finding.stops and f"lacks {words} on {table}" in finding.what
            assert finding.remedy == f"GRANT {words} ON {table} TO {FEW}"
    finally:
        if is_mysql(binlog_server):
            binlog_server.execute(f"REVOKE ALL ON *.* FROM {FEW}", "SET GLOBAL partial_revokes = OFF")


def test_a_read_only_server_is_asked_about_rights_too(few: URL, binlog_server: BinlogServer) -> None:
    """It refuses changes before it looks at rights; a bridge writes nothing there."""
    binlog_server.execute(f"GRANT REPLICATION SLAVE ON *.* TO {FEW}", "SET GLOBAL read_only = ON")
    try:
        assert found(few, " lacks ") == []
    finally:
        binlog_server.execute("SET GLOBAL read_only = OFF")


@pytest.mark.long
def test_the_first_file_of_a_mysql_needs_one_more_right(
    few: URL, binlog_server: BinlogServer, server: ServerProcess
) -> None:
    """The bridge met its refusal again and again, and its log did not say which right is missing."""
    binlog_server.execute(f"GRANT REPLICATION SLAVE ON *.* TO {FEW}")
    assert [finding.stops for finding in found(few, "REPLICATION CLIENT" if is_mysql(binlog_server) else "MONITOR")]
    if not is_mysql(binlog_server):
        assert move(text(few), server).totals.stored == 2
        return
    with pytest.raises(Unfit, match=r"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON \*\.\*"):
        move(text(few), server)
    binlog_server.execute(f"GRANT REPLICATION CLIENT ON *.* TO {FEW}")
    assert move(text(few), server).totals.stored == 2


@pytest.mark.long
def test_without_the_right_to_mark_rows_nothing_is_sent_twice(
    few: URL,
    url: URL,
    binlog_server: BinlogServer,
    server: ServerProcess,
    unique: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A user without UPDATE on the outbox sent a retried message, could not mark it, and began again for ever."""
    subscribe(server.url, unique, unique)
    move(text(url), server)
    engine = sa.create_engine(url)
    name = poison(engine)
    move(text(url), server)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE half_message SET topic = '{unique}' WHERE transaction_id = '{name}'")
        refused.retry(connection, [name], "the topic is corrected")
    engine.dispose()
    database = few.database
    binlog_server.execute(
        f"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {FEW}", f"REVOKE ALL ON {database}.* FROM {FEW}",
        f"GRANT SELECT ON {database}.* TO {FEW}", f"GRANT ALL ON {database}.notify_refused TO {FEW}",
    )  # fmt: skip
    move_until(text(few), server, lambda: "refused messages are not tried again" in caplog.text)
    assert "again in" not in caplog.text
    binlog_server.execute(f"GRANT UPDATE ON {database}.half_message TO {FEW}")

    def is_taken() -> bool:
        return not binlog_server.execute(f"SELECT 1 FROM {database}.notify_refused WHERE state = 'RETRY'")

    move_until(text(few), server, is_taken)


@pytest.mark.long
@pytest.mark.parametrize("password", ["p@ss:w/ö%rd", "ключ"])
def test_a_password_may_have_any_letters(
    binlog_url: str, binlog_server: BinlogServer, server: ServerProcess, unique: str, password: str
) -> None:
    """PyMySQL takes a text for Latin-1: the server refused the first, and the second was a UnicodeEncodeError."""
    outbox(binlog_url, unique, range(2))
    with binlog_reader(binlog_server, binlog_url, unique, {"*": "ALL"}) as url:
        binlog_server.execute(f"ALTER USER '{unique}'@'127.0.0.1' IDENTIFIED BY '{password.replace('%', '%%')}'")
        named = sa.make_url(url).set(password=password).render_as_string(hide_password=False)
        assert move(named, server).totals.rows == 2


@pytest.mark.parametrize("code", [1040, 1053, 1203, 1226, 2003, 2006, 2013, 3032])
def test_errors_that_pass_are_not_refusals(code: int) -> None:
    """Too many connections, a server that stops or is offline, a connection that breaks: a bridge tries again."""
    assert rights.denied_by(code, "for now") is None
