"""PostgreSQL with an outbox table: a half is a row that is inserted, its outcome an update, in two transactions.

The producers are pgbench, which is written in C. Consumers ask the table: a relay takes committed rows and deletes
them; groups that each need every message keep a position in it.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from notify.errors import Unavailable
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.reachable import NotAvailable
from tools.bench.peers.system import BODY, Run, Step, Work, usual_steps

POOL = 128
"""The most connections. More callers share them, as a service's threads share a pool: 1,024 connections are slower."""
BATCH = 1000
IDLE_SECONDS = 0.001
"""A relay's pause after it found nothing."""
WARM_CALLERS, WARM_SECONDS = 128, 3.0
OWN_WARM_SECONDS = 1.0
"""The start of a paced run, which is not counted."""
MOST_SECONDS = 120.0
"""How long a run may take beyond its own seconds."""
THREADS = 2
"""Threads of pgbench."""

TABLES = (
    "CREATE TABLE outbox (id bigserial PRIMARY KEY, topic text NOT NULL, state smallint NOT NULL, body bytea NOT NULL,"
    " committed_at timestamptz)",
    "CREATE TABLE positions (name text PRIMARY KEY, position bigint NOT NULL)",
)
HALF = f"""\
INSERT INTO outbox (topic, state, body) VALUES ('bench', 0, decode(repeat('ab', {BODY}), 'hex')) RETURNING id \\gset
UPDATE outbox SET state = 1, committed_at = clock_timestamp() WHERE id = :id;
"""
PILE = f"""
INSERT INTO outbox (topic, state, body)
SELECT 'bench', 1, decode(repeat('ab', {BODY}), 'hex') FROM generate_series(1, %s)"""
TAKE = f"""
DELETE FROM outbox WHERE id IN (
  SELECT id FROM outbox WHERE state = 1 ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED
) RETURNING id, extract(epoch FROM committed_at), body"""
READ = f"SELECT id, body FROM outbox WHERE id > %s AND state = 1 ORDER BY id LIMIT {BATCH}"


class PostgreSql:
    """PostgreSQL as Debian has it, with its durable defaults."""

    name = "postgresql"
    title = "PostgreSQL outbox"

    def version(self) -> str:
        try:
            programs = PostgreSqlServer.programs()
        except NotAvailable as reason:
            raise Unavailable(str(reason)) from None
        said = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
        return said.split()[2]

    @contextmanager
    def started(self, directory: Path, work: Work) -> Iterator[Outbox]:
        server = PostgreSqlServer(directory, settings=("shared_buffers=1GB",))
        try:
            server.create()
            yield Outbox(server, directory, work)
        finally:
            server.stop()


class Outbox:
    """A server with an outbox table."""

    def __init__(self, server: PostgreSqlServer, directory: Path, work: Work) -> None:
        self._server = server
        self._work = work
        self._script = directory / "half.sql"
        self._script.write_text(HALF)
        with self._connected() as connection:
            for statement in TABLES:
                connection.execute(statement)

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(f"host=127.0.0.1 port={self._server.port} user=postgres dbname=postgres")

    def _pgbench(self, callers: int, seconds: float, rate: int = 0) -> tuple[int, float]:
        """(transactions, transactions a second without the time to connect). Raises Unavailable."""
        connections = min(POOL, callers)
        words = ["-n", "-M", "prepared", "-h", "127.0.0.1", "-p", self._server.port, "-U", "postgres"]
        words += ["-c", connections, "-j", min(THREADS, connections), "-T", round(seconds), "-f", self._script]
        words += ["-R", rate] if rate else []
        done = subprocess.run(
            [self._server.programs() / "pgbench", *map(str, words), "postgres"],
            capture_output=True, text=True, timeout=seconds + MOST_SECONDS, check=False,
        )  # fmt: skip
        count = re.search(r"actually processed: (\d+)", done.stdout)
        tps = re.search(r"tps = ([0-9.]+)", done.stdout)
        if done.returncode or count is None or tps is None:
            raise Unavailable(f"pgbench failed: {done.stderr[-1000:]}")
        return int(count[1]), float(tps[1])

    def _scalar(self, query: LiteralString) -> int:
        with self._connected() as connection:
            row = connection.execute(query).fetchone()
            assert row is not None
            return int(row[0])

    def _empty(self) -> None:
        with self._connected() as connection:
            connection.execute("TRUNCATE outbox, positions")

    def warm_up(self) -> None:
        self._pgbench(WARM_CALLERS, WARM_SECONDS)

    def steps(self) -> list[Step]:
        return usual_steps(self, self._work)

    def transactions(self, callers: int) -> Run:
        self._empty()
        count, per_second = self._pgbench(callers, self._work.seconds)
        committed = self._scalar("SELECT count(*) FROM outbox WHERE state = 1")
        visible = per_second * committed / count
        figures = {f"recorded_{callers}": per_second, f"visible_{callers}": visible, f"settled_{callers}": visible}
        return Run(figures, count - min(count, committed), 0)

    def paced(self) -> Run:
        self._empty()
        relay = Relay(self._connected())
        since = time.time() + OWN_WARM_SECONDS
        seconds = self._work.seconds + OWN_WARM_SECONDS
        with _threads([relay.run], relay.is_over):
            count, _ = self._pgbench(self._work.paced_callers, seconds, self._work.pace)
        latencies = [taken_at - committed_at for committed_at, taken_at in relay.times if committed_at >= since]
        percentiles = statistics.quantiles(latencies, n=100)
        figures = {"paced": len(latencies) / self._work.seconds}
        figures |= {f"end_to_end_p{n}": 1000 * percentiles[n - 1] for n in (50, 99)}
        return Run(figures, count - len(relay.seen), relay.taken - len(relay.seen))

    def _pile(self, messages: int) -> None:
        self._empty()
        with self._connected() as connection:
            connection.execute(PILE, (messages,))
        with self._connected() as connection:
            connection.autocommit = True
            connection.execute("VACUUM ANALYZE outbox")

    def drain(self) -> Run:
        self._pile(self._work.pile)
        relay = Relay(self._connected())
        relay.is_over.set()
        started = time.perf_counter()
        relay.run()
        seconds = time.perf_counter() - started
        seen = len(relay.seen)
        return Run({"drain": seen / seconds}, self._work.pile - seen, relay.taken - seen)

    def fan_out(self) -> Run:
        messages = self._work.fan_out
        self._pile(messages)
        groups = [Group(self._connected(), f"group-{n}", messages) for n in range(self._work.groups)]
        started = time.perf_counter()
        with _threads([group.run for group in groups]):
            pass
        seconds = time.perf_counter() - started
        seen = sum(len(group.seen) for group in groups)
        taken = sum(group.taken for group in groups)
        return Run({"fan_out": seen / seconds}, len(groups) * messages - seen, taken - seen)


class Relay:
    """Takes committed rows and deletes them, until it is over and none is left."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._connection = connection
        self.is_over = threading.Event()
        self.seen: set[int] = set()
        self.taken = 0
        self.times: list[tuple[float, float]] = []
        """When each row was committed, and when it was taken, in seconds since 1970."""

    def run(self) -> None:
        with self._connection as connection:
            while True:
                was_over = self.is_over.is_set()
                rows = connection.execute(TAKE).fetchall()
                connection.commit()
                if rows:
                    self._handle(rows)
                elif was_over:
                    return
                else:
                    time.sleep(IDLE_SECONDS)

    def _handle(self, rows: list[tuple[Any, ...]]) -> None:
        now = time.time()
        self.times += [(float(committed_at), now) for _, committed_at, _ in rows if committed_at is not None]
        self.taken += len(rows)
        self.seen.update(number for number, _, _ in rows)


class Group:
    """Reads all rows behind its position, and stores the position after each batch."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]], name: str, messages: int) -> None:
        self._connection = connection
        self._name = name
        self._messages = messages
        self.seen: set[int] = set()
        self.taken = 0

    def run(self) -> None:
        position = 0
        with self._connection as connection:
            connection.execute("INSERT INTO positions VALUES (%s, 0)", (self._name,))
            while len(self.seen) < self._messages and (rows := connection.execute(READ, (position,)).fetchall()):
                position = rows[-1][0]
                connection.execute("UPDATE positions SET position = %s WHERE name = %s", (position, self._name))
                connection.commit()
                self.taken += len(rows)
                self.seen.update(number for number, _ in rows)


@contextmanager
def _threads(runs: list[Callable[[], None]], is_over: threading.Event | None = None) -> Iterator[None]:
    """Run these in threads, which end by themselves or once it is over. Raises what one of them raised."""
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(run) for run in runs]
        try:
            yield
        finally:
            if is_over is not None:
                is_over.set()
        for future in futures:
            future.result(MOST_SECONDS)
