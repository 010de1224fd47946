"""Groups of every mode on a server that is killed, and the messages that each must have received."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import msgspec

from notify.client.transport.http import HttpClient
from notify.errors import NotifyError
from notify.protocol.wire import Delivered, Receive, Received, Settle, SettledItems, SettleItem, encode_msgpack
from tests.support.clock import PATIENCE_SECONDS

KEYS = tuple(f"k{n}" for n in range(64))
"""So many that an ordered group, which hands out one message of a key at a time, gets on."""


class Watcher:
    """The consumers of one group, and their deliveries over all lives of the server."""

    def __init__(self, mode: str, topics: tuple[str, ...], chance: random.Random) -> None:
        self.mode = mode
        self.group = f"m-{mode}"
        self.topics = topics
        self.instances = ("x", "y") if mode in ("broadcast", "ordered", "failover") else ("x",)
        self.chance = chance
        self.done: dict[str, set[str]] = {instance: set() for instance in self.instances}
        """Messages by instance whose ack or dead_letter was answered."""
        self.handled: dict[str, set[str]] = {instance: set() for instance in self.instances}
        """Messages that were received and settled; the answer may have been lost with the server."""
        self.seen: set[tuple[str, int, int]] = set()
        """(topic, queue, offset) of ordered deliveries."""
        self.last: dict[tuple[str, int, str], int] = {}
        """The last first-delivered offset by topic, queue and key."""
        self.asked: set[tuple[str, int, int]] = set()
        """(topic, queue, offset) of requested settlements."""
        self.violations: list[str] = []

    async def subscribe(self, http: HttpClient) -> None:
        """Subscribe from the first message on; a broadcast begins with its instances' first requests."""
        for topic in self.topics:
            body = json.dumps(
                {"mode": self.mode, "start": "earliest", "max_attempts": 1000, "max_deaths": 1000, "reason": "test"}
            )
            path = f"/v1/admin/groups/{self.group}/subscriptions/{topic}"
            await http.call("PUT", path, body.encode(), PATIENCE_SECONDS, "application/json")
        if self.mode == "broadcast":
            for instance in self.instances:
                await self._receive(http, instance, 0)

    async def _receive(
        self, http: HttpClient, instance: str, wait: float, lease: float = 3600, most: int = 50
    ) -> list[Delivered]:
        request = Receive(instance=instance, max=most, wait=wait, lease=lease)
        path = f"/v1/groups/{self.group}/receive"
        answer = await http.call("POST", path, encode_msgpack(request), PATIENCE_SECONDS)
        return msgspec.msgpack.decode(answer, type=Received).messages

    async def consume(self, http: HttpClient, instance: str) -> None:
        """Consume until the server is gone."""
        with contextlib.suppress(NotifyError):
            while True:
                await self.once(http, instance, 1)

    async def once(self, http: HttpClient, instance: str, wait: float, lease: float = 3600, most: int = 50) -> int:
        """Receive, check and settle; return the number of messages."""
        received = await self._receive(http, instance, wait, lease, most)
        items = []
        for m in received:
            if self.mode == "ordered" and m.key is not None:
                self._see(m)
            if m.id in self.done[instance] or (self.mode != "broadcast" and self._is_done(m.id)):
                self.violations.append(f"promise 4: {m.id} came to {self.group} after its settling was answered")
            action = "dead_letter" if self.chance.random() < 0.05 else "ack"
            self.asked.add((m.topic, m.queue, m.offset))
            self.handled[instance].add(m.id)
            items.append(SettleItem(receipt=m.receipt, action=action))
        if items:
            path = f"/v1/groups/{self.group}/settle"
            answer = await http.call("POST", path, encode_msgpack(Settle(items)), PATIENCE_SECONDS)
            for m, item in zip(received, msgspec.msgpack.decode(answer, type=SettledItems).items, strict=True):
                if item.status == 200:
                    self.done[instance].add(m.id)
        return len(received)

    def _is_done(self, name: str) -> bool:
        return any(name in done for done in self.done.values())

    def _see(self, m: Delivered) -> None:
        """Check promise 7: first deliveries of a key rise, and each waits until the previous one is settled."""
        place = (m.topic, m.queue, m.offset)
        if place in self.seen:
            return
        before = self.last.get((m.topic, m.queue, str(m.key)))
        if before is not None:
            if m.offset < before:
                self.violations.append(f"promise 7: offset {m.offset} of {m.topic} came first after {before}")
            if (m.topic, m.queue, before) not in self.asked:
                self.violations.append(f"promise 7: offset {m.offset} of {m.topic} did not wait for {before}")
        self.seen.add(place)
        self.last[m.topic, m.queue, str(m.key)] = m.offset

    async def finish(self, http: HttpClient, committed: set[str]) -> None:
        """Consume until each committed message has come to the group, or for broadcasts to each instance."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        missing = self._missing(committed)
        while missing:
            came = 0
            for instance in self.instances:
                with contextlib.suppress(NotifyError):
                    came += await self.once(http, instance, 0.1, lease=10, most=1000)
            # Compared only once no message is left, because the comparison takes long.
            if came:
                deadline = time.monotonic() + PATIENCE_SECONDS
            else:
                missing = self._missing(committed)
            if time.monotonic() > deadline:
                self.violations.append(f"promise 4: {len(missing)} committed messages never came to {self.group}")
                return

    def _missing(self, committed: set[str]) -> set[str]:
        came = list(self.handled.values())
        had_by_all = set.intersection(*came) if self.mode == "broadcast" else set.union(*came)
        return committed - had_by_all


def watchers(topics: tuple[str, ...], chance: random.Random) -> list[Watcher]:
    """A watcher for each mode."""
    return [Watcher(mode, topics, chance) for mode in ("ordered", "failover", "exclusive", "broadcast")]


def some_key(chance: random.Random) -> Any:
    """A random key, or None."""
    return chance.choice((*KEYS, None))
