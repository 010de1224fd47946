"""Three stateless servers over one database, a queue server fed from it, load through the SDK; servers are killed.

Run as `python -m tests.crash.cluster --database mariadb --seconds 300`. The checks: no transaction is lost or doubled,
at least 99.9 % succeed with the SDK's retries, and no caller waits beyond its deadline. The last two hold only on a
machine that nothing else uses, so the short form in `make test` does not check them. With
`--kill-database` the database is killed and started again, too: then callers may fail while it is down.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify.cli.bench.verify import pulled
from notify.client.producer.packing import pack
from notify.client.producer.transactions import HALF_SECONDS, TransactionClient, accepted
from notify.client.transport.http import HttpClient
from notify.errors import NotFound, NotifyError, Unavailable
from notify.protocol import ids
from notify.protocol.message import Message
from notify.testing import forked
from notify.testing.databases import BINLOG_SERVERS
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually_async
from tests.support.commands import Command
from tests.support.servers import make_storage, stop_if_running
from tests.support.verdict import command_line, concluded, judged

TOPIC = "cluster"
KINDS = {"postgresql": PostgreSqlServer, **BINLOG_SERVERS}
SERVERS = 3
RECONNECT_SECONDS = 3.0
LATE_SECONDS = 1.0
"""The seconds by which a busy machine of two cores may exceed a deadline."""


@dataclass(slots=True)
class Seen:
    """The answers to the callers."""

    tried: int = 0
    acknowledged: list[str] = field(default_factory=list)
    uncertain: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    failed: int = 0
    failed_while_down: int = 0
    down: list[list[float]] = field(default_factory=list)
    """Times when the database was killed and when it answered again."""
    slowest: float = 0.0
    is_over: bool = False
    """Whether callers begin no more transactions."""
    errors: Counter[str] = field(default_factory=Counter)


class Cluster:
    """Servers over a database, a queue server, and the bridge or relay between them."""

    def __init__(self, dsn: str, directory: Path, stack: ExitStack) -> None:
        make_storage(dsn)
        flags = ["--storage", dsn]
        self.servers = [ServerProcess(directory / f"s{n}", flags=flags).start() for n in range(SERVERS)]
        for server in self.servers:
            stack.callback(stop_if_running, server)
        self.queue = ServerProcess(directory / "queue", flags=["--registry", dsn, "--roles", "queue"]).start()
        stack.callback(self.queue.stop)
        mover = "relay" if dsn.startswith("postgresql") else "bridge"
        self.mover = Command(mover, "--dsn", dsn, "--url", self.queue.url).start()
        stack.callback(self.mover.close)

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)


async def caller(client: TransactionClient, seen: Seen, chance: random.Random) -> None:
    """Store half and outcome repeatedly."""
    while not seen.is_over:
        name = ids.to_text(ids.new_id())
        began = time.monotonic()
        seen.tried += 1
        try:
            item = accepted(await client.half_soon(name, [pack(Message(TOPIC, name.encode()))]))
        except NotifyError as error:
            # The half may not be stored, so its local transaction does not commit.
            if any(began < end and time.monotonic() > start for start, end in seen.down):
                seen.failed_while_down += 1
            else:
                seen.failed += 1
                seen.errors[f"{type(error).__name__}: {error}"[:120]] += 1
            seen.rolled_back.add(name)
            seen.slowest = max(seen.slowest, time.monotonic() - began)
            await asyncio.sleep(0.05)  # the pause of a caller that was refused
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


Moments = Callable[[Seen], AsyncIterator[None]]
"""Yields whenever a server should be killed, and ends with the campaign."""


def by_clock(seconds: float, every: float, chance: random.Random) -> Moments:
    """Kill about every so many seconds."""

    async def moments(_: Seen) -> AsyncIterator[None]:
        until = time.monotonic() + seconds
        while time.monotonic() + every < until:
            await asyncio.sleep(every * chance.uniform(0.6, 1.4))  # the campaign's pace
            yield
        await asyncio.sleep(max(0.0, until - time.monotonic()))  # the campaign's length

    return moments


def by_progress(kills: int, transactions: int) -> Moments:
    """Kill so often, with so many acknowledged transactions before each kill and after the last one."""

    async def moments(seen: Seen) -> AsyncIterator[None]:
        for n in range(kills + 1):
            wanted = len(seen.acknowledged) + transactions
            await eventually_async(
                lambda wanted=wanted: len(seen.acknowledged) >= wanted,  # type: ignore[misc]
                f"{wanted} acknowledged transactions",
            )
            if n < kills:
                yield

    return moments


async def trouble(cluster: Cluster, seen: Seen, moments: Moments, chance: random.Random, report: Counter[str]) -> None:
    """Kill and restart servers."""
    async for _ in moments(seen):
        server = chance.choice(cluster.servers)
        await asyncio.to_thread(server.kill)
        report["kills"] += 1
        await asyncio.sleep(chance.uniform(0.2, 1.0))  # how long it is unreachable
        await _start(server, seen)


async def _start(server: ServerProcess, seen: Seen) -> None:
    """Start a server as a supervisor does: again, if it ended because the database was unreachable."""
    while True:
        try:
            await asyncio.to_thread(server.start)
            return
        except Unavailable:
            if not seen.down:
                raise
            await asyncio.sleep(1)  # the supervisor's pause


async def database_trouble(database: Any, seen: Seen, report: Counter[str]) -> None:
    """Kill and restart the database."""
    while not seen.is_over:
        await asyncio.sleep(12)  # the campaign's pace
        if seen.is_over:
            return
        outage = [time.monotonic(), float("inf")]
        seen.down.append(outage)
        await asyncio.to_thread(database.kill)
        await asyncio.sleep(1)  # how long it is unreachable
        await asyncio.to_thread(database.start)
        outage[1] = time.monotonic() + RECONNECT_SECONDS
        report["database_kills"] += 1


async def in_queue(url: str) -> Counter[str]:
    """The number of messages of each transaction in the queue."""
    http = HttpClient(url)
    counts: Counter[str] = Counter()
    try:
        async for m in pulled(http, TOPIC):
            counts[m.id.partition(".")[0]] += 1
            if m.body.decode() != m.id.partition(".")[0]:
                counts["other bytes"] += 1
        return counts
    except NotFound:
        return counts  # nothing has been moved yet: the first message makes the topic
    finally:
        http.close()


async def run(
    cluster: Cluster,
    moments: Moments,
    callers: int,
    seed: int,
    half_seconds: float = HALF_SECONDS,
    database: Any = None,
) -> dict[str, Any]:
    """Run the campaign. `half_seconds`: how long a caller waits; `database`: a database to kill, too, or None."""
    chance = random.Random(seed)
    seen = Seen()
    report: Counter[str] = Counter()
    clients = [TransactionClient(cluster.url, "orders", instance=f"i{n}", half_seconds=half_seconds) for n in range(2)]
    loads = [asyncio.ensure_future(caller(clients[n % 2], seen, random.Random(seed + n))) for n in range(callers)]
    if database is not None:
        loads.append(asyncio.ensure_future(database_trouble(database, seen, report)))
    try:
        await trouble(cluster, seen, moments, chance, report)
    finally:
        seen.is_over = True
        await asyncio.gather(*loads)
        for client in clients:
            await client.close()
    wanted = set(seen.acknowledged)
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    counts = await in_queue(cluster.queue.url)
    while not wanted <= counts.keys() and time.monotonic() < deadline:
        await asyncio.sleep(0.5)  # the pause between two looks
        counts = await in_queue(cluster.queue.url)
    ghosts = [name for name in counts if name in seen.rolled_back or name == "other bytes"]
    return {
        "transactions": seen.tried,
        "acknowledged": len(seen.acknowledged),
        "failed": seen.failed,
        "success": round(1 - seen.failed / max(1, seen.tried - seen.failed_while_down), 6),
        "slowest_seconds": round(seen.slowest, 3),
        "lost": len(wanted - counts.keys()),
        "doubled": sum(1 for n in counts.values() if n > 1),
        "ghosts": len(ghosts),
        "kills": report["kills"],
        "database_kills": report["database_kills"],
        "failed_while_down": seen.failed_while_down,
        "errors": dict(seen.errors.most_common(5)),
    }


def broken(result: dict[str, Any]) -> list[str]:
    """The broken promises of a run that hold on any machine."""
    return [f"{kind} {result[kind]}" for kind in ("lost", "doubled", "ghosts") if result[kind]]


def verdict(result: dict[str, Any]) -> list[str]:
    """The broken promises of a run on a machine that nothing else uses."""
    bad = broken(result)
    if result["success"] < 0.999:
        bad.append(f"only {result['success']:.4%} succeeded: {result['errors']}")
    if result["slowest_seconds"] > HALF_SECONDS + LATE_SECONDS:
        bad.append(f"a caller waited {result['slowest_seconds']} s")
    return bad


def main() -> int:
    a = command_line(
        __doc__, database=tuple(sorted(KINDS)), seconds=300.0, every=4.0, callers=64, seed=1, kill_database=False
    )
    ServerProcess.launch = staticmethod(forked.launch)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-d-")))
        database = KINDS[a.database](place).create()
        stack.callback(database.stop)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-cluster-")))
        cluster = Cluster(database.url, directory, stack)
        moments = by_clock(a.seconds, a.every, random.Random(a.seed))
        killed = database if a.kill_database else None
        result = asyncio.run(run(cluster, moments, a.callers, a.seed, database=killed))
    return concluded(verdict(result), json.dumps(result))


if __name__ == "__main__":
    sys.exit(judged(main))
