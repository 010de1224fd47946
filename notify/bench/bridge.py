"""`notify bench bridge`: the rate from an existing binlog to the durable log, then the lag of new rows."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pymysql
import sqlalchemy as sa
from sqlalchemy.engine.url import URL

from notify import ids
from notify.bench.verify import pulled
from notify.binlog_bridge import source
from notify.binlog_bridge.pump import Bridge
from notify.client.http import HttpClient
from notify.client.making_tables import create_tables
from notify.testing.process import ServerProcess
from notify.wire import PackedBridgeBatch, encode_msgpack

WRITERS = 16
TOPIC = "bench-bridge"


@dataclass(frozen=True, slots=True)
class Plan:
    """`rows` single-row transactions beforehand, then `seconds` at `rate` rows/s (at most half of the first rate)."""

    dsn: str
    rows: int = 100_000
    rate: float = 4500.0
    seconds: float = 10.0
    body: int = 256


def run(plan: Plan) -> dict[str, Any]:
    """Measure, and return the figures by name. Makes missing tables, and leaves its rows in them."""
    url = sa.make_url(plan.dsn)
    engine = sa.create_engine(url)
    create_tables(engine)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        server = ServerProcess(directory / "data").start()
        stack.callback(server.stop)
        stack.callback(engine.dispose)
        name = "bench-" + os.urandom(4).hex()
        asyncio.run(_stand_at_the_end(engine, server.url, name))
        written = write(url, plan.rows, plan.body)
        bridge = Bridge([plan.dsn], server.url, name=name)
        cpu, server_cpu, started = _cpu(), server.cpu_seconds(), time.perf_counter()
        asyncio.run(_until(bridge, plan.rows))
        seconds = time.perf_counter() - started
        used, server_used = _cpu() - cpu, server.cpu_seconds() - server_cpu
        per_second = plan.rows / seconds
        rate = min(plan.rate, per_second / 2)
        live = asyncio.run(_live(plan, url, server.url, name, rate))
        messages = asyncio.run(_pull(server.url))
        lags = sorted(at - began for name, (at, began) in messages.times.items() if name in live)
        wanted = written | live
        return {
            "rows_per_second": round(per_second),
            "lag_p99_ms": _ms(lags, 0.99),
            "lost": len(wanted - messages.times.keys()),
            "duplicated": messages.duplicated,
            "rows": len(wanted),
            "lag_p50_ms": _ms(lags, 0.5),
            "lag_at_rows_per_second": round(rate),
            "cpu_us_a_row": round(used / plan.rows * 1e6, 1),
            "queue_cpu_us_a_row": round(server_used / plan.rows * 1e6, 1),
        }


async def _stand_at_the_end(engine: sa.Engine, url: str, name: str) -> None:
    """Skip the events that are in the binlog already."""
    with engine.connect() as connection:
        position = source.current_position(connection).text
    http = HttpClient(url)
    batch = PackedBridgeBatch(epoch=1, expected_position="", position=position, claim=True)
    await http.call("POST", f"/v1/bridge/{name}/batches", encode_msgpack(batch), 10)
    http.close()


def write(url: URL, rows: int, body: int, rate: float = 0.0) -> set[str]:
    """Write single-row outbox transactions, `rate` a second in all (0: as fast as possible); return their ids."""
    made: list[list[str]] = [[] for _ in range(WRITERS)]

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
            name = ids.to_text(ids.new_id())
            at = time.time_ns().to_bytes(8)
            connection.query(
                "INSERT INTO half_message (transaction_id, message_no, producer_group, mode, state, shards, topic,"
                f" body, relayed, created_at) VALUES ('{name}', 0, 'bench', 'outbox', 'COMMITTED', '', '{TOPIC}', "
                f"x'{at.hex()}{os.urandom(max(0, body - 8)).hex()}', 0, UTC_TIMESTAMP(6))"
            )
            made[number].append(name)
        connection.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name for names in made for name in names}


async def _until(bridge: Bridge, rows: int, seconds: float = 600) -> None:
    """Run a bridge until it has moved so many rows."""
    task = asyncio.ensure_future(bridge.run())
    deadline = time.monotonic() + seconds
    while bridge.totals.rows < rows and not task.done() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if bridge.totals.rows < rows and not task.cancelled():
        task.result()


async def _live(plan: Plan, url: URL, queue_url: str, name: str, rate: float) -> set[str]:
    """Bridge rows while another process writes them; return their ids."""
    bridge = Bridge([plan.dsn], queue_url, name=name)
    rows = round(rate * plan.seconds)
    writing = asyncio.ensure_future(asyncio.to_thread(_write_elsewhere, url, rows, plan.body, rate))
    await _until(bridge, rows)
    return await writing


def _write_elsewhere(url: URL, rows: int, body: int, rate: float) -> set[str]:
    """Write rows from another process, because in production a bridge has its interpreter to itself."""
    import concurrent.futures
    import multiprocessing

    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(write, url, rows, body, rate).result()


@dataclass(slots=True)
class _Found:
    times: dict[str, tuple[float, float]]
    """By transaction the times of its append to the log and of its INSERT, in seconds since 1970."""
    duplicated: int


async def _pull(url: str) -> _Found:
    http = HttpClient(url)
    messages = _Found({}, 0)
    try:
        async for m in pulled(http, TOPIC):
            name = m.id.partition(".")[0]
            messages.duplicated += name in messages.times
            at = msgspec.convert(m.committed_at, type=datetime).timestamp()
            messages.times[name] = (at, int.from_bytes(m.body[:8]) / 1e9)
        return messages
    finally:
        http.close()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _ms(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(len(values) * share))] * 1000, 1) if values else None
