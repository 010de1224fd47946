"""Records what a real server writes to its binlog, for tests that read it without a server.

    python -m tests.support.record_binlog mysql      (or mariadb)

writes tests/fixtures/binlog/mysql-*.hex: a line for each packet, with the number of its event and the packet in
hexadecimal digits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import sqlalchemy as sa

from notify.binlog_bridge.binlog.events import HEARTBEAT, HEARTBEAT_V2
from notify.binlog_bridge.binlog.stream import BinlogStream
from notify.client import create_tables
from notify.storage.sql.tables import server_half_message
from notify.testing.binlog_server import BinlogServer
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.statements import execute
from tests.support.databases import own_mariadb, own_mysql

FOLDER = Path(__file__).parents[1] / "fixtures" / "binlog"
SERVERS = ("mysql", "mariadb")
AT = "2026-02-03 04:05:06.000789"
_COMMON_TYPES = {
    "c_tinyint": ("TINYINT", "-5"),
    "c_smallint": ("SMALLINT UNSIGNED", "65535"),
    "c_mediumint": ("MEDIUMINT", "-8388608"),
    "c_int": ("INT", "-1"),
    "c_bigint": ("BIGINT UNSIGNED", "18446744073709551615"),
    "c_decimal": ("DECIMAL(30, 11)", "-1234567890.0123"),
    "c_float": ("FLOAT", "1.5"),
    "c_double": ("DOUBLE", "-1e300"),
    "c_bit": ("BIT(9)", "b'101010101'"),
    "c_date": ("DATE", "'2026-02-03'"),
    "c_time": ("TIME", "'-838:59:59'"),
    "c_time6": ("TIME(6)", "'01:02:03.000004'"),
    "c_datetime": ("DATETIME", "'1000-01-01 00:00:00'"),
    "c_datetime3": ("DATETIME(3)", "'9999-12-31 23:59:59.999'"),
    "c_timestamp": ("TIMESTAMP(6) NULL", "'2026-02-03 04:05:06.7'"),
    "c_timestamp0": ("TIMESTAMP NULL", "'2026-02-03 04:05:06'"),
    "c_year": ("YEAR", "2026"),
    "c_char": ("CHAR(20) CHARACTER SET latin1", "'abc'"),
    "c_long_char": ("CHAR(255) CHARACTER SET utf8mb4", "REPEAT('ü', 200)"),
    "c_varchar": ("VARCHAR(20) CHARACTER SET latin1", "'abc'"),
    "c_long_varchar": ("VARCHAR(1000)", "REPEAT('x', 300)"),
    "c_binary": ("BINARY(16)", "'abc'"),
    "c_varbinary": ("VARBINARY(300)", "REPEAT('y', 290)"),
    "c_tinyblob": ("TINYBLOB", "REPEAT('z', 255)"),
    "c_blob": ("BLOB", "'blob'"),
    "c_mediumblob": ("MEDIUMBLOB", "'blob'"),
    "c_longblob": ("LONGBLOB", "'blob'"),
    "c_text": ("TEXT", "'text'"),
    "c_longtext": ("LONGTEXT", "NULL"),
    "c_enum": ("ENUM('a', 'b')", "'b'"),
    "c_set": ("SET('a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i')", "'a,i'"),
    "c_json": ("JSON", '\'{"a": 1, "b": "a text that is long enough to be changed in part"}\''),
    "c_point": ("POINT", "ST_GeomFromText('POINT(1 2)')"),
    "c_geometry": ("GEOMETRY", "ST_GeomFromText('LINESTRING(0 0, 1 1)')"),
}
_OWN_TYPES = {
    "mysql": {"c_vector": ("VECTOR(3)", "TO_VECTOR('[1, 2, 3]')")},
    "mariadb": {
        "c_inet6": ("INET6", "'2001:db8::1'"),
        "c_inet4": ("INET4", "'192.0.2.1'"),
        "c_uuid": ("UUID", "'3e11fa47-71ca-11e1-9e33-c80aa9429562'"),
        "c_packed_blob": ("BLOB COMPRESSED", "REPEAT('a', 900)"),
        "c_packed_varchar": ("VARCHAR(1000) COMPRESSED", "REPEAT('b', 900)"),
    },
}
TYPES = {server: _COMMON_TYPES | own for server, own in _OWN_TYPES.items()}
"""By server: a column of each type, with a value as SQL."""
_COMPUTED = (
    "c_virtual INT AS (c_int + 1) VIRTUAL",
    "c_stored INT AS (c_int + 2) STORED",
    "c_invisible INT DEFAULT 7 INVISIBLE",
)
COMPUTED = {
    "mysql": (*_COMPUTED, "KEY c_function ((c_int * 3))", "KEY c_array ((CAST(c_json->'$.n' AS UNSIGNED ARRAY)))"),
    "mariadb": tuple(column.replace("INT DEFAULT 7 INVISIBLE", "INT INVISIBLE DEFAULT 7") for column in _COMPUTED),
}
"""By server: columns and indexes that have no value of their own in an INSERT."""


def columns_of_every_type(server: str) -> list[str]:
    """The definitions of columns of every type."""
    return [*(f"{name} {kind}" for name, (kind, _) in TYPES[server].items()), *COMPUTED[server]]


def id_of(n: int) -> str:
    return f"00000000-0000-7000-8000-{n:012}"


def insert(n: int, table: str = "half_message", **values: object) -> str:
    """An INSERT of message `n`; values are Python's, or SQL in a `sa.text`; one that is `...` is left out."""
    row: dict[str, object] = {
        "transaction_id": id_of(n), "message_no": 0, "producer_group": "g", "mode": "outbox", "state": "COMMITTED",
        "shards": "", "topic": "t", "body": json.dumps({"n": n}), "relayed": 0, "created_at": AT,
    }  # fmt: skip
    if table == "server_half_message":
        row |= {"source": "s", "instance": "i", "attempts": 0, "token": 0}
    row = {name: value for name, value in (row | values).items() if value is not ...}
    return (
        f"INSERT INTO {table} ({', '.join(f'`{name}`' for name in row)}) VALUES ({', '.join(map(_sql, row.values()))})"
    )


def _sql(value: object) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return str(value) if isinstance(value, (int, float, sa.TextClause)) else "NULL" if value is None else f"'{value}'"


def decide(n: int, state: str = "COMMITTED", **values: object) -> str:
    changed = "".join(f", `{name}` = {_sql(value)}" for name, value in values.items())
    set_to = f"state = '{state}', decided_at = '{AT}'{changed}"
    return f"UPDATE server_half_message SET {set_to} WHERE transaction_id = '{id_of(n)}'"


_ORDER = (
    "INSERT INTO orders (n, big, document) VALUES ({}, REPEAT('order ', 200), "
    """'{{"a": 1, "b": "a longer text, so that a part is less"}}')"""
)
_WHOLE = {
    "key": "kö", "tag": "x", "headers": '{"h": "v"}', "body": b"\0\xff" * 200, "delay": 1.5,
    "deliver_at": "2027-01-01 12:30:00", "ttl": 60,
}  # fmt: skip
_ROWS = [
    ["BEGIN", _ORDER.format(1), insert(1, **_WHOLE), insert(1, message_no=1), "COMMIT"],
    [insert(2, relayed=1)],
    [_ORDER.format(2)],
    ["BEGIN", insert(3, "server_half_message", state="PREPARED", **_WHOLE), decide(3), "COMMIT"],
    [insert(4, "server_half_message", state="PREPARED"), decide(4, "ROLLED_BACK")],
    ["DELETE FROM half_message"],
    ["SAVEPOINT a", insert(5)],
    ["CREATE TABLE another (n INT)", "DROP TABLE another"],
    ["BEGIN", insert(6), "SAVEPOINT a", insert(7), "ROLLBACK TO a", insert(8), "COMMIT"],
]
"""Sessions whose messages are 1 (two of them), 3, 5, 6 and 8."""
_COMPRESSED = {
    "mysql": "SET SESSION binlog_transaction_compression = ON",
    "mariadb": "SET GLOBAL log_bin_compress = ON, log_bin_compress_min_len = 10",
}
_PARTIAL = [
    [
        insert(1, **_WHOLE),
        insert(2, **(_WHOLE | {"body": ...})),
        insert(3, body=...),
        "UPDATE half_message SET relayed = 1",
    ],
    [insert(4, "server_half_message", **_WHOLE), "UPDATE server_half_message SET attempts = 2"],
    ["DELETE FROM half_message", _ORDER.format(3), "UPDATE orders SET big = 'small' WHERE n = 3"],
]
"""Sessions whose messages are 1 to 4, whatever is logged of rows."""


def _image(name: str, sessions: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[f"SET SESSION binlog_row_image = '{name}'", *session] for session in sessions]


def scenarios(server: str) -> dict[str, list[list[str]]]:
    """By name, sessions with their statements."""
    names = ", ".join(TYPES[server])
    types = f"INSERT INTO types (id, {names}) VALUES (1, {', '.join(value for _, value in TYPES[server].values())})"
    made = {
        "rows": _ROWS,
        "compressed": (
            [["SET SESSION binlog_rows_query_log_events = ON", _COMPRESSED[server], *session] for session in _ROWS]
            if server == "mysql"
            else [[_COMPRESSED[server]], *_ROWS, ["SET GLOBAL log_bin_compress = OFF"]]
        ),
        "minimal": _image("MINIMAL", _PARTIAL),
        "noblob": _image("NOBLOB", _PARTIAL),
        "types": [[types, "UPDATE types SET c_int = 3, c_json = '{\"n\": 3}'", insert(1), "DELETE FROM types"]],
        "undecidable": _image("NOBLOB", [[insert(1, "server_half_message", state="PREPARED", **_WHOLE), decide(1)]]),
    }
    if server == "mysql":
        partial = "SET SESSION binlog_row_value_options = 'PARTIAL_JSON'"
        changed = "UPDATE {} SET document = JSON_SET(document, '$.a', 5)"
        made["json"] = [
            [partial, _ORDER.format(1), changed.format("orders"), insert(1)],
            [
                "ALTER TABLE server_half_message ADD document JSON, ADD other JSON",
                partial,
                insert(
                    2, "server_half_message", state="PREPARED", document='{"a": 1, "b": "a longer text than its part"}'
                ),
                decide(2, document=sa.text("JSON_SET(document, '$.a', 5)")),
                "ALTER TABLE server_half_message DROP document, DROP other",
            ],
        ]
    return made


def make_tables(url: str, server: str) -> None:
    """Make Notify's tables, `orders`, and `types` with a column of every type."""
    engine = sa.create_engine(url)
    create_tables(engine)
    server_half_message.create(engine)
    engine.dispose()
    execute(
        url,
        "CREATE TABLE orders (n INT PRIMARY KEY, big LONGTEXT, document JSON)",
        f"CREATE TABLE types (id INT PRIMARY KEY, {', '.join(columns_of_every_type(server))})",
    )


def packets_of(url: str, *, mariadb: bool) -> list[bytes]:
    """All packets of a server's binlog, and a heartbeat."""
    stream = BinlogStream(sa.make_url(url), 4711, None, mariadb=mariadb)
    stream.connect()
    packets: list[bytes] = []
    for packet in stream.packets():
        if packet is not None:
            packets.append(packet)
            if packet[5] in (HEARTBEAT, HEARTBEAT_V2):
                break
    stream.close()
    return packets


def record(server: BinlogServer, sessions: Sequence[Sequence[str]]) -> list[bytes]:
    """The packets that the server writes for these sessions."""
    server.forget_binlogs()
    for statements in sessions:
        execute(server.url, *statements)
    return packets_of(server.url, mariadb=isinstance(server, MariaDbServer))


def path_of(server: str, scenario: str) -> Path:
    return FOLDER / f"{server}-{scenario}.hex"


def recorded(server: str, scenario: str) -> list[bytes]:
    """The packets of a recorded stream."""
    lines = path_of(server, scenario).read_text().splitlines()
    return [bytes.fromhex(line.split()[1]) for line in lines if not line.startswith("#")]


def main(server: str) -> None:
    starts: Mapping[str, AbstractContextManager[BinlogServer]] = {"mysql": own_mysql(), "mariadb": own_mariadb()}
    with starts[server] as running:
        make_tables(running.url, server)
        version = running.execute("SELECT VERSION()")[0][0]
        for name, sessions in scenarios(server).items():
            packets = record(running, sessions)
            execute(running.url, "DELETE FROM half_message", "DELETE FROM server_half_message", "DELETE FROM orders")
            lines = [f"# {version}: recorded by tests.support.record_binlog", *(f"{p[5]} {p.hex()}" for p in packets)]
            path_of(server, name).write_text("\n".join(lines) + "\n")
            print(f"{path_of(server, name).name}: {len(packets)} packets, {sum(map(len, packets))} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
