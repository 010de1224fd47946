"""Three stateless servers over one database, a queue server fed from it, load through the SDK; servers are killed.

Run as `python -m tests.crash.cluster --database mariadb --seconds 300`. What is checked: at least 99.9 % of the
transactions succeed with the SDK's retries, none is lost or doubled, and no caller waits beyond its deadline. With
`--kill-database` the database is killed and started again, too: then callers may fail while it is down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify import ids
from notify.bench.verify import pulled
from notify.client.http import HttpClient
from notify.client.transactions import HALF_SECONDS, TransactionClient, accepted, pack
from notify.errors import NotifyError
from notify.message import Message
from notify.testing.process import ServerProcess
from storage.sql import schema
from storage.sql.dialects import open_engine
from tests.support import databases

TOPIC = "cluster"
SERVERS = 3
RECONNECT_SECONDS = 3.0
LATE_SECONDS = 1.0
"""What a busy machine of two cores may add to a deadline."""


@dataclass(slots=True)
class Seen:
    """What the callers saw."""

    tried: int = 0
    acknowledged: list[str] = field(default_factory=list)
    uncertain: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    failed: int = 0
    failed_while_down: int = 0
    down: list[list[float]] = field(default_factory=list)
    """When the database was killed, and when it answered again."""
    slowest: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


class Mover:
    """A `notify bridge` or `notify relay` process."""

    def __init__(self, dsn: str, queue_url: str) -> None:
        what = "relay" if dsn.startswith(("postgresql", "sqlite")) else "bridge"
        self._command = [sys.executable, "-m", "notify.cli.main", what, "--dsn", dsn, "--url", queue_url]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


class Cluster:
    """Servers over a database, a queue server, and what moves between them."""

    def __init__(self, dsn: str, directory: Path, stack: ExitStack) -> None:
        engine = open_engine(dsn)
        schema.upgrade(engine, "main")
        engine.dispose()
        self.dsn = dsn
        flags = ["--storage", dsn]
        self.servers = [ServerProcess(directory / f"s{n}", flags=flags).start() for n in range(SERVERS)]
        for server in self.servers:
            stack.callback(_stop, server)
        self.queue = ServerProcess(directory / "queue", flags=["--registry", dsn, "--roles", "queue"]).start()
        stack.callback(self.queue.stop)
        self.mover = Mover(dsn, self.queue.url)
        self.mover.start()
        stack.callback(self.mover.stop)

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)


def _stop(server: ServerProcess) -> None:
    if server.process is not None and server.process.poll() is None:
        server.stop()


async def caller(client: TransactionClient, seen: Seen, until: float, chance: random.Random) -> None:
    """Half, outcome, again."""
    while time.monotonic() < until:
        name = ids.to_text(ids.new_id())
        began = time.monotonic()
        seen.tried += 1
        try:
            item = accepted(await client.half_soon(name, [pack(Message(TOPIC, name.encode()))]))
        except NotifyError as error:
            # A half that nobody may have heard of: its local transaction does not commit.
            if any(began < end and time.monotonic() > start for start, end in seen.down):
                seen.failed_while_down += 1
            else:
                seen.failed += 1
                seen.errors[f"{type(error).__name__}: {error}"[:120]] += 1
            seen.rolled_back.add(name)
            seen.slowest = max(seen.slowest, time.monotonic() - began)
            await asyncio.sleep(0.05)
            continue
        seen.slowest = max(seen.slowest, time.monotonic() - began)
        commit = chance.random() < 0.9
        (seen.uncertain if commit else seen.rolled_back).add(name)
        try:
            outcome = await client.outcome_soon(item.id, item.shard, "COMMIT" if commit else "ROLLBACK")
        except NotifyError as error:
            seen.errors[f"outcome {type(error).__name__}"] += 1
            continue
        if commit and outcome.status == 200:
            seen.uncertain.discard(name)
            seen.acknowledged.append(name)


async def trouble(cluster: Cluster, until: float, every: float, chance: random.Random, report: dict[str, int]) -> None:
    """Kill a server now and then, and start it again."""
    while time.monotonic() + every < until:
        await asyncio.sleep(every * chance.uniform(0.6, 1.4))
        server = chance.choice(cluster.servers)
        await asyncio.to_thread(server.kill)
        report["kills"] = report.get("kills", 0) + 1
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        await asyncio.to_thread(server.start)


async def database_trouble(database: Any, seen: Seen, until: float, report: dict[str, int]) -> None:
    """Kill the database now and then, and start it again."""
    while time.monotonic() + 20 < until:
        await asyncio.sleep(12)
        outage = [time.monotonic(), float("inf")]
        seen.down.append(outage)
        await asyncio.to_thread(database.kill)
        await asyncio.sleep(1)
        await asyncio.to_thread(database.start)
        outage[1] = time.monotonic() + RECONNECT_SECONDS
        report["database_kills"] = report.get("database_kills", 0) + 1


async def in_queue(url: str) -> Counter[str]:
    """How often each transaction is in the queue."""
    http = HttpClient(url)
    found: Counter[str] = Counter()
    try:
        async for m in pulled(http, TOPIC):
            found[m.id.partition(".")[0]] += 1
            if m.body.decode() != m.id.partition(".")[0]:
                found["other bytes"] += 1
        return found
    finally:
        http.close()


async def run(
    cluster: Cluster, seconds: float, every: float, callers: int, seed: int, database: Any = None
) -> dict[str, Any]:
    """The campaign; with `database` (something with kill and start) that is killed, too."""
    chance = random.Random(seed)
    seen = Seen()
    report: dict[str, int] = {}
    clients = [TransactionClient(cluster.url, "orders", instance=f"i{n}") for n in range(2)]
    until = time.monotonic() + seconds
    loads = [caller(clients[n % 2], seen, until, random.Random(seed + n)) for n in range(callers)]
    if database is not None:
        loads.append(database_trouble(database, seen, until, report))
    await asyncio.gather(trouble(cluster, until, every, chance, report), *loads)
    for client in clients:
        await client.close()
    deadline = time.monotonic() + 60
    wanted = set(seen.acknowledged)
    found: Counter[str] = Counter()
    while time.monotonic() < deadline:
        found = await in_queue(cluster.queue.url)
        if wanted <= found.keys():
            break
        await asyncio.sleep(0.5)
    ghosts = [name for name in found if name in seen.rolled_back or name == "other bytes"]
    return {
        "transactions": seen.tried,
        "acknowledged": len(seen.acknowledged),
        "failed": seen.failed,
        "success": round(1 - seen.failed / max(1, seen.tried - seen.failed_while_down), 6),
        "slowest_seconds": round(seen.slowest, 3),
        "lost": len(wanted - found.keys()),
        "doubled": sum(1 for n in found.values() if n > 1),
        "ghosts": len(ghosts),
        "kills": report.get("kills", 0),
        "database_kills": report.get("database_kills", 0),
        "failed_while_down": seen.failed_while_down,
        "errors": dict(seen.errors.most_common(5)),
    }


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong with a run; empty if nothing is."""
    bad = [f"{what} {result[what]}" for what in ("lost", "doubled", "ghosts") if result[what]]
    if result["success"] < 0.999:
        bad.append(f"only {result['success']:.4%} succeeded: {result['errors']}")
    if result["slowest_seconds"] > HALF_SECONDS + LATE_SECONDS:
        bad.append(f"a caller waited {result['slowest_seconds']} s")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", choices=("mariadb", "postgresql"), default="mariadb")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-database", action="store_true")
    a = parser.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-d-")))
        kind = databases.PostgreSqlServer if a.database == "postgresql" else databases.MariaDbServer
        database = kind(place).create()
        stack.callback(database.stop)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-cluster-")))
        cluster = Cluster(database.url, directory, stack)
        killed = database if a.kill_database else None
        result = asyncio.run(run(cluster, a.seconds, a.every, a.callers, a.seed, killed))
    print(json.dumps(result))
    bad = verdict(result)
    print(f"VERDICT: {'FAIL ' + '; '.join(bad) if bad else 'PASS'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
