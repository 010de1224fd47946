"""Two servers over one SQL storage, one of an earlier version and one of this one, while one of them changes its
version and changes back under load: a rolling upgrade, and a rolling way back.

Producers prepare halves, decide some of them, leave the outcome of others to check-back, and publish; a bridge or
relay, which is killed too, moves what is committed to a queue server. `broken` says what may not be: a transaction
lost, doubled, or with another outcome than its producer meant; an answer 5xx of a server that was not killed just then.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec

from notify.check.listener import CheckMessageListener, HalfMessage, Outcome
from notify.cli.bench.verify import pulled
from notify.client.producer.checker import Checker
from notify.client.producer.packing import pack
from notify.client.producer.transactions import TransactionClient, accepted
from notify.client.transport.http import HttpClient
from notify.errors import NotFound, NotifyError
from notify.protocol import ids
from notify.protocol.message import Message
from notify.protocol.wire import Items, OutcomeItem, Outcomes, encode_msgpack
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually_async
from tests.support.commands import Command
from tests.support.servers import make_storage, stop_if_running
from tests.support.versions import Launch, launched_in

TOPIC, GROUP = "rolling", "shop"
CHECK_AFTER_SECONDS = 0.5
QUICK_CHECKS = {"NOTIFY_CHECK_BACKOFF_SECONDS": "0.2"}
PACE_SECONDS = 0.02
"""Between two transactions of a caller: the servers' starts need the processor, too."""
LEFT_TO_CHECKS, PUBLISHED = 0.2, 0.2
"""Shares of what a caller does."""


@dataclass(slots=True)
class Seen:
    """The producers' intended outcomes, and the answers that they got."""

    meant: dict[str, str] = field(default_factory=dict)
    """By transaction: COMMIT or ROLLBACK; one that was published is a COMMIT."""
    unsure: set[str] = field(default_factory=set)
    """The server may or may not have them: their halves or messages were not answered."""
    done: int = 0
    left_to_checks: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    away: dict[str, list[list[float]]] = field(default_factory=dict)
    """By server: from when to when it was unreachable."""
    failures: list[tuple[str, float, str]] = field(default_factory=list)
    """Every 5xx: the server, when, and what it said."""
    is_over: bool = False

    def note(self, url: str, status: int, said: object) -> None:
        if status >= 500:
            self.failures.append((url, time.monotonic(), f"{status} {said!r:.200}"))

    def failures_while_up(self) -> list[str]:
        return [
            f"{url} {said}"
            for url, at, said in self.failures
            if not any(start <= at <= end for start, end in self.away.get(url, ()))
        ]


class Books(CheckMessageListener):
    """Answers checks by what was meant; each second transaction's first check with UNKNOWN."""

    topics: ClassVar[Sequence[str]] = (TOPIC,)

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def check(self, half: HalfMessage) -> Outcome:
        meant = self._seen.meant[half.id]
        return Outcome.UNKNOWN if half.attempt == 1 and half.id[-1] in "02468ace" else Outcome[meant]


class Rolling:
    """Two servers and a mover that may run either version, a queue server of this one, over one empty database."""

    def __init__(self, dsn: str, earlier_version: Path, directory: Path, stack: ExitStack) -> None:
        self._code = earlier_version
        self.earlier: Launch = launched_in(earlier_version)
        self.now: Launch = ServerProcess.launch
        upgrade = self.earlier(["storage", "upgrade", "--storage", dsn], {})
        said, _ = upgrade.communicate(timeout=PATIENCE_SECONDS)  # type: ignore[attr-defined]
        assert upgrade.returncode == 0, said
        make_storage(dsn)
        flags = ["--storage", dsn]
        self.a, self.b = (ServerProcess(directory / name, environment=QUICK_CHECKS, flags=flags) for name in "ab")
        self.servers = (self.a, self.b)
        self.a.launch = self.earlier  # type: ignore[misc]
        self.queue = ServerProcess(directory / "queue", flags=["--registry", dsn, "--roles", "queue"])
        with ThreadPoolExecutor() as threads:
            for started in [threads.submit(server.start) for server in (*self.servers, self.queue)]:
                stack.callback(stop_if_running, started.result())
        mover = "relay" if dsn.startswith("postgresql") else "bridge"
        self.mover = Command(mover, "--dsn", dsn, "--url", self.queue.url)
        self.mover.launch = self.earlier
        stack.callback(self.mover.close)
        self.mover.start()

    def is_earlier(self, server: ServerProcess) -> bool:
        """Whether a server runs the earlier version's code."""
        assert server.process is not None
        return Path(f"/proc/{server.process.pid}/cwd").resolve() == self._code.resolve()

    def change(self, server: ServerProcess, launch: Launch, seen: Seen) -> None:
        """Kill a server and start it again in another version; the mover, too."""
        away = [time.monotonic(), float("inf")]
        seen.away.setdefault(server.url, []).append(away)
        server.kill()
        self.mover.kill()
        server.launch = launch  # type: ignore[misc]
        self.mover.launch = launch
        self.mover.start()
        server.start()
        away[1] = time.monotonic()


@contextmanager
def answers_noted(seen: Seen) -> Iterator[None]:
    """Note every answer of a server that is 5xx, also where the SDK sends the request again."""
    ask = HttpClient.ask

    async def noted(self: HttpClient, method: str, path: str, *rest: Any) -> tuple[int, bytes]:
        status, answer = await ask(self, method, path, *rest)
        seen.note(self.url, status, answer)
        if status == 200 and path in ("/v1/transactions", "/v1/transactions/outcomes", "/v1/messages"):
            for item in msgspec.msgpack.decode(answer, type=Items).items:
                seen.note(self.url, item.status, item)
        return status, answer

    with mock.patch.object(HttpClient, "ask", noted):
        yield


async def caller(client: TransactionClient, seen: Seen, chance: random.Random) -> None:
    """Publish, or prepare and decide, or prepare and leave it to check-back; again."""
    while not seen.is_over:
        name = ids.to_text(ids.new_id())
        seen.meant[name] = meant = "COMMIT" if chance.random() < 0.8 else "ROLLBACK"
        try:
            if chance.random() < PUBLISHED:
                del seen.meant[name]
                name = (await client.publish(pack(Message(TOPIC, b"published")))).partition(".")[0]
                seen.meant[name] = "COMMIT"
            else:
                half = client.half_soon(name, [pack(Message(TOPIC, name.encode()))], check_after=CHECK_AFTER_SECONDS)
                item = accepted(await half)
                if chance.random() < LEFT_TO_CHECKS:
                    seen.left_to_checks += 1
                else:
                    await client.outcome_soon(item.id, item.shard, meant)
        except NotifyError as error:
            seen.unsure.add(name)
            seen.refused[f"{type(error).__name__}: {error}"[:200]] += 1
            continue
        seen.done += 1
        await asyncio.sleep(PACE_SECONDS)  # the load's pace


async def run(
    rolling: Rolling, steps: Sequence[tuple[ServerProcess, Launch]], each: int, callers: int
) -> dict[str, Any]:
    """Load through both servers; before each step, and after the last, `each` transactions are done."""
    seen = Seen()
    urls = ",".join(server.url for server in rolling.servers)
    clients = [TransactionClient(urls, GROUP, instance=f"i{n}", half_seconds=PATIENCE_SECONDS) for n in range(2)]
    checkers = [Checker(client, None, [Books(seen)]) for client in clients]
    with answers_noted(seen):
        answering = [asyncio.create_task(checker.run()) for checker in checkers]
        loads = [asyncio.create_task(caller(clients[n % 2], seen, random.Random(n))) for n in range(callers)]
        try:
            for server, launch in [*steps, (None, None)]:
                wanted = seen.done + each
                await eventually_async(lambda wanted=wanted: seen.done >= wanted, "the load to continue")  # type: ignore[misc]
                if server is not None:
                    await asyncio.to_thread(rolling.change, server, launch, seen)
                    assert rolling.is_earlier(server) == (launch is rolling.earlier)
            seen.is_over = True
            await asyncio.gather(*loads)
            counts = await _until_moved(rolling, seen)
            states = await _states(rolling, seen)
        finally:
            for task in (*loads, *answering):
                task.cancel()
            await asyncio.gather(*loads, *answering, return_exceptions=True)
            for checker, client in zip(checkers, clients, strict=True):
                await checker.close()
                await client.close()
    return {
        "transactions": len(seen.meant),
        "left_to_checks": seen.left_to_checks,
        "answered": sum(checker.answered for checker in checkers),
        "refused": dict(seen.refused),
        "states": states,
        "moved": counts,
        "meant": seen.meant,
        "unsure": seen.unsure,
        "failures": seen.failures_while_up(),
    }


async def _until_moved(rolling: Rolling, seen: Seen) -> Counter[str]:
    """How often each transaction is in the queue, once all that were meant to be are, or patience is over."""
    wanted = {name for name, meant in seen.meant.items() if meant == "COMMIT" and name not in seen.unsure}
    deadline = time.monotonic() + PATIENCE_SECONDS
    http = HttpClient(rolling.queue.url)
    try:
        while True:
            counts: Counter[str] = Counter()
            try:
                async for message in pulled(http, TOPIC):
                    counts[message.id.partition(".")[0]] += 1
            except NotFound:
                pass  # nothing has been moved yet: the first message makes the topic
            if wanted <= counts.keys() or time.monotonic() > deadline:
                return counts
            await asyncio.sleep(0.2)  # the pause between two looks
    finally:
        http.close()


async def _states(rolling: Rolling, seen: Seen) -> dict[str, list[int]]:
    """Each server's answers to the intended outcome, and to the opposite one: 200, and 409."""
    opposite = {"COMMIT": "ROLLBACK", "ROLLBACK": "COMMIT"}
    names = [name for name in seen.meant if name not in seen.unsure]
    statuses: dict[str, list[int]] = {name: [] for name in names}
    for server in rolling.servers:
        http = HttpClient(server.url)
        try:
            for turned in (False, True):
                wanted = {name: opposite[seen.meant[name]] if turned else seen.meant[name] for name in names}
                outcomes = [OutcomeItem(id=name, outcome=wanted[name], shard="main") for name in names]
                for first in range(0, len(outcomes), 1000):
                    body = encode_msgpack(Outcomes(producer_group=GROUP, outcomes=outcomes[first : first + 1000]))
                    answer = await http.call("POST", "/v1/transactions/outcomes", body, PATIENCE_SECONDS)
                    for item in msgspec.msgpack.decode(answer, type=Items).items:
                        statuses[item.id].append(item.status)
        finally:
            http.close()
    return statuses


def broken(result: dict[str, Any]) -> list[str]:
    """A run's violations of the promises; empty if there are none."""
    bad = list(result["failures"])
    for name, meant in result["meant"].items():
        times = result["moved"][name]
        if times > 1:
            bad.append(f"{name} is doubled: {times} times in the queue")
        if name in result["unsure"]:
            continue
        if meant == "COMMIT" and not times:
            bad.append(f"{name} is lost")
        if meant == "ROLLBACK" and times:
            bad.append(f"{name} was rolled back and is in the queue")
        if result["states"][name] != [200, 409, 200, 409]:
            bad.append(f"{name} has another outcome than {meant}: {result['states'][name]}")
    bad += [f"{name} is in the queue, and nobody sent it" for name in result["moved"].keys() - result["meant"].keys()]
    return bad
