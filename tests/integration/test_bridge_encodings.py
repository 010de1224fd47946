"""Sessions of others and odd tables of ours, in a real binlog: each message is read once, and nothing stops.

The batches are looked at as they would be sent; where it matters that they arrive, a queue takes them.
"""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa

from notify.binlog_bridge.batching import PART_BYTES
from notify.binlog_bridge.binlog import source
from notify.binlog_bridge.binlog.events import PAYLOAD
from notify.binlog_bridge.binlog.reader import Assembly
from notify.binlog_bridge.errors import Unreadable
from notify.protocol import ids
from notify.protocol.wire import PackedBridgeBatch, PackedMessage
from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.process import ServerProcess
from notify.testing.statements import execute
from tests.support.bridges import move, numbers
from tests.support.groups import subscribe
from tests.support.record_binlog import TYPES, columns_of_every_type, decide, insert, make_tables, packets_of


@pytest.fixture
def kind(binlog_server: BinlogServer) -> str:
    return "mysql" if isinstance(binlog_server, MySqlServer) else "mariadb"


@pytest.fixture
def url(binlog_url: str, kind: str) -> str:
    """A database with Notify's tables, `orders`, and `types` with a column of every type."""
    make_tables(binlog_url, kind)
    return binlog_url


def batches_of(url: str, kind: str) -> list[PackedBridgeBatch]:
    """The batches that a bridge would send of the whole binlog."""
    is_mariadb = kind == "mariadb"
    packets = packets_of(url, mariadb=is_mariadb)
    assembly = Assembly(sa.make_url(url).database or "", None, mariadb=is_mariadb)
    return [batch for batch, _ in assembly.batches([*packets, None])]


def messages_of(url: str, kind: str) -> list[PackedMessage]:
    return [m for batch in batches_of(url, kind) for t in batch.transactions for m in t.messages]


def numbers_of(url: str, kind: str) -> list[int]:
    return [json.loads(m.body)["n"] for m in messages_of(url, kind)]


def only_on(kind: str, wanted: str) -> None:
    if kind != wanted:
        pytest.skip(f"only {wanted} has this")


COMPRESS = {
    "mysql": "SET SESSION binlog_transaction_compression = ON",
    "mariadb": "SET GLOBAL log_bin_compress = ON, log_bin_compress_min_len = 10",
}


@pytest.mark.long
def test_compressed_transactions_are_read(
    url: str, kind: str, binlog_server: BinlogServer, server: ServerProcess, unique: str
) -> None:
    """The setting of the whole source no longer keeps a bridge from starting, and positions continue behind a
    payload."""
    subscribe(server.url, unique, unique)

    def of(n: int) -> str:
        return insert(n, topic=unique, transaction_id=ids.to_text(ids.new_id()))

    execute(url, of(1))
    binlog_server.execute(
        "SET GLOBAL log_bin_compress = ON" if kind == "mariadb" else "SET GLOBAL binlog_transaction_compression = ON"
    )
    execute(url, COMPRESS[kind], of(2), of(3), "INSERT INTO orders (n) VALUES (1)")
    bridge = move(url, server)
    execute(url, COMPRESS[kind], of(4))
    assert (bridge.totals.rows, move(url, server).totals.rows) == (3, 1)
    assert numbers(server, unique, 4) == [1, 2, 3, 4]


@pytest.mark.long
def test_a_compressed_transaction_larger_than_a_request_goes_in_parts(url: str, kind: str) -> None:
    count, long = 60, "x" * (PART_BYTES // 8)
    rows = [insert(n, body=json.dumps({"n": n, "long": long})) for n in range(count)]
    execute(url, COMPRESS[kind], "BEGIN", *rows, "COMMIT")
    assert count * len(long) > 27 << 20
    if kind == "mysql":
        packed = [p for p in packets_of(url, mariadb=False) if p[5] == PAYLOAD]
        assert len(packed) == 1 and len(packed[0]) < 1 << 20
    *parts, last = batches_of(url, kind)
    assert len(parts) > 5 and all(part.prepare and not part.position for part in parts)
    assert all(sum(len(m.body) for t in part.transactions for m in t.messages) < 2 * PART_BYTES for part in parts)
    assert last.commit == [t.id for part in parts for t in part.transactions]
    assert len(last.commit) + len(last.transactions) == count


@pytest.mark.long
@pytest.mark.parametrize("image", ["MINIMAL", "NOBLOB"])
def test_a_session_may_log_less_of_other_tables_and_of_what_is_no_message(url: str, kind: str, image: str) -> None:
    execute(
        url,
        f"SET SESSION binlog_row_image = '{image}'",
        "INSERT INTO orders (n, document) VALUES (1, '{}')",
        "UPDATE orders SET big = 'x'",
        insert(1),
        insert(2, key="k", headers='{"a": "b"}'),
        "UPDATE half_message SET relayed = 1",
        insert(3, "server_half_message", state="PREPARED"),
        "UPDATE server_half_message SET attempts = 1",
        decide(3, "ROLLED_BACK"),
        insert(4, "server_half_message"),
        "DELETE FROM orders",
    )
    messages = messages_of(url, kind)
    assert [json.loads(m.body)["n"] for m in messages] == [1, 2, 4]
    assert (messages[1].key, messages[1].headers) == ("k", {"a": "b"})


@pytest.mark.long
def test_a_message_that_is_not_logged_stops_it_in_one_sentence(url: str, kind: str) -> None:
    execute(url, insert(1, "server_half_message", state="PREPARED"))
    execute(url, "SET SESSION binlog_row_image = 'MINIMAL'", decide(1))
    with pytest.raises(Unreadable, match=r"without .*topic.*: set binlog_row_image = FULL .* --backfill$"):
        batches_of(url, kind)


@pytest.mark.long
def test_a_default_of_a_column_that_a_message_may_lack_is_told(url: str) -> None:
    """The binlog does not say what a column's default was."""

    def told() -> list[str]:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            return [f.what for f in source.findings(connection, 4711) if "DEFAULT" in f.what and not f.stops]

    assert told() == []
    execute(url, "ALTER TABLE half_message ALTER COLUMN tag SET DEFAULT 'x'")
    (what,) = told()
    assert what.startswith("half_message.tag has a DEFAULT")


def test_parts_of_json_values_stop_nothing(url: str, kind: str) -> None:
    only_on(kind, "mysql")
    execute(
        url,
        "ALTER TABLE server_half_message ADD document JSON, ADD other JSON",
        "SET SESSION binlog_row_value_options = 'PARTIAL_JSON'",
        'INSERT INTO orders (n, document) VALUES (1, \'{"a": 1, "b": "a text that is longer than the change"}\')',
        "UPDATE orders SET document = JSON_SET(document, '$.a', 2)",
        insert(1, "server_half_message", state="PREPARED", document='{"a": 1, "b": "a longer text"}'),
        decide(1, document=sa.text("JSON_SET(document, '$.a', 2)")),
    )
    assert numbers_of(url, kind) == [1]


def test_columns_of_every_type_stop_nothing_in_tables_of_ours_either(url: str, kind: str) -> None:
    names = list(TYPES[kind])
    values = {name: sa.text(value) for name, (_, value) in TYPES[kind].items()}
    columns = columns_of_every_type(kind)
    # A table of ours has as many columns as it can, some of them before the ones that a bridge reads.
    for table in ("half_message", "server_half_message"):
        added = ", ".join(
            f"ADD {each}{' FIRST' if n % 3 == 0 and n < len(names) else ''}" for n, each in enumerate(columns)
        )
        execute(url, f"ALTER TABLE {table} {added}")
    execute(
        url,
        f"INSERT INTO types (id, {', '.join(names)}) VALUES (1, {', '.join(v for _, v in TYPES[kind].values())})",
        insert(1, **values),
        insert(2),
        insert(3, "server_half_message", state="PREPARED", **values),
        decide(3, c_int=5),
    )
    assert numbers_of(url, kind) == [1, 2, 3]


def test_a_compressed_column_that_a_message_has_is_refused_by_name(url: str, kind: str) -> None:
    only_on(kind, "mariadb")
    execute(url, "ALTER TABLE half_message MODIFY body MEDIUMBLOB COMPRESSED", insert(1))
    with pytest.raises(Unreadable, match=r"half_message\.body has another type .*compressed"):
        batches_of(url, kind)


@pytest.mark.parametrize(
    ("column", "letters"),
    [("key", "latin1"), ("key", "gbk"), ("headers", "cp1251"), ("topic", "utf16"), ("tag", "ucs2")],
)
def test_a_text_that_was_logged_in_another_character_set_stops_it(
    url: str, kind: str, column: str, letters: str
) -> None:
    """Its bytes may be UTF-8 for other letters, whatever the column has now (PeerDB-io/peerdb#4436)."""
    execute(
        url,
        f"ALTER TABLE half_message MODIFY `{column}` VARCHAR(100) CHARACTER SET {letters}",
        insert(1),
        f"ALTER TABLE half_message MODIFY `{column}` VARCHAR(100) CHARACTER SET utf8mb4",
        insert(2),
    )
    what = rf"half_message\.{column} was logged in a character set.*CONVERT TO CHARACTER SET utf8mb4.*--backfill"
    with pytest.raises(Unreadable, match=what):
        batches_of(url, kind)


@pytest.mark.long
def test_texts_in_each_encoding_that_is_utf8_are_read(url: str, kind: str) -> None:
    """Those of other columns do not matter, in front of ours and behind them, nor do words in a set that has ASCII."""
    types = [f"{name} {type_}" for name, (type_, _) in TYPES[kind].items() if "COMPRESSED" not in type_]
    added = ", ".join(f"ADD {each}{' FIRST' if n % 2 else ''}" for n, each in enumerate(types))
    execute(url, f"ALTER TABLE half_message {added}, MODIFY tag VARCHAR(90) CHARACTER SET latin1")
    name = "collation_name" if kind == "mysql" else "full_collation_name"
    collations = execute(
        url,
        f"SELECT {name} FROM information_schema.collation_character_set_applicability "
        "WHERE character_set_name IN ('ascii', 'utf8mb3', 'utf8mb4')",
    )
    assert len(collations) > 100
    for n, (collation,) in enumerate(collations):
        letters = "ascii" if str(collation).startswith("ascii") else "é"
        execute(
            url,
            "DELETE FROM half_message",
            f"ALTER TABLE half_message MODIFY `key` VARCHAR(90) COLLATE {collation}",
            insert(n, key=letters),
        )
    found = messages_of(url, kind)
    assert [json.loads(message.body)["n"] for message in found] == [*range(len(collations))]
    assert {message.key for message in found} == {"ascii", "é"}


def test_rows_that_mariadb_keeps_of_changed_rows_are_no_messages(url: str, kind: str) -> None:
    """Each mark of a relay, and each purge, inserts the old row again: a target that knows no ids would publish it."""
    only_on(kind, "mariadb")
    execute(
        url,
        insert(1),
        "ALTER TABLE half_message ADD SYSTEM VERSIONING",
        "UPDATE half_message SET relayed = 1",
        "ALTER TABLE half_message DROP SYSTEM VERSIONING",
    )
    with pytest.raises(Unreadable, match=r"SYSTEM VERSIONING.*DROP SYSTEM VERSIONING.*--backfill"):
        batches_of(url, kind)


def test_partitions_of_a_table_of_ours_are_read(url: str, kind: str) -> None:
    """MySQL then writes the partition in front of the rows."""
    execute(url, "ALTER TABLE half_message PARTITION BY KEY (transaction_id) PARTITIONS 4")
    execute(url, *(insert(n) for n in range(6)))
    assert numbers_of(url, kind) == [*range(6)]


@pytest.mark.long
def test_rows_of_triggers_and_cascades_arrive_once(url: str, kind: str, server: ServerProcess, unique: str) -> None:
    """No server runs triggers for what a foreign key cascades; MySQL 9.6 and later log the rows that it deletes."""
    subscribe(server.url, unique, unique)
    of_this_test = ids.to_text(ids.new_id())[:24]
    row = insert(
        0,
        topic=unique,
        transaction_id=sa.text(f"CONCAT('{of_this_test}', LPAD(OLD.n, 12, '0'))"),
        body=sa.text("CONCAT('{\"n\": ', OLD.n, '}')"),
    )
    execute(
        url,
        "CREATE TABLE parent (id INT PRIMARY KEY)",
        "CREATE TABLE child (n INT PRIMARY KEY, parent INT, "
        "FOREIGN KEY (parent) REFERENCES parent (id) ON DELETE CASCADE ON UPDATE CASCADE)",
        "CREATE TRIGGER told AFTER DELETE ON child FOR EACH ROW " + row,
        "INSERT INTO parent VALUES (1), (2)",
        "INSERT INTO child VALUES (1, 1), (2, 1), (3, 2), (4, 2)",
        "DELETE FROM child WHERE n IN (3, 4)",
        "DELETE FROM parent WHERE id = 1",
    )
    deleted = [p for p in packets_of(url, mariadb=kind == "mariadb") if p[5] in (25, 32)]
    assert len(deleted) == (4 if kind == "mysql" else 3)
    assert move(url, server).totals.rows == 2
    assert sorted(numbers(server, unique, 2)) == [3, 4]
