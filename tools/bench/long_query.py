"""Compares a relay with a bridge on a PostgreSQL in which a query runs for long: `python -m tools.bench long_query`.

PostgreSQL keeps each version of a row that the oldest open transaction may see. A relay marks every row that it has
moved, so that as long as an analytics query runs, each message leaves a dead version behind, which later looks for
waiting rows have to pass. A bridge reads the log and changes no row; with `rows=False` there is none. For each of them
in turn, producers commit at a pace while a query in REPEATABLE READ runs, and one line of JSON has the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import sqlalchemy as sa

from notify.binlog_bridge.purge import purge_moved
from notify.cli.bench.runner import Bench, call
from notify.client import Message, TransactionProducer, create_tables
from notify.client.tables.purge import purge_by_force
from notify.runtime.signals import exit_on_signal
from notify.testing.usage import cpu_seconds
from tools.bench import bridge as bridge_bench
from tools.bench.bridge import TOPIC

KINDS = {"relay": ("relay", True), "bridge": ("bridge", True), "bridge, rows=False": ("bridge", False)}
"""The mover, and whether producers write rows."""
THREADS = 8
NOWHERE = "http://127.0.0.1:9"
"""Producers in mode outbox ask no server."""
SETTINGS = ("autovacuum_naptime=5s",)
"""Autovacuum looks every minute by default. So dead rows that it may remove are gone in short runs, too."""
DRAIN_SECONDS = 120.0
_SIZE = sa.text(
    "SELECT n_dead_tup, n_tup_ins + n_tup_upd + n_tup_del, pg_total_relation_size(relid), "
    "pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint "
    "FROM pg_stat_user_tables WHERE relname = 'half_message'"
)


def commit(dsn: str, rows: bool, rate: float, seconds: float, body: int) -> list[tuple[float, float]]:
    """Commit `rate` transactions a second; of each, when it began (of `time.monotonic`) and how long its commit took.
    Runs in a process of its own, as a service would."""
    engine = sa.create_engine(dsn, pool_size=THREADS)
    taken: list[list[tuple[float, float]]] = [[] for _ in range(THREADS)]
    began = time.monotonic()
    with TransactionProducer(NOWHERE, group=TOPIC, engine=engine, mode="outbox", rows=rows) as producer:

        def work(number: int) -> None:
            for turn in range(number, round(rate * seconds), THREADS):
                time.sleep(max(0.0, began + turn / rate - time.monotonic()))
                with engine.connect() as connection, producer.transaction(connection) as tx:
                    connection.exec_driver_sql("INSERT INTO orders (item) VALUES ('one')")
                    content = time.time_ns().to_bytes(8) + os.urandom(max(0, body - 8))
                    tx.send(Message(TOPIC, content, key=str(turn)))
                    at = time.monotonic()
                taken[number].append((at, time.monotonic() - at))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    engine.dispose()
    return sorted(each for some in taken for each in some)


@contextmanager
def long_query(engine: sa.Engine, seconds: float) -> Iterator[None]:
    """A query in REPEATABLE READ that runs until the context ends, at most `seconds`."""
    connection = engine.connect().execution_options(isolation_level="REPEATABLE READ")
    connection.exec_driver_sql("SELECT count(*) FROM half_message")
    pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()

    def run() -> None:
        with suppress(sa.exc.DBAPIError):
            connection.exec_driver_sql(f"SELECT count(*), pg_sleep({seconds}) FROM half_message")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        with engine.connect() as other:
            other.exec_driver_sql(f"SELECT pg_cancel_backend({pid})")
        thread.join()
        connection.close()


def figures_of(kind: str, *, rate: float, seconds: float, body: int, with_query: bool) -> dict[str, Any]:
    """Measure one of KINDS on a server of its own."""
    mover, rows = KINDS[kind]
    with ExitStack() as stack:
        url, pid = stack.enter_context(bridge_bench.started("postgresql", SETTINGS))
        bench = stack.enter_context(Bench())
        queue = bench.server()
        engine = sa.create_engine(url)
        stack.callback(engine.dispose)
        create_tables(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE orders (id bigserial PRIMARY KEY, item text)")
        command = [sys.executable, "-m", "notify.cli.main", mover, "--url", queue.url, "--dsn", url]
        subprocess.run([*command, "--once"], check=True, capture_output=True)  # a bridge makes its slot
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
        if with_query:
            stack.enter_context(long_query(engine, seconds + 2 * DRAIN_SECONDS))
        before = _size(engine)
        cpu = bridge_bench.cpu_of(pid), cpu_seconds(process.pid), queue.cpu_seconds()
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            taken = pool.submit(commit, url, rows, rate, seconds, body).result()
        _wait_for(queue.url, len(taken))
        spent = [
            after - earlier
            for after, earlier in zip(
                (bridge_bench.cpu_of(pid), cpu_seconds(process.pid), queue.cpu_seconds()), cpu, strict=True
            )
        ]
        after = _size(engine)
        pulled = asyncio.run(bridge_bench.pull(queue.url))
        purged = _purged(engine, queue.url, mover) if rows else 0
        written = _size(engine)["written"]
        lags = [appended - inserted for appended, inserted in pulled.times.values()]
        last = [took for at, took in taken if at > taken[-1][0] - seconds / 5]
        return {
            "kind": kind,
            "commits": len(taken),
            "lost": len(taken) - len(pulled.times),
            "duplicated": pulled.duplicated,
            "commit_p50_ms": bridge_bench.ms(sorted(took for _, took in taken), 0.5),
            "commit_p99_ms": bridge_bench.ms(sorted(took for _, took in taken), 0.99),
            "commit_p99_of_the_last_fifth_ms": bridge_bench.ms(sorted(last), 0.99),
            "lag_p50_ms": bridge_bench.ms(sorted(lags), 0.5),
            "lag_p99_ms": bridge_bench.ms(sorted(lags), 0.99),
            "dead_rows": after["dead"],
            "table_kb": round(after["bytes"] / 1024),
            "log_bytes_a_message": round((after["log"] - before["log"]) / len(taken)),
            "rows_written_a_message": round((written - before["written"]) / len(taken), 2),
            "rows_purged": purged,
            "database_cpu_us_a_message": round(spent[0] / len(taken) * 1e6),
            "mover_cpu_us_a_message": round(spent[1] / len(taken) * 1e6),
            "queue_cpu_us_a_message": round(spent[2] / len(taken) * 1e6),
        }


def _size(engine: sa.Engine) -> dict[str, int]:
    """Of the table of messages: its dead rows, the rows that were ever inserted, updated and deleted, and its bytes
    with its indexes; and the end of the log."""
    engine.dispose()  # a session reports what it did when it ends, or after a while
    time.sleep(1.5)
    with engine.connect() as connection:
        return dict(zip(("dead", "written", "bytes", "log"), map(int, connection.execute(_SIZE).one()), strict=True))


def _wait_for(url: str, messages: int) -> None:
    """Wait until the queue has so many messages, but not for ever: the figures say how many are lost."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while time.monotonic() < deadline:
        topics = call(url, "GET", "/v1/admin/topics")["topics"]
        if sum(queue["end"] for topic in topics if topic["name"] == TOPIC for queue in topic["queues"]) >= messages:
            return
        time.sleep(0.2)  # the pause between two looks


def _purged(engine: sa.Engine, url: str, mover: str) -> int:
    """Delete what was moved, as a service does once a day; the number of rows."""
    if mover == "relay":
        return purge_by_force(engine, older_than=0).rows
    return asyncio.run(purge_moved(engine, url, older_than=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the query and the producers run")
    parser.add_argument("--rate", type=float, default=500.0, help="commits a second")
    parser.add_argument("--body", type=int, default=256, help="bytes of a message")
    parser.add_argument("--only", choices=KINDS, default="", help="this kind only")
    parser.add_argument("--no-query", action="store_true", help="without the query, to compare")
    given = parser.parse_args()
    for kind in [given.only] if given.only else KINDS:
        figures = figures_of(
            kind, rate=given.rate, seconds=given.seconds, body=given.body, with_query=not given.no_query
        )
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    with exit_on_signal():
        main()
