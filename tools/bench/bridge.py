"""`python -m tools.bench bridge`: measures the rate from an existing binlog to the log, then the lag of new rows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import pymysql
import sqlalchemy as sa
from sqlalchemy.engine.url import URL

from notify.binlog_bridge.binlog import source
from notify.binlog_bridge.pump import Bridge
from notify.cli.bench.runner import Bench
from notify.cli.bench.verify import pulled
from notify.client.tables.creation import create_tables
from notify.client.transport.http import HttpClient
from notify.protocol import ids
from notify.protocol.wire import PackedBridgeBatch, encode_msgpack

WRITERS = 16
TOPIC = "bench-bridge"


def run(
    dsn: str, *, rows: int = 100_000, rate: float = 4500.0, seconds: float = 10.0, body: int = 256
) -> dict[str, Any]:
    """Measure `rows` transactions of one row each, then `seconds` at `rate` rows/s, at most half of the measured rate.

    Returns the figures by name. Makes missing tables, and leaves its rows in them.
    """
    url = sa.make_url(dsn)
    engine = sa.create_engine(url)
    create_tables(engine)
    with Bench() as bench, contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        server = bench.server()
        name = "bench-" + os.urandom(4).hex()
        asyncio.run(_skip_to_the_end(engine, server.url, name))
        written = write(url, rows, body)
        bridge = Bridge([dsn], server.url, name=name)
        cpu, server_cpu, started = _cpu(), server.cpu_seconds(), time.perf_counter()
        asyncio.run(_until(bridge, rows))
        took = time.perf_counter() - started
        cpu, server_cpu = _cpu() - cpu, server.cpu_seconds() - server_cpu
        per_second = rows / took
        rate = min(rate, per_second / 2)
        live = asyncio.run(_live(dsn, server.url, name, round(rate * seconds), body, rate))
        pulled_messages = asyncio.run(_pull(server.url))
        times = pulled_messages.times
        lags = sorted(appended - inserted for name, (appended, inserted) in times.items() if name in live)
        expected = written | live
        return {
            "rows_per_second": round(per_second),
            "lag_p99_ms": _ms(lags, 0.99),
            "lost": len(expected - times.keys()),
            "duplicated": pulled_messages.duplicated,
            "rows": len(expected),
            "lag_p50_ms": _ms(lags, 0.5),
            "lag_at_rows_per_second": round(rate),
            "cpu_us_a_row": round(cpu / rows * 1e6, 1),
            "queue_cpu_us_a_row": round(server_cpu / rows * 1e6, 1),
        }


async def _skip_to_the_end(engine: sa.Engine, url: str, name: str) -> None:
    """Record the end of the binlog as the bridge's position, so that it skips all earlier events."""
    with engine.connect() as connection:
        position = source.current_position(connection).text
    http = HttpClient(url)
    batch = PackedBridgeBatch(epoch=1, expected_position="", position=position, claim=True)
    await http.call("POST", f"/v1/bridge/{name}/batches", encode_msgpack(batch), 10)
    http.close()


def write(url: URL, rows: int, body: int, rate: float = 0.0) -> set[str]:
    """Write outbox transactions of one row, `rate` a second in total (0: as fast as possible). Returns their ids."""
    ids_of_writers: list[list[str]] = [[] for _ in range(WRITERS)]

    def work(number: int) -> None:
        connection = pymysql.connect(
            host=url.host, port=url.port or 3306, user=url.username, password=url.password or "",
            database=url.database, autocommit=True,
        )  # fmt: skip
        started = time.perf_counter()
        numbers = range(number, rows, WRITERS)
        for done, _ in enumerate(numbers):
            if rate:
                time.sleep(max(0.0, started + done * WRITERS / rate - time.perf_counter()))
            transaction_id = ids.to_text(ids.new_id())
            inserted = time.time_ns().to_bytes(8)
            connection.query(
                "INSERT INTO half_message (transaction_id, message_no, producer_group, mode, state, shards, topic,"
                " body, relayed, created_at) "
                f"VALUES ('{transaction_id}', 0, 'bench', 'outbox', 'COMMITTED', '', '{TOPIC}', "
                f"x'{inserted.hex()}{os.urandom(max(0, body - 8)).hex()}', 0, UTC_TIMESTAMP(6))"
            )
            ids_of_writers[number].append(transaction_id)
        connection.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {transaction_id for written in ids_of_writers for transaction_id in written}


async def _until(bridge: Bridge, rows: int, seconds: float = 600) -> None:
    """Run a bridge until it has moved this many rows."""
    task = asyncio.ensure_future(bridge.run())
    deadline = time.monotonic() + seconds
    while bridge.totals.rows < rows and not task.done() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if bridge.totals.rows < rows and not task.cancelled():
        task.result()


async def _live(dsn: str, queue_url: str, name: str, rows: int, body: int, rate: float) -> set[str]:
    """Run a bridge while another process writes rows. Returns the ids of the rows."""
    bridge = Bridge([dsn], queue_url, name=name)
    writing = asyncio.ensure_future(asyncio.to_thread(_write_elsewhere, sa.make_url(dsn), rows, body, rate))
    await _until(bridge, rows)
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


async def _pull(url: str) -> _Pulled:
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


def _ms(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(len(values) * share))] * 1000, 1) if values else None
