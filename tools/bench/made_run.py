"""Quickly makes the log and the database of a long run, for measurements and for tests that plant faults in copies.

The real storage writes the log, with an invented time for each transaction. The local rows and the inbox rows are
loaded into a real database.
"""

from __future__ import annotations

import asyncio
import csv
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.client.tables.creation import create_tables
from notify.client.tables.definitions import notify_source
from notify.protocol import ids
from notify.protocol.message import body_digest
from notify.protocol.wire import Payload, encode_msgpack
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.sql.rows import text_of
from notify.storage.topics import Topic

PRODUCERS, CONSUMERS, TOPICS = "orders", "points", 4
SOURCE = "00000000-0000-4000-8000-000000000001"
"""The source id of the run's database, which the halves have."""
STEP_US = 100
"""The default time between two transactions: 10,000 a second."""
TOGETHER_US = 50_000
"""The transactions of this time are stored in one batch."""
COMMITTED_AFTER_US, EFFECTIVE_AFTER_US = 5_000, 10_000
KEYS = 1000
CLOSED_US = 15_000_000
"""Longer than a transaction and its delivery may take in a measured audit."""
AGO_US = 120_000_000
"""How long ago a run ended; longer than the bounds of any plan."""


def transaction_id(number: int, at_us: int) -> bytes:
    """A UUID of version 7 for a time and a number."""
    random = (number * 0x9E3779B97F4A7C15) & ((1 << 62) - 1)
    tail = (0x7 << 76) | ((number & 0xFFF) << 64) | (0x2 << 62) | random
    return (at_us // 1000).to_bytes(6) + tail.to_bytes(10)


@dataclass(frozen=True)
class Made:
    """A made run: `count` transactions from `first_us` on, one every `step_us`; or its end, from number `begin` on."""

    log: Path
    count: int
    first_us: int
    step_us: int = STEP_US
    begin: int = 0

    def at(self, number: int) -> int:
        return self.first_us + number * self.step_us

    def id(self, number: int) -> bytes:
        return transaction_id(number, self.at(number))


def topic_of(number: int) -> str:
    return f"order.{number % TOPICS}"


BODY_BYTES = 200
ROWS_A_FILE = 500_000
"""How many rows are written to a file before the database loads it."""


def payload_of(number: int, size: int = BODY_BYTES) -> bytes:
    return encode_msgpack(Payload(topic_of(number), bytes(size), f"k{number % KEYS}"))


async def write_log(made: Made, *, segment_bytes: int = 256 << 20, size: int = BODY_BYTES) -> LogStore:
    """Write halves, outcomes and acks of all transactions. Returns the store, which is still open."""
    store = LogStore(made.log, segment_bytes=segment_bytes)
    await store.open(made.at(made.begin))
    for n in range(TOPICS if not made.begin else 0):
        await store.create_topic(Topic(topic_of(n)))
        mode = "ordered" if n == 0 else "shared"
        await store.subscribe(Subscription(CONSUMERS, topic_of(n), mode=mode, inbox_from_us=0), [0])
    batch = max(1, TOGETHER_US // made.step_us)
    for first in range(made.begin, made.count, batch):
        numbers = range(first, min(made.count, first + batch))
        now = made.at(first)
        halves = [
            NewTransaction(
                made.id(n), PRODUCERS, [NewMessage(topic_of(n), payload_of(n, size), f"k{n % KEYS}")], SOURCE
            )
            for n in numbers
        ]
        await store.put(halves, now)
        await store.decide([(half.id, PRODUCERS, State.COMMITTED) for half in halves], now + COMMITTED_AFTER_US)
        for topic in range(TOPICS):
            offset = len(range(topic, first, TOPICS))
            if count := len(range(topic, numbers.stop, TOPICS)) - offset:
                store.settle_soon(CONSUMERS, topic_of(topic), 0, [(offset, count)], SettleKind.ACK)
    await store.sync()
    return store


def local_rows(made: Made) -> Iterator[list[str | int | None]]:
    """The rows of half_message, with the values of LOCAL_COLUMNS."""
    digest = body_digest(bytes(BODY_BYTES))
    for n in range(made.begin, made.count):
        yield local_row(ids.to_text(made.id(n)), topic_of(n), made.at(n) + 20, digest, key=f"k{n % KEYS}")


def inbox_rows(made: Made) -> Iterator[list[str | int | None]]:
    """The rows of notify_inbox, with the values of INBOX_COLUMNS."""
    for n in range(made.begin, made.count):
        yield [CONSUMERS, f"{ids.to_text(made.id(n))}.0", text_of(made.at(n) + EFFECTIVE_AFTER_US)]


def local_row(
    transaction_id: str, topic: str, at_us: int, digest: int, group: str = PRODUCERS, key: str | None = None
) -> list[str | int | None]:
    return [transaction_id, 0, group, "half", "COMMITTED", "", topic, key, 1, text_of(at_us), digest]


LOCAL_COLUMNS = (
    "transaction_id, message_no, producer_group, mode, state, shards, topic, key, relayed, created_at, digest"
)
INBOX_COLUMNS = "consumer_group, message_id, created_at"


def open_engine(url: str) -> sa.Engine:
    """An engine that is allowed to load local files."""
    options = {"local_infile": True} if url.startswith(("mysql", "mariadb")) else {}
    return sa.create_engine(url, connect_args=options)


def load(engine: sa.Engine, made: Made, scratch: Path) -> None:
    """Load the local rows and inbox rows of all transactions."""
    create_tables(engine)
    with engine.begin() as connection:
        connection.execute(notify_source.update().values(id=SOURCE))
    load_rows(engine, "half_message", LOCAL_COLUMNS, local_rows(made), scratch)
    load_rows(engine, "notify_inbox", INBOX_COLUMNS, inbox_rows(made), scratch)


def load_rows(engine: sa.Engine, table: str, columns: str, rows: Iterable[list[Any]], scratch: Path) -> None:
    """Load rows into a table, ROWS_A_FILE at a time. `scratch`: the directory for the files."""
    file = scratch / f"{table}.csv"
    iterator = iter(rows)
    while part := list(itertools.islice(iterator, ROWS_A_FILE)):
        with file.open("w", newline="") as lines:
            csv.writer(lines, lineterminator="\n").writerows(
                [["\\N" if value is None else value for value in row] for row in part]
            )
        load_csv(engine, table, columns, file)
        file.unlink()
    with engine.connect() as connection:
        connection.exec_driver_sql(f"ANALYZE {'TABLE ' if engine.dialect.name == 'mysql' else ''}{table}")


def load_csv(engine: sa.Engine, table: str, columns: str, file: Path) -> None:
    """Load a CSV file into a table with the fastest command of the database."""
    raw = engine.raw_connection()
    driver: Any = raw.driver_connection
    try:
        if engine.dialect.name == "sqlite":
            with file.open(newline="") as source:
                rows = [[None if value == "\\N" else value for value in row] for row in csv.reader(source)]
            names = [name.strip() for name in columns.split(",")]
            quoted = ", ".join(f'"{name}"' for name in names)
            statement = f"INSERT INTO {table} ({quoted}) VALUES ({', '.join('?' * len(names))})"
            raw.cursor().executemany(statement, rows)
        elif engine.dialect.name == "postgresql":
            with driver.cursor() as cursor:
                statement = f"COPY {table} ({columns}) FROM STDIN WITH (FORMAT csv, NULL '\\N')"
                with cursor.copy(statement) as copy, file.open("rb") as lines:
                    while data := lines.read(1 << 20):
                        copy.write(data)
        else:
            quoted = ", ".join(f"`{name.strip()}`" for name in columns.split(","))
            with driver.cursor() as cursor:
                cursor.execute(
                    f"LOAD DATA LOCAL INFILE '{file}' INTO TABLE {table} CHARACTER SET utf8mb4 "
                    f"FIELDS TERMINATED BY ',' OPTIONALLY ENCLOSED BY '\"' ({quoted})"
                )
        raw.commit()
    finally:
        raw.close()


def make_log(made: Made, segment_bytes: int = 256 << 20) -> None:
    """Write the log, and close it."""

    async def run() -> None:
        store = await write_log(made, segment_bytes=segment_bytes)
        await store.close()

    asyncio.run(run())


def started_us(transactions: int, step_us: int) -> int:
    """When a run of `transactions` began if it ended AGO_US ago."""
    first_us = time.time_ns() // 1000 - transactions * step_us - AGO_US
    return first_us // 1_000_000 * 1_000_000


def made_run(
    directory: Path, url: str, transactions: int, segment_bytes: int = 256 << 20, step_us: int = STEP_US
) -> Made:
    """Make a sound run, in which every committed message was delivered and took effect."""
    made = Made(directory / "log", transactions, started_us(transactions, step_us), step_us)
    _make(made, directory, url, segment_bytes)
    return made


def add_to(made: Made, directory: Path, url: str, transactions: int, segment_bytes: int = 256 << 20) -> Made:
    """Add transactions to a run, with times from now on. Wait until they are CLOSED_US old, and return the new part."""
    begin = made.count
    first_us = time.time_ns() // 1000 - begin * made.step_us
    more = replace(made, begin=begin, count=begin + transactions, first_us=first_us)
    _make(more, directory, url, segment_bytes)
    # If no server has a log open, an audit knows it only up to its last frame.
    time.sleep(max(0.0, (more.at(more.count) + CLOSED_US) / 1e6 - time.time()))
    asyncio.run(_touch(made.log))
    return more


async def _touch(log: Path) -> None:
    """Write another frame to the log."""
    store = LogStore(log)
    now_us = time.time_ns() // 1000
    await store.open(now_us)
    await store.subscribe(Subscription(CONSUMERS, topic_of(0), mode="ordered", inbox_from_us=0), None)
    await store.close()


def _make(made: Made, directory: Path, url: str, segment_bytes: int) -> None:
    make_log(made, segment_bytes)
    engine = open_engine(url)
    load(engine, made, directory)
    engine.dispose()
