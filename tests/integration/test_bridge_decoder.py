"""One real binlog, read with mysql-replication's decoder and with ours: both see the same messages."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.row_event import UpdateRowsEvent, WriteRowsEvent

from notify.binlog_bridge.binlog.reader import Assembly
from notify.client.tables.definitions import half_message
from notify.storage.sql.tables import server_half_message
from notify.testing.binlog_server import BinlogServer
from notify.testing.mysql_server import MySqlServer
from notify.testing.statements import execute
from tests.support.record_binlog import TYPES, id_of, make_tables, packets_of

PAGE = 200
"""How many rows a transaction has."""
OF_OURS = ("c_json", "c_enum", "c_set", "c_bit", "c_year", "c_time6", "c_decimal", "c_timestamp", "c_long_char")
"""Columns that our tables have further, of types whose values mysql-replication's decoder understands."""
Message = tuple[Any, ...]
"""Transaction id, group, topic, body, key, tag, headers, delay, deliver_at and ttl."""


@dataclass(slots=True, frozen=True)
class Compared:
    """The result of two decoders. Seconds are of this process's CPU."""

    messages: int
    first_difference: str
    our_seconds: float
    their_seconds: float


def compare(url: str, kind: str, count: int, seed: int = 1) -> Compared:
    """Write `count` messages to a new database, among rows of other tables, and read its binlog in both ways.

    The binlog must be empty. `kind`: mysql or mariadb.
    """
    _write(url, kind, count, random.Random(seed))
    is_mariadb = kind == "mariadb"
    packets = packets_of(url, mariadb=is_mariadb)
    began = time.process_time()
    ours = list(_ours(url, packets, is_mariadb))
    between = time.process_time()
    end = int.from_bytes(packets[-2][14:18], "little")  # before the heartbeat
    theirs = list(_theirs(url, is_mariadb, end))
    ended = time.process_time()
    different = next((pair for pair in itertools.zip_longest(ours, theirs) if pair[0] != pair[1]), None)
    return Compared(len(ours), repr(different) if different else "", between - began, ended - between)


def _write(url: str, kind: str, count: int, chance: random.Random) -> None:
    make_tables(url, kind)
    added = ", ".join(f"ADD {name} {TYPES[kind][name][0]}" for name in OF_OURS)
    execute(url, f"ALTER TABLE half_message {added}", f"ALTER TABLE server_half_message {added}")
    values = {name: sa.literal_column(TYPES[kind][name][1]) for name in OF_OURS}
    outbox, checked = _with_more(half_message), _with_more(server_half_message)
    # mysql-replication cannot read a table map with MariaDB's compressed columns, whichever tables it is to read.
    types = {name: value for name, (column, value) in TYPES[kind].items() if "COMPRESSED" not in column}
    execute(url, *(f"ALTER TABLE types DROP {name}" for name in TYPES[kind] if name not in types))
    others = ", ".join(types)
    like_these = f"INSERT INTO types (id, {others}) SELECT {{}}, {others} FROM types WHERE id = 0"
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    execute(url, f"INSERT INTO types (id, {others}) VALUES (0, {', '.join(types.values())})")
    for page in range(0, count, PAGE):
        numbers = range(page, min(page + PAGE, count))
        with engine.begin() as connection:
            connection.exec_driver_sql(like_these.format(page + 1))
            if page // PAGE % 2 == 0:
                connection.execute(outbox.insert().values(values), [_row(n, chance) for n in numbers])
                continue
            rows = [_row(n, chance) | _CHECKS for n in numbers]
            connection.execute(checked.insert().values(values), rows)
            connection.exec_driver_sql(f"UPDATE types SET c_int = c_int + 1 WHERE id = {page + 1}")
            t = checked
            mine = t.c.transaction_id.in_([row["transaction_id"] for row in rows])
            connection.execute(t.update().where(mine).values(state="COMMITTED", decided_at=sa.func.utc_timestamp(6)))
            connection.execute(t.update().where(mine).values(relayed=1))
    engine.dispose()


def _with_more(table: sa.Table) -> sa.Table:
    """The table with the columns OF_OURS."""
    longer = table.to_metadata(sa.MetaData())
    for name in OF_OURS:
        longer.append_column(sa.Column(name))
    return longer


_CHECKS: dict[str, Any] = {"state": "PREPARED", "source": "s", "instance": "i", "attempts": 0, "token": 0}


def _row(n: int, chance: random.Random) -> dict[str, Any]:
    """A message with anything that a message can have."""
    letters = "aé€😀\0\n\"'\\ x"

    def text(most: int) -> str:
        return "".join(chance.choice(letters) for _ in range(chance.choice((0, 1, most // 2, most))))

    at = datetime(2026, 1, 1) + timedelta(microseconds=chance.randrange(1 << 50))
    return {
        "transaction_id": id_of(n), "message_no": 0, "producer_group": f"g{n % 3}", "mode": "outbox",
        "state": "COMMITTED", "shards": "", "topic": f"topic-{n % 7}",
        "key": chance.choice((None, text(60))), "tag": chance.choice((None, "tag")),
        "headers": chance.choice((None, json.dumps({"a": text(20)}))),
        "body": chance.randbytes(chance.choice((0, 1, 100, 300, 300, 3000)) if n % 100 else 70_000),
        "delay": chance.choice((None, chance.random() * 1e6)), "deliver_at": chance.choice((None, at)),
        "ttl": chance.choice((None, 0.1)), "relayed": 0, "created_at": at,
    }  # fmt: skip


def _ours(url: str, packets: list[bytes], is_mariadb: bool) -> Iterator[Message]:
    assembly = Assembly(sa.make_url(url).database or "", None, mariadb=is_mariadb)
    for batch, _ in assembly.batches([*packets, None]):
        for transaction in batch.transactions:
            for m in transaction.messages:
                yield (
                    transaction.id, transaction.producer_group, m.topic, m.body, m.key, m.tag, m.headers, m.delay,
                    m.deliver_at, m.ttl,
                )  # fmt: skip


def _theirs(url: str, is_mariadb: bool, end: int) -> Iterator[Message]:
    at = sa.make_url(url)
    stream = BinLogStreamReader(
        connection_settings={
            "host": at.host, "port": at.port, "user": at.username, "password": at.password, "charset": "utf8mb4",
        },
        server_id=4712, blocking=True, resume_stream=True, log_pos=4,
        end_log_pos=end,
        log_file=execute(url, "SHOW BINARY LOGS")[0][0], auto_position="" if is_mariadb else None,
        only_events=[WriteRowsEvent, UpdateRowsEvent],
        only_tables=["half_message", "server_half_message"], only_schemas=[at.database], is_mariadb=is_mariadb,
    )  # fmt: skip
    try:
        for event in stream:
            for row in event.rows:
                if isinstance(event, WriteRowsEvent):
                    values, is_message = row["values"], event.table == "half_message"
                else:
                    values = row["after_values"]
                    is_message = (row["before_values"]["state"], values["state"]) == ("PREPARED", "COMMITTED")
                if is_message and values["relayed"] == 0:
                    yield _message(values)
    finally:
        stream.close()


def _message(values: dict[str, Any]) -> Message:
    """The message of a row by mysql-replication, which reads an empty BLOB as a text."""
    headers, deliver_at = values["headers"], values["deliver_at"]
    return (
        values["transaction_id"], values["producer_group"], values["topic"], values["body"] or b"", values["key"],
        values["tag"], json.loads(headers) if headers else None, values["delay"],
        deliver_at.replace(tzinfo=UTC) if deliver_at else None, values["ttl"],
    )  # fmt: skip


# mysql-replication still names the database as PyMySQL did once.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:'db' is deprecated:DeprecationWarning")
@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_both_decoders_read_the_same_messages(binlog_url: str, binlog_server: BinlogServer, count: int) -> None:
    kind = "mysql" if isinstance(binlog_server, MySqlServer) else "mariadb"
    compared = compare(binlog_url, kind, count)
    assert compared.first_difference == "" and compared.messages == count
