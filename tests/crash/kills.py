"""Kill -9 of a real server under load, again and again, and what every answer it gave must still mean afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from notify import ids
from notify.client.http import HttpClient
from notify.errors import NotFound, NotifyError, Unavailable
from notify.testing.ports import free_port
from notify.wire import (
    Items,
    OutcomeItem,
    Outcomes,
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
from tests.crash.modes import some_key, watchers

CALLERS = 12
UNDECIDED = 1000
TOPICS = ("a", "b")
GROUP = "c"


@dataclass
class Answers:
    """What was asked, and what the server said to it."""

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
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = {"port": self.port, "data_dir": str(directory), "segment_bytes": 1 << 20}
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._pid = 0
        self._checked: dict[str, int] = dict.fromkeys(TOPICS, 0)
        self._in_queue: set[str] = set()
        self._undecided: deque[str] = deque()
        self._asked: dict[str, str] = {}
        self._to_ask_for: list[str] = []
        self._asked_for: list[str] = []
        """Stored halves: those since the last check, and those before, of which each check asks for a sample."""
        self.watchers = watchers(TOPICS, self.chance)
        self._are_subscribed = False
        self._to_look_for: set[str] = set()
        """Committed since the last check: all are looked for again at the end, when everything is read again."""

    def start(self, crash_at: str = "") -> None:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps({"settings": self._settings, "crash_at": crash_at}) + "\n")
        self._zygote.stdin.flush()
        self._pid = int(self._zygote.stdout.readline())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the crash point was quicker
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait(10)
        self._zygote.stdout.close()

    # --- a cycle ----------------------------------------------------------------------------------------------

    async def cycle(self, crash_at: str = "") -> None:
        """Start, check what the last crash left, load, kill at a random moment or at the point."""
        self.start(crash_at)
        http = HttpClient(self.url)
        try:
            if crash_at and not await self._ready(http):
                self.cycles += 1  # the point lies on the way up: the next start must do without what it cut short
                return
            await self._ready(http)
            with contextlib.suppress(Unavailable if crash_at else ()):
                await self._check(http)
            if not self._are_subscribed:
                for watcher in self.watchers:
                    await watcher.subscribe(http)
                self._are_subscribed = True
            tasks = [asyncio.ensure_future(self._produce(http)) for _ in range(CALLERS)]
            tasks.append(asyncio.ensure_future(self._consume(http)))
            # One of them a cycle: all at once would leave nothing of the machine for the others.
            watcher = self.watchers[self.cycles % len(self.watchers)]
            tasks += [asyncio.ensure_future(watcher.consume(http, instance)) for instance in watcher.instances]
            await asyncio.sleep(self.chance.uniform(0.02, 0.35) if not crash_at else 0.8)
            self.kill()
            await asyncio.gather(*tasks)
        finally:
            self.kill()
            http.close()
        self.cycles += 1

    async def finish(self) -> None:
        """One last start: check everything, from the first offset."""
        self.start()
        http = HttpClient(self.url)
        try:
            assert await self._ready(http)
            self._checked = dict.fromkeys(TOPICS, 0)
            self._in_queue.clear()
            self._to_look_for |= self.answers.committed
            await self._check(http, sample=3000)
            await self._check_dead_letters(http)
            committed = {f"{name}.{n}" for name in self.answers.committed for n in range(2)}
            for watcher in self.watchers:
                await watcher.finish(http, committed)
                self.answers.violations += watcher.violations
        finally:
            http.close()

    async def _ready(self, http: HttpClient) -> bool:
        """True once it serves, False if its crash point was quicker. Raises AssertionError if it does not come back."""
        for _ in range(2000):
            with contextlib.suppress(NotifyError):
                await http.call("GET", "/readyz", b"", 1)
                return True
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                return False
            await asyncio.sleep(0.005)
        raise AssertionError("the server did not come back")

    async def _produce(self, http: HttpClient) -> None:
        with contextlib.suppress(NotifyError):
            while True:
                sent: list[str] = []
                try:
                    await self._send(http, sent)
                except NotifyError:
                    self._undecided.extend(sent)  # of these nothing is known: they are decided after the next start
                    raise

    async def _send(self, http: HttpClient, sent: list[str]) -> None:
        """A few halves, and outcomes: of most of them at once, of the others after a crash or two."""
        a = self.answers
        halves = []
        for _ in range(self.chance.randint(1, 8)):
            name = ids.to_text(ids.new_id())
            sent.append(name)
            a.bodies[name] = [self.chance.randbytes(self.chance.randint(0, 600)) for _ in range(2)]
            messages = [
                PackedMessage(topic=self.chance.choice(TOPICS), body=b, key=some_key(self.chance))
                for b in a.bodies[name]
            ]
            halves.append(PackedTransaction(id=name, messages=messages, check_after=3600))
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
        """What was asked before is asked again."""
        outcome = self._asked.setdefault(name, self.chance.choice(("COMMIT", "COMMIT", "ROLLBACK")))
        if outcome == "COMMIT":
            self.answers.commit_asked.add(name)
        return OutcomeItem(id=name, outcome=outcome)

    async def _consume(self, http: HttpClient) -> None:
        a = self.answers
        with contextlib.suppress(NotifyError):
            while True:
                request = Receive(instance="i", topics=list(TOPICS), max=50, wait=1, lease=3600)
                found = (await self._call(http, f"/v1/groups/{GROUP}/receive", request, Received)).messages
                items = []
                for m in found:
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
                for m, sent, item in zip(found, items, answer.items, strict=True):
                    if item.status == 200:
                        (a.acked if sent.action == "ack" else a.dead).add(m.id)

    async def _call(self, http: HttpClient, path: str, request: Any, answer: type[Any]) -> Any:
        return msgspec.msgpack.decode(await http.call("POST", path, encode_msgpack(request), 10), type=answer)

    # --- checks -----------------------------------------------------------------------------------------------

    async def _check(self, http: HttpClient, sample: int = 50) -> None:
        """What is new since the last check, and a sample of everything before."""
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
        """What is new in a topic's queue since the last check: no holes, nothing twice, nothing made up."""
        a = self.answers
        while True:
            path = f"/v1/topics/{topic}/queues/0/messages?offset={self._checked[topic]}&max=2000"
            try:
                found = msgspec.msgpack.decode(await http.call("GET", path, b"", 10), type=Pulled)
            except NotFound:
                return  # before the first message
            if not found.messages:
                return
            for m in found.messages:
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
                found = msgspec.msgpack.decode(await http.call("GET", path, b"", 10), type=Pulled)
            except NotFound:
                return
            if not found.messages:
                break
            seen += [m.id for m in found.messages]
            offset = found.next_offset
        missing = a.dead - set(seen)
        if missing:
            a.violations.append(f"promise 4: {len(missing)} answered dead letters are not in the dead-letter queue")
        if len(seen) != len(set(seen)):
            a.violations.append("promise 4: a dead letter is there twice")
