"""Held keys on a server that is killed: the order of each key is kept over skips, and nothing is lost.

Some messages fail for ever, some until somebody retries them, and some are dropped by their consumers until the lease
runs out. An operator retries, releases and skips what is held, while the server is killed and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog

from notify.client.threads.loop import new_event_loop
from notify.client.transport.http import HttpClient
from notify.errors import Unavailable
from notify.protocol.wire import Delivered, Receive, Received, Settle, SettledItems, SettleItem, encode_msgpack
from notify.testing import forked
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import subscribe
from tests.support.http import admin, post
from tests.support.verdict import asserted, command_line, judged

TOPIC, GROUP = "steps", "held"
ATTEMPTS, DEATHS = 2, 2
LEASE = 1.0
POISONED, FLAKY, DROPPED = 0.05, 0.05, 0.01
"""The shares of messages that fail for ever, that fail until a person looks, and that are dropped at first."""


@dataclass
class Books:
    """The events that were seen and asked for; one event loop writes it, so that its order is that of the events."""

    fates: dict[str, str]
    """By a message's body `key.number`: what becomes of it."""
    seen: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    """Messages whose ack or skip was sent: from then on the next one of the key may come."""
    acked: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    """Messages whose ack, whose skip was answered."""
    last: dict[str, str] = field(default_factory=dict)
    """The last message of a key that came for the first time."""
    bodies: dict[str, str] = field(default_factory=dict)
    """Bodies by message id. A key is not always held by its last message: a skip that was not answered yet lets the
    next message come, and a kill takes it back."""
    looked_at: set[str] = field(default_factory=set)
    """Flaky messages that an operator has retried or released."""
    decided: int = 0
    violations: list[str] = field(default_factory=list)

    def came(self, message: Delivered) -> None:
        """Check the order of a key, and that nothing comes after its end was answered."""
        body = self.bodies[message.id] = message.body.decode()
        key, _, number = body.partition(".")
        if body in self.acked or body in self.skipped:
            self.violations.append(f"{body} came after its end was answered")
        if body in self.seen:
            return
        before = self.last.get(key)
        wanted = f"{key}.{int(number) - 1}" if int(number) else None
        if before != wanted or (before is not None and before not in self.asked):
            self.violations.append(f"{body} came first, and before it {before}, whose end was not asked for")
        self.last[key] = body
        self.seen.add(body)


async def consume(http: HttpClient, instance: str, books: Books, chance: random.Random) -> None:
    """Receive and settle until cancelled, over all lives of the server."""
    request = encode_msgpack(Receive(instance=instance, max=64, wait=0.2, lease=LEASE))
    while True:
        try:
            answer = await http.call("POST", f"/v1/groups/{GROUP}/receive", request, PATIENCE_SECONDS)
        except Unavailable:
            await asyncio.sleep(0.05)  # the server is unreachable
            continue
        received = msgspec.msgpack.decode(answer, type=Received).messages
        items, bodies = [], []
        for message in received:
            books.came(message)
            body = message.body.decode()
            action = _action(books, body)
            if action is not None:
                bodies.append(body)
                items.append(SettleItem(receipt=message.receipt, action=action, delay=0.0, reason=f"no step {body}"))
        books.asked.update(body for body, item in zip(bodies, items, strict=True) if item.action == "ack")
        if not items:
            continue
        if chance.random() < 0.1:
            await asyncio.sleep(0.01)  # so that leases are held while the server is killed
        with contextlib.suppress(Unavailable):
            sent = encode_msgpack(Settle(items))
            answer = await http.call("POST", f"/v1/groups/{GROUP}/settle", sent, PATIENCE_SECONDS)
            for body, item, settled in zip(
                bodies, items, msgspec.msgpack.decode(answer, type=SettledItems).items, strict=True
            ):
                if settled.status == 200 and item.action == "ack":
                    books.acked.add(body)


def _action(books: Books, body: str) -> str | None:
    """How a message is settled; None: its lease runs out."""
    fate = books.fates.get(body)
    if fate == "poisoned":
        return "retry"
    if fate in ("flaky", "dropped") and body not in books.looked_at:
        return "retry" if fate == "flaky" else None
    return "ack"


async def operate(http: HttpClient, books: Books, chance: random.Random) -> None:
    """Decide about what is held until cancelled: retry, release, and in the end skip what is poisoned."""
    while True:
        await asyncio.sleep(0.05)  # a person looks now and then; nothing tells that a key is held
        with contextlib.suppress(Unavailable):
            for row in (await _ask(http, "GET", "held-keys?max=1000"))["held"]:
                body = books.bodies[row["id"]]
                what = chance.choice(("retry", "release"))
                if books.fates.get(body) == "poisoned" and chance.random() < 0.5:
                    what = "skip"
                    books.asked.add(body)
                else:
                    books.looked_at.add(body)
                asked = {"ids": [row["id"]], "reason": f"about {body}"}
                (item,) = (await _ask(http, "POST", f"held-keys/{what}", asked))["result"]["items"]
                if item["status"] == 200:
                    books.decided += 1
                    if what == "skip":
                        books.skipped.add(body)


async def _ask(http: HttpClient, method: str, path: str, body: Any = None) -> Any:
    sent = b"" if body is None else json.dumps(body).encode()
    answer = await http.call(method, f"/v1/admin/groups/{GROUP}/{path}", sent, PATIENCE_SECONDS, "application/json")
    return json.loads(answer)


async def drain(server: ServerProcess, books: Books, bodies: int, consumers: int, kills: int, seed: int) -> None:
    """Consume everything; the kills come at equal parts of the way."""
    http = HttpClient(server.url)
    work = [consume(http, f"i{n}", books, random.Random(seed + n)) for n in range(consumers)]
    tasks = [asyncio.create_task(each) for each in (*work, operate(http, books, random.Random(seed - 1)))]
    try:
        killed, progress, deadline = 0, (0, 0), time.monotonic() + PATIENCE_SECONDS
        while True:
            await asyncio.sleep(0.05)  # the pause between two looks at the books
            for task in tasks:
                if task.done():
                    task.result()
            now = len(books.acked), len(books.skipped)
            if now != progress:
                progress, deadline = now, time.monotonic() + PATIENCE_SECONDS
            assert time.monotonic() < deadline, f"nothing went on: {len(books.seen):,} of {bodies:,} came, {now}"
            if killed < kills and len(books.seen) > bodies * (killed + 1) // (kills + 1):
                killed += 1
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            elif killed == kills and len(books.seen) == bodies:
                queues = (await asyncio.to_thread(admin, server.url, "GET", f"groups/{GROUP}"))["queues"]
                if not sum(queue["lag"] for queue in queues):
                    return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        http.close()


def run(keys: int, steps: int, consumers: int, kills: int, seed: int) -> str:
    """Drain `steps` messages of each of `keys` keys; what was found, in words. Raises AssertionError."""
    chance = random.Random(seed)
    bodies = [f"k{key}.{step}" for step in range(steps) for key in range(keys)]
    kinds = ("poisoned", "flaky", "dropped", "")
    weights = (POISONED, FLAKY, DROPPED, 1 - POISONED - FLAKY - DROPPED)
    fates = dict(zip(bodies, chance.choices(kinds, weights, k=len(bodies)), strict=True))
    books = Books({body: fate for body, fate in fates.items() if fate})
    with tempfile.TemporaryDirectory(prefix="notify-held-") as directory:
        server = ServerProcess(Path(directory) / "data").start()
        try:
            fields = {"max_attempts": ATTEMPTS, "max_deaths": DEATHS, "on_exhausted": "hold"}
            admin(server.url, "PUT", f"topics/{TOPIC}", {"queues": 4})
            subscribe(server.url, GROUP, TOPIC, mode="ordered", start="earliest", retry_min=0.01, **fields)
            for part in _parts(bodies, 1000):
                messages = [{"topic": TOPIC, "body": body, "key": body.partition(".")[0]} for body in part]
                items = post(server.url, "/v1/messages", {"messages": messages})["items"]
                assert {item["status"] for item in items} == {201}
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(drain(server, books, len(bodies), consumers, kills, seed))
            dead = sorted(_dead(server.url))
            still_held = admin(server.url, "GET", f"groups/{GROUP}/held-keys")["of"]
        finally:
            server.stop()
    poisoned = sorted(body for body, fate in fates.items() if fate == "poisoned")
    wrong = list(books.violations)
    wrong += [] if dead == poisoned else [f"{len(dead):,} dead letters of {len(poisoned):,} skipped messages"]
    wrong += [f"{still_held} keys are still held"] if still_held else []
    words = (
        f"{len(bodies):,} messages over {keys:,} keys, {books.decided:,} decisions about held keys, {len(dead):,} "
        f"skips, {kills} kills of the server: {len(wrong)} violations"
    )
    if wrong:
        raise AssertionError(f"{words}: {'; '.join(wrong[:5])}")
    return words


def _dead(url: str) -> Iterator[str]:
    """The bodies of all dead letters."""
    offset = 0
    while True:
        page = admin(url, "GET", f"groups/{GROUP}/dead-letters?max=10000&offset={offset}")
        yield from [letter["body"] for letter in page["messages"]]
        if page["next_offset"] in (0, offset):
            return
        offset = page["next_offset"]


def _parts(bodies: list[str], size: int) -> Iterator[list[str]]:
    for first in range(0, len(bodies), size):
        yield bodies[first : first + size]


def main() -> int:
    options = command_line(__doc__, keys=2_000, steps=25, consumers=4, kills=50, seed=None)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    ServerProcess.launch = staticmethod(forked.launch)
    return judged(lambda: asserted(lambda: run(**vars(options))))


if __name__ == "__main__":
    raise SystemExit(main())
