"""Tenants that take turns on a server that is killed: one with very many messages, and many with a few.

The few are sent in pairs of rounds: to a topic of their own, then to that of the many, whose consumers are the same. A
wait is the time from the send to the ack, and the number of messages that were handed out meanwhile. Consumers are slow
at that time; then they drain the rest.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec
import structlog

from notify.client.threads.loop import new_event_loop
from notify.client.transport.http import HttpClient
from notify.errors import Unavailable
from notify.protocol import ids
from notify.protocol.wire import Delivered, Receive, Received, Settle, SettledItems, SettleItem, encode_msgpack
from notify.testing import forked
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import lag, subscribe
from tests.support.http import admin
from tests.support.verdict import asserted, command_line, judged

ALONE, FAIR, LARGE = "alone", "fair", "large"
"""Two groups, each with a topic of its name, and the tenant with the many messages."""
WARM = 500
"""So many messages of the many are handled before the first round, so that the group has looked through them."""
MOST_RATIO = 1.5
"""How much longer the few may wait with the many."""
EACH = 10
"""The messages of a small tenant in a round."""
HANDLED_SECONDS = 0.001
"""How long a consumer takes for a message in a round."""
FAILED, DROPPED = 0.02, 0.005
"""The shares of messages that fail at first, and that are not settled, so that their lease runs out."""
KEYS = 500
"""The most keys of a tenant in mode ordered."""
SENT_AT_ONCE = 2_000


class Round(NamedTuple):
    """How long the messages of the small tenants waited, on average."""

    seconds: float
    messages: float
    """How many messages were handed out meanwhile."""


@dataclass
class Books:
    """Messages that were sent, came and were settled. One event loop writes it: its order is that of the events."""

    is_ordered: bool
    sent: dict[str, int] = field(default_factory=dict)
    """The messages of each tenant so far: their bodies are `tenant.0` and so on."""
    acked: dict[str, bytearray] = field(default_factory=dict)
    """By tenant, for each message whether its ack was answered."""
    asked: dict[str, bytearray] = field(default_factory=dict)
    """By tenant, for each message whether its ack was sent."""
    unsure: set[str] = field(default_factory=set)
    """Messages whose ack was not answered, and may be recorded: they may come again, or not."""
    acks: int = 0
    handed: int = 0
    again: int = 0
    """Messages that came again."""
    awaited: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The messages of this round: when they were sent, and how many had been handed out by then."""
    waits: list[Round] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    """In mode ordered: the last message of a key that came for the first time."""
    violations: list[str] = field(default_factory=list)

    def send(self, tenant: str, count: int) -> list[str]:
        """The bodies of the tenant's next messages."""
        first = self.sent.get(tenant, 0)
        self.sent[tenant] = first + count
        for flags in (self.acked, self.asked):
            flags.setdefault(tenant, bytearray()).extend(bytes(count))
        return [f"{tenant}.{number}" for number in range(first, first + count)]

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def came(self, message: Delivered) -> None:
        """Check that nothing comes after its ack was answered and, in mode ordered, that a key is in order."""
        body = message.body.decode()
        tenant, _, number = body.partition(".")
        self.handed += 1
        self.again += message.attempt > 1
        if self.acked[tenant][int(number)]:
            self.violations.append(f"{body} came after its ack was answered")
        if not self.is_ordered:
            return
        key = key_of(body)
        before = self.last.get(key, -1)
        if int(number) > before:
            if before >= 0 and not self.asked[tenant][before]:
                self.violations.append(f"{body} came before the ack of {tenant}.{before} was sent")
            self.last[key] = int(number)

    def settled(self, body: str) -> None:
        tenant, _, number = body.partition(".")
        self.acks += not self.acked[tenant][int(number)]
        self.acked[tenant][int(number)] = 1
        self.unsure.discard(body)
        awaited = self.awaited.pop(body, None)
        if awaited is not None:
            at, handed = awaited
            self.waits.append(Round(time.monotonic() - at, self.handed - handed))

    def is_unsure(self, body: str) -> None:
        """Note that an ack was not answered."""
        tenant, _, number = body.partition(".")
        if not self.acked[tenant][int(number)]:
            self.unsure.add(body)
            self.awaited.pop(body, None)

    @property
    def is_done(self) -> bool:
        return self.acks + len(self.unsure) == self.total


def key_of(body: str) -> str:
    """The key of a message in mode ordered."""
    tenant, _, number = body.partition(".")
    return f"{tenant}/{int(number) % KEYS}"


@dataclass
class Pace:
    """How fast consumers are, and whose messages they receive; they look at it before each request."""

    slow: bool = True
    group: str = ALONE

    @property
    def at_once(self) -> int:
        return 16 if self.slow else 1000


async def consume(http: HttpClient, instance: str, books: Books, pace: Pace, chance: random.Random) -> None:
    """Receive and settle until cancelled, over all lives of the server."""
    while True:
        group = pace.group
        request = encode_msgpack(Receive(instance=instance, max=pace.at_once, wait=0.05, lease=10))
        try:
            answer = await http.call("POST", f"/v1/groups/{group}/receive", request, PATIENCE_SECONDS)
        except Unavailable:
            await asyncio.sleep(0.05)  # the server is unreachable
            continue
        received = msgspec.msgpack.decode(answer, type=Received).messages
        for message in received:
            books.came(message)
        items, bodies = [], []
        for message in received:
            body = message.body.decode()
            fate = chance.random() if message.attempt == 1 else 1.0
            if pace.slow:
                await asyncio.sleep(HANDLED_SECONDS)  # this is the work
            if FAILED <= fate < FAILED + DROPPED and not pace.slow:
                continue
            action = "retry" if fate < FAILED else "ack"
            bodies.append(body)
            items.append(SettleItem(receipt=message.receipt, action=action, delay=0.0))
        for body, item in zip(bodies, items, strict=True):
            if item.action == "ack":
                tenant, _, number = body.partition(".")
                books.asked[tenant][int(number)] = 1
        if items:
            await _settle(http, group, items, bodies, books)


async def _settle(http: HttpClient, group: str, items: list[SettleItem], bodies: list[str], books: Books) -> None:
    try:
        sent = encode_msgpack(Settle(items))
        answer = await http.call("POST", f"/v1/groups/{group}/settle", sent, PATIENCE_SECONDS)
    except Unavailable:
        for body, item in zip(bodies, items, strict=True):
            if item.action == "ack":
                books.is_unsure(body)
        return
    answered = msgspec.msgpack.decode(answer, type=SettledItems).items
    for body, item, settled in zip(bodies, items, answered, strict=True):
        if settled.status == 200 and item.action == "ack":
            books.settled(body)


async def send(http: HttpClient, topic: str, bodies: list[str], *, is_ordered: bool) -> None:
    """Send messages whose tenant is in a header, and is the key in mode shared; sent again until they are stored."""
    for first in range(0, len(bodies), SENT_AT_ONCE):
        messages = [
            {
                "id": ids.message_id(ids.new_id(), 0),
                "topic": topic,
                "body": body,
                "key": key_of(body) if is_ordered else body.partition(".")[0],
                "headers": {"tenant": body.partition(".")[0]},
            }
            for body in bodies[first : first + SENT_AT_ONCE]
        ]
        sent = json.dumps({"messages": messages}).encode()
        while True:
            try:
                answer = await http.call("POST", "/v1/messages", sent, PATIENCE_SECONDS, "application/json")
            except Unavailable:
                await asyncio.sleep(0.05)  # the same ids are sent again
                continue
            assert {item["status"] for item in json.loads(answer)["items"]} <= {200, 201}
            break


async def until(done: Callable[[], bool], books: Books, tasks: list[asyncio.Task[None]], what: str) -> None:
    """Wait while consumers work. Raises AssertionError if they get nothing for a long time."""
    progress, deadline = books.acks, time.monotonic() + PATIENCE_SECONDS
    while not done():
        await asyncio.sleep(0.01)  # the pause between two looks at the books
        for task in tasks:
            if task.done():
                task.result()
        if books.acks != progress:
            progress, deadline = books.acks, time.monotonic() + PATIENCE_SECONDS
        assert time.monotonic() < deadline, f"waited for {what}: {books.acks:,} of {books.total:,} are acknowledged"


async def play(
    server: ServerProcess, books: Books, large: int, small: int, rounds: int, kills: int, seed: int
) -> tuple[float, float]:
    """All rounds, then the rest; how much longer the few waited with the many: in seconds, and in messages.

    Raises AssertionError.
    """
    http = HttpClient(server.url)
    pace = Pace()
    tasks: list[asyncio.Task[None]] = []

    async def round_of(group: str, when_killed: int = 0) -> Round:
        """The few are sent at once; with `when_killed` the server is killed after so many acks of them."""
        pace.group = group
        bodies = [body for n in range(small) for body in books.send(f"small{n}", EACH)]
        random.Random(seed + len(bodies)).shuffle(bodies)
        if books.is_ordered:
            bodies.sort(key=lambda body: int(body.partition(".")[2]))
        books.waits.clear()
        now = time.monotonic(), books.handed
        books.awaited = dict.fromkeys(bodies, now)
        await send(http, group, bodies, is_ordered=books.is_ordered)
        if when_killed:
            await until(lambda: len(books.waits) >= when_killed, books, tasks, "the acks before a kill")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        await until(lambda: not books.awaited, books, tasks, "the few")
        return Round(mean(w.seconds for w in books.waits), mean(w.messages for w in books.waits))

    try:
        tasks += [asyncio.create_task(consume(http, f"i{n}", books, pace, random.Random(seed + n))) for n in range(4)]
        await send(http, FAIR, books.send(LARGE, large), is_ordered=books.is_ordered)
        pace.group = FAIR
        await until(lambda: books.acks >= WARM, books, tasks, "the first of the many")
        alone, together = [], []
        for number in range(max(rounds, kills)):
            if number < rounds:
                alone.append(await round_of(ALONE))
                together.append(await round_of(FAIR))
            if number < kills:
                await round_of(FAIR, when_killed=small * EACH // 3)
        left = large - sum(books.acked[LARGE])
        if left < large // 2:
            books.violations.append(f"of the many only {left:,} were left, so that the few did not wait with them")
        pace.slow = False
        await until(lambda: books.is_done, books, tasks, "the rest")
        for group in (FAIR, ALONE):
            pace.group = group
            await asyncio.to_thread(eventually, lambda g=group: not lag(server.url, g), "what may come again")  # type: ignore[misc]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        http.close()
    seconds = mean(r.seconds for r in together) / mean(r.seconds for r in alone)
    messages = mean(r.messages for r in together) / mean(r.messages for r in alone)
    return seconds, messages


def run(
    large: int, small: int, rounds: int, kills: int, mode: str, fair_by: str, seed: int, *, is_timed: bool = True
) -> str:
    """Play with `large` messages of one tenant and `small` tenants of EACH; what was found, in words.

    `is_timed`: whether the seconds count, and not only the messages. Raises AssertionError.
    """
    books = Books(mode == "ordered")
    with tempfile.TemporaryDirectory(prefix="notify-fair-") as directory:
        server = ServerProcess(Path(directory) / "data").start()
        try:
            for group in (ALONE, FAIR):
                subscribe(server.url, group, group, mode=mode, start="earliest", fair_by=fair_by, max_attempts=1000)
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                seconds, waited = runner.run(play(server, books, large, small, rounds, kills, seed))
            dead = admin(server.url, "GET", f"groups/{FAIR}/dead-letters")["messages"]
            if dead:
                books.violations.append(f"{len(dead)} dead letters")
        finally:
            server.stop()
    if max(seconds if is_timed else 0.0, waited) > MOST_RATIO:
        books.violations.append(f"the few waited more than {MOST_RATIO} times as long")
    words = (
        f"{large:,} messages of one tenant and {books.total - large:,} of {small} others, mode {mode}, by {fair_by}: "
        f"the few waited {seconds:.2f} times as long with the many, {waited:.2f} times as many messages; {kills} "
        f"kills of the server, {books.again:,} messages came again: {len(books.violations)} violations"
    )
    if books.violations:
        raise AssertionError(f"{words}: {'; '.join(books.violations[:5])}")
    return words


def main() -> int:
    o = command_line(
        __doc__, messages=1_000_000, tenants=99, rounds=5, kills=5, mode="shared", fair_by="key", seed=None
    )
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    ServerProcess.launch = staticmethod(forked.launch)
    return judged(lambda: asserted(lambda: run(o.messages, o.tenants, o.rounds, o.kills, o.mode, o.fair_by, o.seed)))


if __name__ == "__main__":
    raise SystemExit(main())
