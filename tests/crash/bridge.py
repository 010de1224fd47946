"""Kills a bridge under load repeatedly, while its source rotates, changes its table, restarts and fails over.

Run as `python -m tests.crash.bridge --database mysql --kills 200 --rotations 50 --ddls 20 --restarts 5 --failovers 2`.
Each key has one writer, which numbers its messages; the history has the acknowledged numbers. The checks: every
acknowledged message is in the log once, every message in the log was tried, and the numbers of each key rise.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import sqlalchemy as sa

from notify.cli.bench.verify import pulled
from notify.client.tables.creation import create_tables
from notify.client.transport.http import HttpClient
from notify.errors import NotFound
from notify.protocol import ids
from notify.testing import forked
from notify.testing.databases import BINLOG_SERVERS
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.process import ServerProcess
from notify.testing.statements import execute
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import Command
from tests.support.http import ask
from tests.support.verdict import command_line, concluded, judged

TOPIC = "bridged"
KEYS = 12
WAL = ("wal_level=logical", "max_slot_wal_keep_size=10GB")
"""Settings of a PostgreSQL that is bridged."""
TYPES = ("INT", "VARCHAR(300) CHARACTER SET utf8mb4", "DECIMAL(20,6)", "TIMESTAMP NULL", "BIT(11)", "JSON")
WAL_TYPES = ("INT", "VARCHAR(300)", "DECIMAL(20,6)[]", "TIMESTAMPTZ NULL", "BIT(11)", "JSONB")
LEAST_ACKNOWLEDGED = 1000
"""The fewest acknowledged messages of a run, however quickly its faults are over."""


@dataclass(slots=True)
class History:
    """The acknowledged and the tried numbers, by key."""

    acknowledged: dict[str, list[int]] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of acknowledged messages."""
        return sum(len(numbers) for numbers in list(self.acknowledged.values()))


class Source:
    """A primary and a replica, and writers that follow the primary."""

    def __init__(self, directory: Path, stack: ExitStack, database: str, *, durable: bool, pause: float) -> None:
        """`database`: mariadb, mysql, or postgresql, which has no replica here; `durable`: whether the databases sync;
        `pause`: the seconds of each writer
        between two transactions."""
        self._pause_seconds = pause
        self.servers: list[Any] = []
        self._is_wal = database == "postgresql"
        if self._is_wal:
            directory.chmod(0o755)  # root runs PostgreSQL as another user, who has to reach its directory
        for number in (1,) if self._is_wal else (1, 2):
            place = directory / f"m{number}"
            place.mkdir()
            server: Any = (
                PostgreSqlServer(place, durable=durable, settings=WAL)
                if self._is_wal
                else BINLOG_SERVERS[database](place, number, durable=durable)
            )
            server.create()
            stack.callback(server.stop)
            self.servers.append(server)
        self.primary, self.replica = self.servers[0], self.servers[-1]
        engine = sa.create_engine(self.primary.url)
        create_tables(engine)
        engine.dispose()
        if not self._is_wal:
            self.replica.follow(self.primary)
        self.history = History()
        self._stop = threading.Event()
        self._pause = threading.Event()
        self._paused = [threading.Event() for _ in range(KEYS)]
        self._threads = [threading.Thread(target=self._write, args=(n,), daemon=True) for n in range(KEYS)]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self, number: int) -> None:
        """Write the numbers of one key, each tried once: one row a transaction, sometimes some hundred."""
        key = f"k{number}"
        chance = random.Random(number)
        acknowledged = self.history.acknowledged.setdefault(key, [])
        connection: Any = None
        key_column = '"key"' if self._is_wal else "`key`"
        next_number = 0
        while not self._stop.is_set():
            if self._pause.is_set():
                self._paused[number].set()
                time.sleep(0.01)  # the pause between two looks whether it may continue
                continue
            self._paused[number].clear()
            count = chance.choice((1, 1, 1, 1, 1, 2, 5, 300))
            numbers = list(range(next_number, next_number + count))
            self.history.tried[key] = next_number = next_number + count
            try:
                if connection is None:
                    connection = self._connected()
                for n in numbers:
                    body = json.dumps({"key": key, "n": n, "pad": "ü" * chance.randint(0, 300)})
                    with connection.cursor() as cursor:
                        cursor.execute(
                            "INSERT INTO half_message (transaction_id, message_no, producer_group, mode, state, shards,"
                            f" topic, {key_column}, body, relayed, created_at) VALUES "
                            f"(%s, 0, 'g', 'outbox', 'COMMITTED', '', %s, %s, %s, 0, {self._now})",
                            (ids.to_text(ids.new_id()), TOPIC, key, body.encode()),
                        )
                if chance.random() < 0.05:
                    connection.rollback()
                    continue
                connection.commit()
            except (pymysql.Error, psycopg.Error, OSError):
                if connection is not None:
                    with suppress(pymysql.Error, psycopg.Error, OSError):
                        connection.close()
                connection = None
                time.sleep(0.05)  # the pause of a writer whose server is unreachable
            else:
                acknowledged += numbers
            time.sleep(self._pause_seconds)  # the pace of the load
        if connection is not None:
            connection.close()

    @property
    def _now(self) -> str:
        return "clock_timestamp() AT TIME ZONE 'utc'" if self._is_wal else "UTC_TIMESTAMP(6)"

    def _connected(self) -> Any:
        p = self.primary
        if self._is_wal:
            return psycopg.connect(host="127.0.0.1", port=p.port, user="postgres", dbname="postgres", connect_timeout=2)
        return pymysql.connect(
            host="127.0.0.1", port=p.port, user=p.USER, password="shop", database="shop", connect_timeout=2,
            read_timeout=10,
        )  # fmt: skip

    # --- faults -----------------------------------------------------------------------------------------------

    def rotate(self) -> None:
        self._execute("SELECT pg_switch_wal()" if self._is_wal else "FLUSH BINARY LOGS")

    def _execute(self, *statements: str) -> None:
        if self._is_wal:
            execute(self.primary.url, *statements)
        else:
            self.primary.execute(*statements)

    def change_table(self, number: int) -> bool:
        """Add or drop a column, at either end, of a type with or without a length. False if a lock was refused."""
        place = "" if self._is_wal else ("FIRST", "AFTER topic", "")[number % 3]
        kind = (WAL_TYPES if self._is_wal else TYPES)[number // 2 % 6]
        patience = "SET lock_timeout = '5s'" if self._is_wal else "SET lock_wait_timeout = 5"
        what = f"DROP COLUMN extra_{number - 1}" if number % 2 else f"ADD COLUMN extra_{number} {kind} {place}"
        try:
            self._execute(patience, f"ALTER TABLE {'' if self._is_wal else 'shop.'}half_message {what}")
        except sa.exc.DBAPIError:
            return False
        return True

    def restart(self, hard: bool) -> None:
        if hard:
            self.primary.kill()
        else:
            self.primary.stop()
        self.primary.start()

    def fail_over(self) -> None:
        """Kill the primary once the replica has everything, promote the replica, and start the old primary again."""
        self._pause.set()
        for paused in self._paused:
            assert paused.wait(PATIENCE_SECONDS), "a writer does not pause"
        self.replica.wait_until_it_has(self.primary.gtids)
        self.primary.kill()
        self.replica.promote()
        self.primary, self.replica = self.replica, self.primary
        self._pause.clear()
        self.replica.start()
        self.replica.follow(self.primary)


async def in_log(url: str) -> dict[str, list[int]]:
    """The numbers of each key, in the order of the log."""
    http = HttpClient(url)
    numbers_by_key: dict[str, list[int]] = {}
    try:
        async for m in pulled(http, TOPIC):
            body = json.loads(m.body)
            assert m.key == body["key"]
            numbers_by_key.setdefault(body["key"], []).append(body["n"])
        return numbers_by_key
    except NotFound:
        return {}  # every bridge was killed before its first message made the topic
    finally:
        http.close()


def violations(history: History, logged: dict[str, list[int]]) -> list[str]:
    bad = []
    for key, tried in history.tried.items():
        numbers = logged.get(key, [])
        counts = Counter(numbers)
        lost = [n for n in history.acknowledged[key] if n not in counts]
        if lost:
            bad.append(f"{key}: {len(lost)} acknowledged are lost, the first {lost[:5]}")
        if len(counts) != len(numbers):
            bad.append(f"{key}: {len(numbers) - len(counts)} twice")
        if numbers != sorted(numbers):
            bad.append(f"{key}: out of order")
        if any(n >= tried for n in numbers):
            bad.append(f"{key}: what was never tried")
    return bad


def end_of_log(url: str) -> int:
    """The number of messages that the bridge has moved."""
    status, topics = ask(url, "GET", "/v1/admin/topics")
    assert status == 200, topics
    return sum(queue["end"] for topic in topics["topics"] if topic["name"] == TOPIC for queue in topic["queues"])


def run(
    directory: Path,
    stack: ExitStack,
    database: str = "mariadb",
    *,
    durable: bool = True,
    pause: float = 0.002,
    kills: int,
    rotations: int,
    ddls: int,
    restarts: int,
    failovers: int,
    seed: int,
) -> dict[str, Any]:
    """Run the campaign, and return its report; `violations` lists broken promises. `database`, `durable`, `pause`: see
    Source.

    Every second kill comes when the bridge has moved something since it was started, the others at any moment, also
    while it starts.
    """
    chance = random.Random(seed)
    source = Source(directory, stack, database, durable=durable, pause=pause)
    queue = ServerProcess(directory / "queue").start()
    stack.callback(queue.stop)
    sources = [word for server in source.servers for word in ("--dsn", f"source={server.url}")]
    bridge = Command("bridge", "--url", queue.url, *sources).start()
    stack.callback(bridge.close)
    source.begin()
    plan = ["rotate"] * rotations + ["ddl"] * ddls + ["restart"] * restarts + ["fail over"] * failovers
    chance.shuffle(plan)
    done: Counter[str] = Counter()
    try:
        steps = max(kills, len(plan))
        for step in range(steps):
            time.sleep(chance.uniform(0.3, 1.6))  # a random moment: before the bridge has started, or later
            for step_kind in plan[step * len(plan) // steps : (step + 1) * len(plan) // steps]:
                if step_kind == "rotate":
                    source.rotate()
                elif step_kind == "ddl":
                    while not source.change_table(done["ddl"]):
                        done["ddl refused"] += 1
                elif step_kind == "restart":
                    source.restart(hard=done["restart"] % 2 == 0)
                else:
                    source.fail_over()
                done[step_kind] += 1
            if step < kills:
                if step % 2 == 0:
                    wanted = end_of_log(queue.url) + chance.randint(1, 100)
                    eventually(lambda wanted=wanted: end_of_log(queue.url) >= wanted, f"the bridge to move {wanted}")  # type: ignore[misc]
                bridge.kill()
                done["kill"] += 1
                bridge.start()
        eventually(lambda: source.history.count >= LEAST_ACKNOWLEDGED, f"{LEAST_ACKNOWLEDGED} acknowledged messages")
    except AssertionError as failure:
        failure.add_note(f"The bridge's last lines: {''.join(bridge.output)[-3000:]}")
        raise
    finally:
        source.end()
    deadline = time.monotonic() + 3 * PATIENCE_SECONDS
    logged = asyncio.run(in_log(queue.url))
    while any("lost" in bad for bad in violations(source.history, logged)) and time.monotonic() < deadline:
        time.sleep(0.5)  # the pause between two looks
        logged = asyncio.run(in_log(queue.url))
    bridge.kill()
    return {
        "messages": sum(map(len, logged.values())),
        "acknowledged": source.history.count,
        "done": dict(done),
        "violations": violations(source.history, logged),
    }


def main() -> int:
    databases = (*sorted(BINLOG_SERVERS), "postgresql")
    a = command_line(__doc__, database=databases, kills=200, rotations=50, ddls=20, restarts=5, failovers=2, seed=1)
    if a.database == "postgresql":
        a.failovers = 0  # a slot survives a failover from PostgreSQL 17 on only
    ServerProcess.launch = staticmethod(forked.launch)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bridge-")))
        result = run(
            directory, stack, a.database, kills=a.kills, rotations=a.rotations, ddls=a.ddls, restarts=a.restarts,
            failovers=a.failovers, seed=a.seed,
        )  # fmt: skip
    return concluded(result["violations"], json.dumps(result))


if __name__ == "__main__":
    sys.exit(judged(main))
