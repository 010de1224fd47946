"""Delayed messages that are cancelled and replaced at the instant of their release, on a server that is killed then.

A round's messages are due at one instant. Around it, some are cancelled and some replaced, within transactions and
without, and the server is killed. In the end each message was delivered or withdrawn, never both; of a message and its
replacement one was delivered; and what the server said of a withdrawal before a kill holds after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import structlog

from notify.client.threads.loop import new_event_loop
from notify.client.transport.http import HttpClient
from notify.errors import NotFound, Unavailable
from notify.protocol import ids
from notify.protocol.wire import Delivered, Receive, Received, Settle, SettleItem, encode_msgpack
from notify.protocol.withdrawal import CANCELS, REPLACES
from notify.testing import forked
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import subscribe
from tests.support.http import admin, metric
from tests.support.verdict import asserted, command_line, judged

TOPIC, GROUP, PRODUCERS = "reminders", "withdrawn", "shop"
AHEAD_SECONDS, BEFORE_SECONDS, AFTER_SECONDS = 0.5, 0.2, 0.03
"""How long before the instant of a round its messages are sent; and how long before and after it all else happens, of
which much takes effect later, since the requests wait for each other."""
WITHDRAWN_SHARE, REPLACED_SHARE, EARLY_SHARE = 0.5, 0.5, 0.05
"""The shares of messages that are withdrawn, of these that are replaced, and of these that are withdrawn before they
come."""

ANSWER_SECONDS = 15.0
"""How long a request waits. On a slow machine hundreds wait for each other; to give up sooner would repeat them all."""


@dataclass
class Books:
    """Everything that was sent, said and delivered."""

    sent: dict[str, str] = field(default_factory=dict)
    """The body of each message, by its id."""
    withdrawals: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """By the id of a withdrawal, its message, and whether it replaces it."""
    delivered: Counter[str] = field(default_factory=Counter)
    said: dict[str, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


class Server:
    """Requests that are repeated until the server, which may be unreachable, answers."""

    def __init__(self, url: str) -> None:
        self.http = HttpClient(url)

    async def until_answered(self, ask: Callable[[], Awaitable[bytes]]) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return json.loads(await ask())
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"the server does not come back: {error}") from error
                await asyncio.sleep(0.02)  # it is unreachable

    async def post(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        return await self.until_answered(lambda: self.http.call("POST", path, data, ANSWER_SECONDS, "application/json"))

    async def publish(self, messages: list[dict[str, Any]]) -> None:
        items = (await self.post("/v1/messages", {"messages": messages}))["items"]
        assert {item["status"] for item in items} <= {200, 201}, items[:3]

    async def commit(self, message: dict[str, Any]) -> None:
        """Send a message in a half, and commit it."""
        transaction_id = message.pop("id").partition(".")[0]
        half = {"id": transaction_id, "messages": [message]}
        answer = await self.post("/v1/transactions", {"producer_group": PRODUCERS, "transactions": [half]})
        assert answer["items"][0]["status"] in (200, 201), answer
        outcome = {"id": transaction_id, "outcome": "COMMIT"}
        answer = await self.post("/v1/transactions/outcomes", {"producer_group": PRODUCERS, "outcomes": [outcome]})
        assert answer["items"][0]["status"] == 200, answer

    async def outcome(self, withdrawal: str) -> str:
        async def ask() -> bytes:
            try:
                path = f"/v1/withdrawals/{withdrawal}"
                return await self.http.call("GET", path, b"", ANSWER_SECONDS, "application/json")
            except NotFound:
                return b'{"outcome": "UNKNOWN"}'

        return str((await self.until_answered(ask))["outcome"])


async def consume(server: Server, books: Books) -> None:
    """Receive and acknowledge until cancelled, over all lives of the server."""
    receive = encode_msgpack(Receive(instance="i", max=1000, wait=0.2, lease=2))
    while True:
        try:
            answer = await server.http.call("POST", f"/v1/groups/{GROUP}/receive", receive, PATIENCE_SECONDS)
        except Unavailable:
            await asyncio.sleep(0.02)  # it is unreachable
            continue
        messages: list[Delivered] = msgspec.msgpack.decode(answer, type=Received).messages
        books.delivered.update(message.id for message in messages)
        items = [SettleItem(receipt=message.receipt, action="ack") for message in messages]
        if items:
            with contextlib.suppress(Unavailable):
                await server.http.call(
                    "POST", f"/v1/groups/{GROUP}/settle", encode_msgpack(Settle(items)), PATIENCE_SECONDS
                )


async def withdraw(server: Server, books: Books, message: str, at: float, chance: random.Random) -> None:
    """Cancel or replace a message at an instant (time.monotonic), and ask at once what became of it."""
    await asyncio.sleep(max(0.0, at - time.monotonic()))  # the race needs its instant
    replaces = chance.random() < REPLACED_SHARE
    withdrawal = ids.message_id(ids.new_id(), 0)
    books.withdrawals[withdrawal] = message, replaces
    sent: dict[str, Any] = {"id": withdrawal, "topic": TOPIC, "body": "", "headers": {CANCELS: message}}
    if replaces:
        sent |= {"body": "instead", "headers": {REPLACES: message}}
    await (server.commit(sent) if chance.random() < 0.5 else server.publish([sent]))
    said = await server.outcome(withdrawal)
    if said in ("WITHDRAWN", "TOO_LATE", "ALREADY", "NOT_FOUND"):
        books.said[withdrawal] = said


async def play(process: ServerProcess, books: Books, messages: int, chance: random.Random, *, kill: bool) -> None:
    """One round."""
    server = Server(process.url)
    instant = time.monotonic() + AHEAD_SECONDS
    due = (datetime.now(UTC) + timedelta(seconds=AHEAD_SECONDS)).isoformat()
    names = [ids.message_id(ids.new_id(), 0) for _ in range(messages)]
    books.sent |= dict.fromkeys(names, "later")
    withdrawn = chance.sample(names, round(messages * WITHDRAWN_SHARE))
    early = {name for name in withdrawn if chance.random() < EARLY_SHARE}

    def around() -> float:
        return instant + chance.uniform(-BEFORE_SECONDS, AFTER_SECONDS)

    await asyncio.gather(*[withdraw(server, books, name, 0.0, chance) for name in early])
    await server.publish([{"id": name, "topic": TOPIC, "body": "later", "deliver_at": due} for name in names])
    tasks = [withdraw(server, books, name, around(), chance) for name in withdrawn if name not in early]
    tasks += [withdraw(server, books, name, around(), chance) for name in withdrawn[:5]]  # a second one of some

    async def killed() -> None:
        await asyncio.sleep(max(0.0, around() - time.monotonic()))  # the race needs its instant
        await asyncio.to_thread(process.kill)
        await asyncio.to_thread(process.start)

    await asyncio.gather(*tasks, *([killed()] if kill else []))
    server.http.close()


async def campaign(process: ServerProcess, books: Books, rounds: int, messages: int, seed: int) -> None:
    chance = random.Random(seed)
    server = Server(process.url)
    consuming = asyncio.create_task(consume(server, books))
    try:
        for number in range(rounds):
            await play(process, books, messages, chance, kill=number % 4 != 3)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            delayed = await asyncio.to_thread(metric, process.url, "notify_delayed_messages")
            queues = (await asyncio.to_thread(admin, process.url, "GET", f"groups/{GROUP}"))["queues"]
            if not delayed and not sum(queue["lag"] for queue in queues):
                break
            assert time.monotonic() < deadline, f"{delayed:,.0f} messages stay delayed, or are not delivered"
            await asyncio.sleep(0.05)  # the pause between two looks
        for withdrawal, (message, replaces) in books.withdrawals.items():
            books.violations += violations_of(books, withdrawal, message, replaces, await server.outcome(withdrawal))
    finally:
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        server.http.close()
    gone = {message for w, (message, _) in books.withdrawals.items() if books.said.get(w) == "WITHDRAWN"}
    for message in books.sent.keys() - gone:
        if not books.delivered[message]:
            books.violations.append(f"{message} was neither delivered nor withdrawn")


def violations_of(books: Books, withdrawal: str, message: str, replaces: bool, outcome: str) -> list[str]:
    """The violations of a withdrawal; its final outcome is noted."""
    wrong = []
    before = books.said.setdefault(withdrawal, outcome)
    if before != outcome:
        wrong.append(f"{withdrawal}: {before}, and after a kill {outcome}")
    if outcome == "WITHDRAWN" and books.delivered[message]:
        wrong.append(f"{message} was withdrawn by {withdrawal}, and delivered")
    if bool(books.delivered[withdrawal]) != (replaces and outcome == "WITHDRAWN"):
        wrong.append(f"{withdrawal}: {outcome}, and delivered {books.delivered[withdrawal]} times")
    if outcome not in ("WITHDRAWN", "TOO_LATE", "ALREADY"):
        wrong.append(f"{withdrawal}: {outcome}")
    return wrong


def run(rounds: int, messages: int, seed: int) -> str:
    """The result, in words. Raises AssertionError."""
    books = Books()
    with tempfile.TemporaryDirectory(prefix="notify-withdraw-") as directory:
        process = ServerProcess(Path(directory) / "data").start()
        try:
            subscribe(process.url, GROUP, TOPIC, start="earliest")
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(campaign(process, books, rounds, messages, seed))
        finally:
            process.stop()
    outcomes = Counter(books.said.values())
    doubled = sum("and delivered" in v for v in books.violations)
    words = (
        f"{len(books.sent):,} delayed messages, {len(books.withdrawals):,} withdrawals at the instant of release "
        f"({outcomes['WITHDRAWN']:,} in time, {outcomes['TOO_LATE']:,} too late), {rounds - rounds // 4} kills: "
        f"{doubled} delivered and withdrawn, {len(books.violations)} violations"
    )
    if books.violations:
        raise AssertionError(f"{words}: {'; '.join(books.violations[:5])}")
    return words


def main() -> int:
    options = command_line(__doc__, rounds=60, messages=200, seed=None)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    ServerProcess.launch = staticmethod(forked.launch)
    return judged(lambda: asserted(lambda: run(**vars(options))))


if __name__ == "__main__":
    raise SystemExit(main())
