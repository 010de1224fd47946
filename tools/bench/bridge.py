"""`python -m tools.bench bridge`: measures the rate at which a bridge, or a relay, moves rows that are there already to
the queue's log, then the lag of new rows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pymysql
import sqlalchemy as sa
from sqlalchemy.engine.url import URL

from notify.binlog_bridge.binlog import source
from notify.binlog_bridge.bridge import Bridge
from notify.binlog_bridge.errors import Unfit
from notify.binlog_bridge.kinds import drop_slot
from notify.cli.bench.runner import Bench
from notify.cli.bench.verify import pulled
from notify.client.tables.creation import create_tables
from notify.client.transport.http import HttpClient
from notify.movers.relay.relay import Relay
from notify.protocol import ids
from notify.protocol.wire import PackedBridgeBatch, encode_msgpack
from notify.testing.databases import BINLOG_SERVERS
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.usage import cpu_seconds, tree

WRITERS = 16
TOPIC = "bench-bridge"
MOVERS = ("bridge", "relay")
WAL = ("wal_level=logical", "max_slot_wal_keep_size=10GB")
"""The settings of a PostgreSQL that a bridge reads."""
DATABASES = (*BINLOG_SERVERS, "postgresql")
DROP_SECONDS = 10.0


@contextlib.contextmanager
def started(kind: str, settings: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """A durable database server that a bridge can read: its URL, and the id of its process.

    `settings`: further settings of a PostgreSQL."""
    with tempfile.TemporaryDirectory(prefix="notify-b-") as directory:
        server: Any
        if kind == "postgresql":
            Path(directory).chmod(0o755)  # root runs PostgreSQL as another user
            server = PostgreSqlServer(Path(directory), settings=(*WAL, *settings)).create()
        else:
            server = BINLOG_SERVERS[kind](Path(directory)).create()
        try:
            yield server.url, server.process.pid
        finally:
            server.kill()


def run(
    dsn: str,
    *,
    mover: str = "bridge",
    rows: int = 100_000,
    rate: float = 4500.0,
    seconds: float = 10.0,
    body: int = 256,
    database_pid: int = 0,
) -> dict[str, Any]:
    """Measure `rows` transactions of one row each, then `seconds` at `rate` rows/s, at most half of the measured rate.

    `mover`: one of MOVERS. `database_pid`: the process of the database's server, whose CPU time is measured, too; 0: it
    is not. Returns the figures by name. Makes missing tables, and leaves its rows in them.
    """
    url = sa.make_url(dsn)
    engine = sa.create_engine(url)
    create_tables(engine)
    with Bench() as bench, contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        server = bench.server()
        name = "bench-" + os.urandom(4).hex()
        moving = _Moving(mover, dsn, engine, server.url, name)
        stack.callback(moving.close)
        asyncio.run(moving.skip_to_the_end())
        written = write(url, rows, body)
        cpu, server_cpu, database_cpu = _cpu(), server.cpu_seconds(), cpu_of(database_pid)
        began = time.perf_counter()
        asyncio.run(moving.until(rows))
        took = time.perf_counter() - began
        cpu, server_cpu, database_cpu = (
            _cpu() - cpu, server.cpu_seconds() - server_cpu, cpu_of(database_pid) - database_cpu,
        )  # fmt: skip
        per_second = rows / took
        rate = min(rate, per_second / 2)
        live = asyncio.run(_live(moving, url, round(rate * seconds), body, rate))
        pulled_messages = asyncio.run(pull(server.url))
        times = pulled_messages.times
        lags = sorted(appended - inserted for name, (appended, inserted) in times.items() if name in live)
        expected = written | live
        return {
            "rows_per_second": round(per_second),
            "lag_p99_ms": ms(lags, 0.99),
            "lost": len(expected - times.keys()),
            "duplicated": pulled_messages.duplicated,
            "rows": len(expected),
            "lag_p50_ms": ms(lags, 0.5),
            "lag_at_rows_per_second": round(rate),
            "cpu_us_a_row": round(cpu / rows * 1e6, 1),
            "queue_cpu_us_a_row": round(server_cpu / rows * 1e6, 1),
            **({"database_cpu_us_a_row": round(database_cpu / rows * 1e6, 1)} if database_pid else {}),
        }


class _Moving:
    """A bridge or relay from a database to a queue server."""

    def __init__(self, kind: str, dsn: str, engine: sa.Engine, url: str, name: str) -> None:
        self._kind, self._dsn, self._engine, self._url, self._name = kind, dsn, engine, url, name

    def _made(self) -> Bridge | Relay:
        if self._kind == "relay":
            return Relay(self._engine, self._url)
        return Bridge([self._dsn], self._url, name=self._name, accept_unbounded_wal=True)

    async def skip_to_the_end(self) -> None:
        """Let it leave out what was written before."""
        if self._kind == "relay" or self._engine.dialect.name == "postgresql":
            await self._made().run(once=True)
            return
        with self._engine.connect() as connection:
            position = source.current_position(connection).text
        http = HttpClient(self._url)
        batch = PackedBridgeBatch(epoch=1, expected_position="", position=position, claim=True)
        await http.call("POST", f"/v1/bridge/{self._name}/batches", encode_msgpack(batch), 10)
        http.close()

    async def until(self, rows: int, seconds: float = 600) -> None:
        """Run it until it has moved this many rows."""
        mover = self._made()
        task: asyncio.Task[Any] = asyncio.ensure_future(mover.run())
        deadline = time.monotonic() + seconds
        while _moved(mover) < rows and not task.done() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if _moved(mover) < rows and not task.cancelled():
            task.result()

    def close(self) -> None:
        """Drop the slot of a bridge of PostgreSQL, which would keep the log."""
        deadline = time.monotonic() + DROP_SECONDS
        while self._kind == "bridge" and self._engine.dialect.name == "postgresql":
            try:
                drop_slot(self._engine, self._name, None, None)
                return
            except Unfit:  # the server has not noticed yet that its reader is gone
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)


def _moved(mover: Bridge | Relay) -> int:
    return mover.totals.rows if isinstance(mover, Bridge) else mover.total.sent


def write(url: URL, rows: int, body: int, rate: float = 0.0) -> set[str]:
    """Write outbox transactions of one row, `rate` a second in total (0: as fast as possible). Returns their ids."""
    ids_of_writers: list[list[str]] = [[] for _ in range(WRITERS)]

    def work(number: int) -> None:
        connection: Any
        if url.get_backend_name() == "postgresql":
            connection = psycopg.connect(
                host=url.host, port=url.port, user=url.username, password=url.password, dbname=url.database,
                autocommit=True,
            )  # fmt: skip
            query, literal, now = connection.execute, "'\\x{}'", "clock_timestamp() AT TIME ZONE 'utc'"
        else:
            connection = pymysql.connect(
                host=url.host, port=url.port or 3306, user=url.username, password=url.password or "",
                database=url.database, autocommit=True,
            )  # fmt: skip
            query, literal, now = connection.query, "x'{}'", "UTC_TIMESTAMP(6)"
        began = time.perf_counter()
        numbers = range(number, rows, WRITERS)
        for done, _ in enumerate(numbers):
            if rate:
                time.sleep(max(0.0, began + done * WRITERS / rate - time.perf_counter()))
            transaction_id = ids.to_text(ids.new_id())
            inserted = time.time_ns().to_bytes(8)
            content = literal.format(inserted.hex() + os.urandom(max(0, body - 8)).hex())
            query(
                "INSERT INTO half_message (transaction_id, message_no, producer_group, mode, state, shards, topic,"
                " body, relayed, created_at) "
                f"VALUES ('{transaction_id}', 0, 'bench', 'outbox', 'COMMITTED', '', '{TOPIC}', {content}, 0, "
                f"{now})".encode()
            )
            ids_of_writers[number].append(transaction_id)
        connection.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {transaction_id for written in ids_of_writers for transaction_id in written}


async def _live(moving: _Moving, url: URL, rows: int, body: int, rate: float) -> set[str]:
    """Move rows while another process writes them. Returns the ids of the rows."""
    writing = asyncio.ensure_future(asyncio.to_thread(_write_elsewhere, url, rows, body, rate))
    await moving.until(rows)
    return await writing


def _write_elsewhere(url: URL, rows: int, body: int, rate: float) -> set[str]:
    """Write rows from another process, because in production a bridge does not share its interpreter."""
    import concurrent.futures
    import multiprocessing

    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(write, url, rows, body, rate).result()


@dataclass(slots=True)
class _Pulled:
    times: dict[str, tuple[float, float]]
    """By transaction id: the time of the append to the log, and the time of the INSERT, in seconds since 1970."""
    duplicated: int


async def pull(url: str) -> _Pulled:
    """Read all messages of the topic."""
    http = HttpClient(url)
    result = _Pulled({}, 0)
    try:
        async for message in pulled(http, TOPIC):
            transaction_id = message.id.partition(".")[0]
            result.duplicated += transaction_id in result.times
            appended = msgspec.convert(message.committed_at, type=datetime).timestamp()
            result.times[transaction_id] = (appended, int.from_bytes(message.body[:8]) / 1e9)
        return result
    finally:
        http.close()


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_of(server_pid: int) -> float:
    """The CPU time of a database's server: of its processes that run, and of those that have ended. 0 for none."""
    if not server_pid:
        return 0.0
    fields = Path(f"/proc/{server_pid}/stat").read_text().rpartition(")")[2].split()
    ended = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return ended + sum(cpu_seconds(pid) for pid in tree(server_pid))


def ms(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(len(values) * share))] * 1000, 1) if values else None
