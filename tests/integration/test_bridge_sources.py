"""Sources of a bridge whose settings are rare: TLS, names in lower case, databases that the binlog leaves out, tables
that were altered."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine.url import URL

from notify.binlog_bridge.binlog import source
from notify.binlog_bridge.binlog.reader import BinlogReader
from notify.binlog_bridge.binlog.source import findings
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Unfit, Unreadable
from notify.client import create_tables
from notify.client.tables.definitions import half_message
from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.testing.binlog_server import BinlogServer
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.process import ServerProcess
from notify.testing.statements import execute
from tests.support.authority import Authority
from tests.support.bridges import SEES_BINLOG, binlog_reader, move, numbers, outbox, write_as_statement
from tests.support.databases import own_mariadb, own_mysql
from tests.support.groups import subscribe
from tests.support.wal import insert


@pytest.fixture(scope="module")
def authority() -> Iterator[Authority]:
    directory = Path(tempfile.mkdtemp(prefix="notify-authority-"))
    try:
        yield Authority(directory, "ours")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module", params=["mariadb", "mysql"])
def odd_source(request: pytest.FixtureRequest, authority: Authority) -> Iterator[BinlogServer]:
    """A server with TLS that keeps names in lower case, and leaves the database `unlogged` out of its binlog."""
    certificate = authority.issue("127.0.0.1")
    options = [
        f"--ssl-ca={authority.file}", f"--ssl-cert={certificate}", f"--ssl-key={certificate}",
        "--lower-case-table-names=1", "--binlog-ignore-db=unlogged",
    ]  # fmt: skip
    own = own_mariadb(options) if request.param == "mariadb" else own_mysql(options)
    with own as server:
        yield server


@pytest.fixture
def url(odd_source: BinlogServer, unique: str) -> Iterator[URL]:
    """An empty database of its own."""
    odd_source.execute(f"CREATE DATABASE {unique} CHARACTER SET utf8mb4")
    yield sa.make_url(odd_source.url).set(database=unique)
    odd_source.execute(f"DROP DATABASE {unique}")


def text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


@pytest.mark.long
def test_a_database_whose_name_the_source_folds_is_read(url: URL, server: ServerProcess, unique: str) -> None:
    """The binlog says `shop` where the address says `Shop`: every row was skipped silently."""
    subscribe(server.url, unique, unique)
    outbox(text(url), unique, range(2))
    assert move(text(url.set(database=unique.upper())), server).totals.stored == 2
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
def test_a_statement_that_names_a_table_in_capitals_stops_it(url: URL, server: ServerProcess, unique: str) -> None:
    """The source takes HALF_MESSAGE for half_message, and writes the statement to its binlog as it came."""
    outbox(text(url), unique, range(2))
    move(text(url), server)
    write_as_statement(url, "UPDATE HALF_MESSAGE SET tag = 'x'")
    with pytest.raises(Unreadable, match="STATEMENT format"):
        move(text(url), server)


@pytest.mark.long
def test_a_table_that_is_swapped_is_read_on_and_one_behind_a_view_stops_it(
    url: URL, server: ServerProcess, unique: str
) -> None:
    """Services write to the view as before; the binlog has the other table's name."""
    address = text(url)
    subscribe(server.url, unique, unique)
    outbox(address, unique, range(3))
    move(address, server)
    execute(
        address,
        "CREATE TABLE _half_message_gho LIKE half_message",
        "ALTER TABLE _half_message_gho ADD more INT FIRST",
        "RENAME TABLE half_message TO _half_message_del, _half_message_gho TO half_message",
    )
    outbox(address, unique, range(4, 7))
    assert move(address, server).totals.rows == 3
    execute(address, "RENAME TABLE half_message TO new_rows", "CREATE VIEW half_message AS SELECT * FROM new_rows")
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        insert(connection, unique, 8)
    engine.dispose()
    execute(address, "DROP VIEW half_message", "RENAME TABLE new_rows TO half_message")
    for _ in range(2):
        with pytest.raises(Unreadable, match=r"a view was put in the place of .*half_message.*--backfill"):
            move(address, server)
    move(address, server, fill=True)
    assert numbers(server, unique, 7) == [0, 1, 2, 4, 5, 6, 8]


@pytest.mark.long
def test_a_database_that_the_binlog_leaves_out_is_refused(odd_source: BinlogServer, server: ServerProcess) -> None:
    """Nothing of it would ever be sent, and nobody would be told."""
    odd_source.execute("CREATE DATABASE unlogged")
    url = sa.make_url(odd_source.url).set(database="unlogged")
    engine = sa.create_engine(url)
    create_tables(engine)
    engine.dispose()
    with pytest.raises(InvalidRequest, match="binlog_ignore_db leaves database unlogged out"):
        move(text(url), server)


@pytest.mark.long
def test_a_user_who_may_not_see_the_filters_is_told_and_bridged(
    odd_source: BinlogServer, url: URL, server: ServerProcess, unique: str
) -> None:
    outbox(text(url), unique, range(2))
    with binlog_reader(odd_source, text(url), "few", {"*": "SELECT, INSERT, UPDATE, DELETE"}) as few:
        assert move(few, server).totals.stored == 2  # the first file of a MySQL is named by the same right
        outbox(text(url), unique, range(4, 6))
        odd_source.execute(f"REVOKE {SEES_BINLOG[type(odd_source)]} ON *.* FROM few@'127.0.0.1'")
        engine = sa.create_engine(few)
        with engine.connect() as connection:
            found = findings(connection, 4711)
        engine.dispose()
        assert any("may not see whether binlog_do_db" in f.what and not f.stops for f in found)
        assert move(few, server).totals.stored == 2


@pytest.mark.long
def test_the_binlog_is_read_with_the_tls_of_the_address(
    odd_source: BinlogServer, authority: Authority, url: URL, server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    """The address's certificate served the queries alone: a user who needs one was refused the binlog for ever, and
    the binlog came from whoever answered."""
    subscribe(server.url, unique, unique)
    outbox(text(url), unique, range(2))
    mine = str(authority.issue("bridge"))
    ours = {"ssl_ca": str(authority.file), "ssl_cert": mine, "ssl_key": mine}
    with binlog_reader(odd_source, text(url), "certified", {"*": "SELECT, INSERT, UPDATE, DELETE"}) as certified:
        odd_source.execute("ALTER USER certified@'127.0.0.1' REQUIRE X509")
        assert move(text(sa.make_url(certified).update_query_dict(ours)), server).totals.stored == 2
        assert numbers(server, unique, 2) == [0, 1]
        foreign = ours | {"ssl_ca": str(Authority(tmp_path, "foreign").file)}
        reader = BinlogReader(
            sa.make_url(certified).update_query_dict(foreign), 4711, None, mariadb=isinstance(odd_source, MariaDbServer)
        )
        with pytest.raises(Unfit, match=r"correct the options ssl_.* certificate verify failed"):
            reader.connect()
        reader.close()


@pytest.mark.long
def test_a_word_of_ours_may_have_any_character_set_that_has_ascii(url: URL) -> None:
    """The default of a database, in older tables: states and names are ASCII."""
    engine = sa.create_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        for column in ("state VARCHAR(16)", "topic VARCHAR(255)"):
            connection.exec_driver_sql(f"ALTER TABLE half_message MODIFY {column} CHARACTER SET latin1 NOT NULL")
        assert [finding for finding in findings(connection, 7) if "character set" in finding.what] == []
        connection.exec_driver_sql("ALTER TABLE half_message MODIFY state VARCHAR(16) CHARACTER SET utf16 NOT NULL")
        assert [finding for finding in findings(connection, 7) if "character set utf16" in finding.what]
    engine.dispose()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["INT UNSIGNED", "TINYINT(1)", "BIGINT"])
def test_the_mark_of_a_row_may_be_any_whole_number(url: URL, server: ServerProcess, unique: str, kind: str) -> None:
    """As other tools make the column. Every row was taken for one that was sent, and skipped silently."""
    subscribe(server.url, unique, unique)
    engine = sa.create_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE half_message MODIFY relayed {kind} NOT NULL")
    outbox(text(url), unique, range(2))
    with engine.begin() as connection:
        sent = connection.exec_driver_sql("SELECT * FROM half_message").mappings().first()
        connection.execute(half_message.insert().values({**(sent or {}), "transaction_id": "sent", "relayed": 1}))
    engine.dispose()
    assert move(text(url), server).totals.rows == 2
    assert numbers(server, unique, 2) == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("change", ["state ENUM('COMMITTED') NOT NULL", "`key` INT", "relayed VARCHAR(3) NOT NULL"])
def test_a_column_of_another_type_stops_it(url: URL, server: ServerProcess, unique: str, change: str) -> None:
    """A key of four bytes was read as a text, and rows with such a mark or state were skipped."""
    engine = sa.create_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE half_message MODIFY {change}")
        connection.exec_driver_sql(
            "INSERT INTO half_message (transaction_id, message_no, producer_group, mode, state, shards, topic, body, "
            f"relayed, created_at) VALUES ('{ids.to_text(ids.new_id())}', 0, 'g', 'outbox', 'COMMITTED', '', "
            f"'{unique}', '', 0, UTC_TIMESTAMP(6))"
        )
    engine.dispose()
    with pytest.raises(Unreadable, match=rf"half_message\.{change.split()[0].strip('`')} .* another type"):
        move(text(url), server)


@pytest.mark.long
@pytest.mark.parametrize("odd_source", ["mariadb"], indirect=True)
def test_times_as_mariadb_5_3_wrote_them_are_refused(odd_source: BinlogServer, url: URL) -> None:
    """The bridge ended at the first row, and called it damaged."""
    engine = sa.create_engine(url)
    odd_source.execute("SET GLOBAL mysql56_temporal_format = OFF")
    try:
        create_tables(engine)
    finally:
        odd_source.execute("SET GLOBAL mysql56_temporal_format = ON")
    with engine.connect() as connection:
        assert [f for f in findings(connection, 7) if "half_message.created_at is written as MariaDB 5.3" in f.what]
        connection.exec_driver_sql("ALTER TABLE half_message FORCE")
        assert [f for f in findings(connection, 7) if "MariaDB 5.3" in f.what] == []
    engine.dispose()


def test_a_key_in_another_character_set_is_refused(url: URL) -> None:
    """Keys came out as other keys, or ended the bridge."""
    _refuses(url, "MODIFY `key` VARCHAR(255) CHARACTER SET cp1251", r"half_message\.key has the character set cp1251")


@pytest.mark.parametrize("odd_source", ["mariadb"], indirect=True)
def test_a_table_that_keeps_its_history_is_refused(odd_source: BinlogServer, url: URL) -> None:
    """Each mark on a row inserted the unsent one once more."""
    _refuses(url, "ADD SYSTEM VERSIONING", "keeps the history of its rows")


@pytest.mark.long
@pytest.mark.parametrize("left_out", ["ignore_db", "do_db", "ignore_table", "wild_do_table"])
def test_a_replica_that_leaves_our_rows_out_is_refused(
    odd_source: BinlogServer, url: URL, unique: str, left_out: str
) -> None:
    """It has the GTIDs of what its filter leaves out, so that a bridge would pass them, and miss the rows."""
    whose = {"ignore_db": unique, "do_db": "others", "ignore_table": f"{unique}.half_message", "wild_do_table": "o.%%"}
    name, value = f"replicate_{left_out}", whose[left_out]
    if isinstance(odd_source, MariaDbServer):
        begin, end = "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_USER = 'x'", "RESET SLAVE ALL"
        set_to = f"SET GLOBAL {name} = '{{}}'"
    else:
        begin, end = "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_USER = 'x'", "RESET REPLICA ALL"
        set_to = f"CHANGE REPLICATION FILTER {name} = ({{}})"
    quoted = f"'{value}'" if "wild" in name and not isinstance(odd_source, MariaDbServer) else value
    odd_source.execute(begin, set_to.format(quoted))
    try:
        _refuses(url, "COMMENT 'as it was'", r"this is a replica, and .* leaves out .*half_message \(Replicate_.*")
        odd_source.execute(set_to.format(""))
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            assert not [finding for finding in findings(connection, 7) if "leaves out" in finding.what]
        engine.dispose()
    finally:
        odd_source.execute(set_to.format(""), end)


def test_a_server_that_cannot_name_columns_is_refused(url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MySQL 5.7 or MariaDB 10.4 has no such setting, which the error of its first row asked for."""
    of_this_server = source.variables

    def variables(connection: sa.Connection) -> dict[str, str]:
        found = of_this_server(connection)
        del found["binlog_row_metadata"]
        return found

    monkeypatch.setattr(source, "variables", variables)
    _refuses(url, "COMMENT 'as it was'", "cannot name the columns of rows.*MySQL 8.0 or MariaDB 10.5")


def _refuses(url: URL, change: str, what: str) -> None:
    engine = sa.create_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE half_message {change}")
    engine.dispose()
    with pytest.raises(InvalidRequest, match=what):
        asyncio.run(asyncio.wait_for(Bridge([text(url)], "http://127.0.0.1:9").run(once=True), 60))
