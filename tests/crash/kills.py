"""Kills a real server under load with -9 repeatedly, and checks that every earlier answer still holds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from notify.client.transport.http import HttpClient
from notify.errors import NotFound, NotifyError, Unavailable
from notify.protocol import ids
from notify.protocol.wire import (
    JSON,
    Bridged,
    BridgedTransaction,
    Items,
    OutcomeItem,
    Outcomes,
    PackedBridgeBatch,
    PackedMessage,
    PackedTransaction,
    PackedTransactions,
    Pulled,
    Receive,
    Received,
    Settle,
    SettledItems,
    SettleItem,
    States,
    encode_msgpack,
)
from notify.storage.crash_point import POINTS
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.crash.modes import some_key, watchers
from tests.support.clock import PATIENCE_SECONDS, eventually_async

CALLERS = 12
UNDECIDED = 1000
TOPICS = ("a", "b")
GROUP = "c"
SOURCE = "source"
SEGMENT_BYTES = 1 << 20
MOST_ANSWERS = 300
"""The most answers before a kill."""

UNDER_LOAD = tuple(point for point in POINTS if not point.startswith(("carry.", "retention.")))
"""Crash points that this load reaches; those of retention are in dropping.py."""


@dataclass
class Answers:
    """The requests, and the server's answers."""

    bodies: dict[str, list[bytes]] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    commit_asked: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    acked: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    delivered: int = 0
    violations: list[str] = field(default_factory=list)


class Kills:
    """A server in a data directory, killed and started again."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.answers = Answers()
        self.cycles = 0
        self._directory = directory
        self._port = free_port()
        self._server: ServerProcess | None = None
        self._heard = 0
        """The number of answers since the load of this life began."""
        self._largest = 600
        """The size of a body in bytes."""
        self._bridge_may_stand_at = {""}
        """The possible positions: one, or two if the answer to a batch was lost with the server."""
        self._checked: dict[str, int] = dict.fromkeys(TOPICS, 0)
        self._in_queue: set[str] = set()
        self._undecided: deque[str] = deque()
        self._asked: dict[str, str] = {}
        self._to_ask_for: list[str] = []
        self._asked_for: list[str] = []
        """Stored halves since the last check, and older ones, of which each check reads a sample."""
        self.watchers = watchers(TOPICS, self.chance)
        self._are_subscribed = False
        self._to_look_for: set[str] = set()
        """Transactions committed since the last check; the end reads everything again."""

    def start(self, crash_at: str = "") -> bool:
        """Start the server; False if it reached its crash point first. Raises Unavailable if it does not come back."""
        environment = {"NOTIFY_SEGMENT_BYTES": str(SEGMENT_BYTES), "NOTIFY_CRASH_AT": crash_at}
        self._server = ServerProcess(self._directory, self._port, environment)
        try:
            self._server.start()
        except Unavailable:
            if self._has_crashed():
                return False
            raise
        return True

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    def _is_gone(self) -> bool:
        return self._process.poll() is not None

    def _has_crashed(self) -> bool:
        return self._process.poll() == -signal.SIGKILL

    @property
    def _process(self) -> Any:
        assert self._server is not None
        return self._server.process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # --- a cycle ----------------------------------------------------------------------------------------------

    async def cycle(self, crash_at: str = "", enough: Callable[[], bool] | None = None) -> None:
        """Start, check what the last crash left, load, kill at a random moment or at the point.

        `enough`: not before this is true. Raises AssertionError if the point is not reached.
        """
        self._largest = 20_000 if crash_at.startswith(("seal.", "checkpoint.")) else 600  # a segment is full soon
        if not self.start(crash_at):
            self.cycles += 1  # the point is in the start: the next start must cope with the unfinished one
            return
        http = HttpClient(self.url)
        try:
            with contextlib.suppress(Unavailable if crash_at else ()):
                await self._check(http)
            if not self._are_subscribed:
                for watcher in self.watchers:
                    await watcher.subscribe(http)
                self._are_subscribed = True
            tasks = [asyncio.ensure_future(self._produce(http)) for _ in range(CALLERS)]
            tasks.append(asyncio.ensure_future(self._consume(http)))
            tasks.append(asyncio.ensure_future(self._bridge(http)))
            # One check a cycle, because all at once would take the whole machine.
            watcher = self.watchers[self.cycles % len(self.watchers)]
            tasks += [asyncio.ensure_future(watcher.consume(http, instance)) for instance in watcher.instances]
            await self._until_its_end(crash_at, enough)
            self.kill()
            await asyncio.gather(*tasks)
        finally:
            self.kill()
            http.close()
        self.cycles += 1

    async def _until_its_end(self, crash_at: str, enough: Callable[[], bool] | None) -> None:
        """Wait until the crash point has killed the server, or it has given enough answers to be killed."""
        if crash_at:
            await eventually_async(self._is_gone, f"the server to reach {crash_at}")
            assert self._has_crashed(), f"{crash_at}: the server ended with {self._process.returncode}"
            return
        self._heard = 0
        wanted = self.chance.randint(1, MOST_ANSWERS)
        await eventually_async(lambda: self._heard >= wanted and (enough is None or enough()), f"{wanted} answers")
        await asyncio.sleep(self.chance.uniform(0, 0.02))  # so that it is killed at any moment between two answers

    async def finish(self) -> None:
        """Start a last time, and check everything from the first offset."""
        self.start()
        http = HttpClient(self.url)
        try:
            self._checked = dict.fromkeys(TOPICS, 0)
            self._in_queue.clear()
            self._to_look_for |= self.answers.committed
            await self._check(http, sample=3000)
            await self._check_dead_letters(http)
            committed = {f"{name}.{n}" for name in self.answers.committed for n in range(2)}
            await asyncio.gather(*(watcher.finish(http, committed) for watcher in self.watchers))
            for watcher in self.watchers:
                self.answers.violations += watcher.violations
        finally:
            http.close()

    async def _produce(self, http: HttpClient) -> None:
        with contextlib.suppress(NotifyError):
            while True:
                sent: list[str] = []
                try:
                    await self._send(http, sent)
                except NotifyError:
                    self._undecided.extend(sent)  # their outcome is unknown: they are decided after the next start
                    raise

    async def _send(self, http: HttpClient, sent: list[str]) -> None:
        """Send a few halves; send most outcomes at once, and the others after a crash or two."""
        a = self.answers
        halves = []
        for _ in range(self.chance.randint(1, 8)):
            name = ids.to_text(ids.new_id())
            sent.append(name)
            halves.append(PackedTransaction(id=name, messages=self._messages(name), check_after=3600))
        request = PackedTransactions(producer_group="p", transactions=halves)
        for item in (await self._call(http, "/v1/transactions", request, Items)).items:
            if item.status in (200, 201):
                a.stored.add(item.id)
                self._to_ask_for.append(item.id)
        late = [name for name in sent if self.chance.random() < 0.25]
        for name in late:
            sent.remove(name)
        self._undecided.extend(late)
        while len(self._undecided) > UNDECIDED:
            sent.append(self._undecided.popleft())
        outcomes = [self._outcome(name) for name in sent]
        if not outcomes:
            return
        answer = await self._call(
            http, "/v1/transactions/outcomes", Outcomes(producer_group="p", outcomes=outcomes), Items
        )
        for asked, item in zip(outcomes, answer.items, strict=True):
            if item.status == 200:
                (a.committed if asked.outcome == "COMMIT" else a.rolled_back).add(item.id)
                if asked.outcome == "COMMIT":
                    self._to_look_for.add(item.id)

    def _outcome(self, name: str) -> OutcomeItem:
        """Send an outcome; repeat the one that was sent before."""
        outcome = self._asked.setdefault(name, self.chance.choice(("COMMIT", "COMMIT", "ROLLBACK")))
        if outcome == "COMMIT":
            self.answers.commit_asked.add(name)
        return OutcomeItem(id=name, outcome=outcome)

    async def _consume(self, http: HttpClient) -> None:
        a = self.answers
        with contextlib.suppress(NotifyError):
            while True:
                request = Receive(instance="i", topics=list(TOPICS), max=50, wait=1, lease=3600)
                messages = (await self._call(http, f"/v1/groups/{GROUP}/receive", request, Received)).messages
                items = []
                for m in messages:
                    a.delivered += 1
                    name, _, number = m.id.partition(".")
                    if name not in a.commit_asked:
                        a.violations.append(f"promise 5: {m.id} was delivered without a commit")
                    if a.bodies.get(name, [b"", b""])[int(number)] != m.body:
                        a.violations.append(f"promise 2: {m.id} was delivered with other bytes")
                    if m.id in a.acked or m.id in a.dead:
                        a.violations.append(f"promise 4: {m.id} was delivered after its settling was answered")
                    action = "dead_letter" if self.chance.random() < 0.1 else "ack"
                    items.append(SettleItem(receipt=m.receipt, action=action))
                if not items:
                    continue
                answer = await self._call(http, f"/v1/groups/{GROUP}/settle", Settle(items), SettledItems)
                for m, sent, item in zip(messages, items, answer.items, strict=True):
                    if item.status == 200:
                        (a.acked if sent.action == "ack" else a.dead).add(m.id)

    async def _bridge(self, http: HttpClient) -> None:
        """Send batches of committed transactions, each from the end position of the previous one."""
        a = self.answers
        with contextlib.suppress(NotifyError):
            answer = await http.call("GET", "/v1/admin/bridges", b"", PATIENCE_SECONDS, JSON)
            rows = msgspec.json.decode(answer)["bridges"]
            position = rows[0]["position"] if rows else ""
            if position not in self._bridge_may_stand_at:
                a.violations.append(f"promise 13: the bridge stands at {position!r}, not {self._bridge_may_stand_at}")
            for number in itertools.count():
                batch = PackedBridgeBatch(
                    epoch=self.cycles + 1,
                    expected_position=position,
                    position=f"{self.cycles}-{number}",
                    claim=not number,
                    transactions=[self._bridged() for _ in range(self.chance.randint(1, 3))],
                )
                self._bridge_may_stand_at = {position, batch.position}
                position = (await self._call(http, f"/v1/bridge/{SOURCE}/batches", batch, Bridged)).position
                self._bridge_may_stand_at = {position}
                for t in batch.transactions:
                    a.stored.add(t.id)
                    a.committed.add(t.id)
                    self._to_ask_for.append(t.id)
                    self._to_look_for.add(t.id)

    def _bridged(self) -> BridgedTransaction:
        name = ids.to_text(ids.new_id())
        self.answers.commit_asked.add(name)
        return BridgedTransaction(id=name, producer_group="p", messages=self._messages(name))

    def _messages(self, name: str) -> list[PackedMessage]:
        bodies = [self.chance.randbytes(self.chance.randint(0, self._largest)) for _ in range(2)]
        self.answers.bodies[name] = bodies
        return [PackedMessage(topic=self.chance.choice(TOPICS), body=b, key=some_key(self.chance)) for b in bodies]

    async def _call(self, http: HttpClient, path: str, request: Any, answer: type[Any]) -> Any:
        data = await http.call("POST", path, encode_msgpack(request), PATIENCE_SECONDS)
        self._heard += 1
        return msgspec.msgpack.decode(data, type=answer)

    # --- checks -----------------------------------------------------------------------------------------------

    async def _check(self, http: HttpClient, sample: int = 50) -> None:
        """Check everything since the last check, and a sample of older data."""
        a = self.answers
        for topic in TOPICS:
            await self._pull(http, topic)
        for name in self._to_look_for:
            for number in range(len(a.bodies[name])):
                if f"{name}.{number}" not in self._in_queue:
                    a.violations.append(f"promise 4: {name}.{number} was committed and is in no queue")
        self._to_look_for.clear()
        new = self._to_ask_for
        asked = [*new, *self.chance.sample(self._asked_for, min(sample, len(self._asked_for)))]
        self._asked_for += new
        self._to_ask_for = []
        for at in range(0, len(asked), 2000):
            part = asked[at : at + 2000]
            answer = await self._call(http, "/v1/transactions/states", States(producer_group="p", ids=part), Items)
            for item in answer.items:
                if item.status != 200:
                    a.violations.append(f"promise 1: the acknowledged half {item.id} is gone")
                elif item.id in a.committed and item.state != "COMMITTED":
                    a.violations.append(f"promise 3: {item.id} was committed and is {item.state}")
                elif item.id in a.rolled_back and item.state != "ROLLED_BACK":
                    a.violations.append(f"promise 3: {item.id} was rolled back and is {item.state}")

    async def _pull(self, http: HttpClient, topic: str) -> None:
        """Read a queue since the last check: no holes, no duplicates, nothing made up."""
        a = self.answers
        while True:
            path = f"/v1/topics/{topic}/queues/0/messages?offset={self._checked[topic]}&max=2000"
            try:
                page = msgspec.msgpack.decode(await http.call("GET", path, b"", PATIENCE_SECONDS), type=Pulled)
            except NotFound:
                return  # before the first message
            if not page.messages:
                return
            for m in page.messages:
                name, _, number = m.id.partition(".")
                if m.offset != self._checked[topic]:
                    a.violations.append(f"promise 8: a hole before offset {m.offset} of {topic}")
                if m.id in self._in_queue:
                    a.violations.append(f"promise 3: {m.id} is in a queue twice")
                if name not in a.commit_asked:
                    a.violations.append(f"promise 5: {m.id} is in a queue without a commit")
                if a.bodies.get(name, [b"", b""])[int(number)] != m.body:
                    a.violations.append(f"promise 2: {m.id} has other bytes")
                self._in_queue.add(m.id)
                self._checked[topic] = m.offset + 1

    async def _check_dead_letters(self, http: HttpClient) -> None:
        a = self.answers
        offset = 0
        seen: list[str] = []
        while True:
            path = f"/v1/topics/dead-letter.{GROUP}/queues/0/messages?offset={offset}&max=2000"
            try:
                page = msgspec.msgpack.decode(await http.call("GET", path, b"", PATIENCE_SECONDS), type=Pulled)
            except NotFound:
                return
            if not page.messages:
                break
            seen += [m.id for m in page.messages]
            offset = page.next_offset
        missing = a.dead - set(seen)
        if missing:
            a.violations.append(f"promise 4: {len(missing)} answered dead letters are not in the dead-letter queue")
        if len(seen) != len(set(seen)):
            a.violations.append("promise 4: a dead letter is there twice")
