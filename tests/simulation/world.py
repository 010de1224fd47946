"""A small world in virtual time: producers with a database, a lossy network, consumers, and a server with faults.

The server is killed, stops for longer than leases last, has a full disk for a while, and its topic gets more queues.

The server is the real core over the real log. Producers, database and network are models, so that a run can place a
crash or a delay between any two steps. In the end every committed local transaction must have had its effect
exactly once, and no other may have had one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify.errors import NotifyError, Unavailable
from notify.protocol import ids
from notify.protocol.wire import (
    OutcomeItem,
    PackedMessage,
    PackedTransaction,
    PackedTransactions,
    Poll,
    Receive,
    SettleItem,
)
from notify.server.core.core import Core
from notify.server.settings import Settings
from notify.storage.groups import Subscription
from notify.storage.log import LogStore
from notify.storage.log.disk import Disk
from notify.storage.names import dead_letter_topic
from notify.storage.records import StoredMessage
from tests.support.disks import NoThreads
from tests.support.virtual_loop import pass_seconds

TOPIC = "t"
GROUP = "c"
SECOND = "d"
"""A group of another mode over the same topic."""
POLL_SECONDS = 3.0
"""How long a poll waits; a longer wait makes fewer empty steps."""
START_US = 1_800_000_000_000_000


class LittleRoom(Disk):
    """Reserves little ahead, since filling and reading 16 MiB of zeros at each start took most of a run's time; and
    nothing while the world says that it is full."""

    def __init__(self, directory: Path, is_full: Callable[[], bool]) -> None:
        super().__init__(directory)
        self._is_full = is_full

    def reserve(self, fd: int, offset: int, size: int) -> None:
        if self._is_full():
            raise OSError(errno.ENOSPC, "injected: no space left on device")
        super().reserve(fd, offset, min(size, 1 << 16))


@dataclass
class Database:
    """The local table: running transactions hold their row's lock, and tombstones refuse late commits."""

    rows: dict[str, str] = field(default_factory=dict)
    in_flight: set[str] = field(default_factory=set)

    def insert(self, transaction_id: str) -> bool:
        """Insert a row; False: there is a tombstone, and the transaction must roll back."""
        if transaction_id in self.rows:
            return False
        self.in_flight.add(transaction_id)
        return True

    def end(self, transaction_id: str, commit: bool) -> None:
        self.in_flight.discard(transaction_id)
        if commit:
            self.rows[transaction_id] = "COMMITTED"

    def atomic_question(self, transaction_id: str) -> str | None:
        """COMMIT or ROLLBACK, or None for a lock timeout; leaves a tombstone."""
        if transaction_id in self.in_flight:
            return None
        state = self.rows.setdefault(transaction_id, "ROLLED_BACK")
        return "COMMIT" if state == "COMMITTED" else "ROLLBACK"

    def naive_question(self, transaction_id: str) -> str | None:
        """The answer of a plain SELECT, which does not see a running transaction."""
        return "COMMIT" if self.rows.get(transaction_id) == "COMMITTED" else "ROLLBACK"


class World:
    """One seed's run."""

    def __init__(self, seed: int, *, naive: bool = False, unordered: bool = False, transactions: int = 12) -> None:
        """Planted faults: `naive` checks with a plain SELECT, `unordered` delivers an ordered topic in mode shared."""
        self.chance = random.Random(seed)
        self.naive = naive
        self.unordered = unordered
        self.transactions = transactions
        self.database = Database()
        self.mode = self.chance.choice(("ordered", "failover", "exclusive", "broadcast"))
        """The mode of a second group over the same topic."""
        if unordered:
            self.mode = "ordered"
        self.fair_by = random.Random(~seed).choice(("", "", "key", "header:tenant"))
        """The name of the tenants that take turns, in the first group and, in mode ordered, in the second."""
        self.effects: dict[str, set[str]] = {}
        """The effects by group, or for broadcasts by instance."""
        self.delivered: set[str] = set()
        self.first_seen: dict[int, list[StoredMessage]] = {}
        """Messages by key, in the order of their first deliveries."""
        self.settled: set[tuple[str, int, int]] = set()
        """(group, queue, offset) of sent acks and final refusals."""
        self.disorder: list[str] = []
        self.core: Core | None = None
        self.killed = asyncio.Event()
        self.is_full = False
        """Whether the server's disk is full."""
        self.dead: set[str] = set()
        """Messages that a consumer of GROUP refused for good."""
        self.suffered: Counter[str] = Counter()
        """How often each fault happened to the server."""
        self.calm = False
        self.restarts = 0
        memory = Path("/dev/shm")
        base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
        self._directory = Path(tempfile.mkdtemp(prefix="notify-sim-", dir=base))
        self._run: asyncio.Task[None] | None = None
        self._settings = Settings(check_backoff_seconds=1, check_backoff_max_seconds=5, check_answer_seconds=3)

    def clock(self) -> int:
        return START_US + round(asyncio.get_running_loop().time() * 1_000_000)

    # --- server -----------------------------------------------------------------------------------------------

    async def start_server(self) -> None:
        store = LogStore(
            self._directory,
            disk=LittleRoom(self._directory, lambda: self.is_full),
            segment_bytes=1 << 13,
            clock=self.clock,
            threads=NoThreads(lambda: self.chance.random() * 0.01),
        )
        await store.open(self.clock())
        self.core = Core(store, self._settings, self.clock, random.Random(self.chance.random()))
        self.killed = asyncio.Event()
        self._run = asyncio.get_running_loop().create_task(self.core.run())

    def kill_server(self) -> None:
        """Kill the server as SIGKILL does: unwritten data is lost, and no request is answered."""
        assert self.core is not None
        assert self._run is not None
        self.look_for_faults()
        store: Any = self.core.store
        self.core = None
        self._run.cancel()
        self.killed.set()
        store.journal.failed = Unavailable("killed")
        store.let_go()
        self.restarts += 1

    def look_for_faults(self) -> None:
        """Count unexpected failures of the server's clock as violations, although it tries again."""
        if self.core is not None and self.core.faults:
            self.disorder.append(f"FAULT: {self.core.faults} steps of the server's clock failed")

    async def call(self, request: Callable[[Core], Awaitable[Any]]) -> Any:
        """Make one request over a network that delays and loses requests and answers."""
        chance = self.chance
        await pass_seconds(chance.random() * 0.05)
        if self.core is None or (not self.calm and chance.random() < 0.08):
            raise Unavailable("lost")
        working = asyncio.ensure_future(request(self.core))
        dying = asyncio.ensure_future(self.killed.wait())
        await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if not working.done():
            working.cancel()
            raise Unavailable("killed")
        answer = working.result()
        await pass_seconds(chance.random() * 0.05)
        if not self.calm and chance.random() < 0.08:
            raise Unavailable("answer lost")
        return answer

    # --- producers --------------------------------------------------------------------------------------------

    async def produce(self) -> None:
        """Run one local transaction, with a crash or a delay at any step."""
        chance = self.chance
        name = ids.to_text(bytes([1, *chance.randbytes(5), 0x70, chance.randrange(256), 0x80, *chance.randbytes(7)]))
        await pass_seconds(chance.random() * 10)
        key = chance.choice(("a", "b", "c", "d", None))
        headers = {"tenant": name[-1]}  # not the same for all messages of a key
        delay = chance.choice((None, None, 2.0))
        message = PackedMessage(topic=TOPIC, body=name.encode(), key=key, headers=headers, delay=delay)
        half = PackedTransaction(id=name, messages=[message], check_after=chance.choice((0.5, 1.0, 5.0)))
        request = PackedTransactions(producer_group="p", transactions=[half], source="s", instance="i")
        try:
            item = (await self.call(lambda core: core.transactions.put(request)))[0]
            if item.status not in (200, 201):
                return
        except NotifyError:
            return  # not known to be stored: the local transaction rolls back
        if chance.random() < 0.1 or not self.database.insert(name):
            return  # dies before its row, or is refused by a tombstone
        await pass_seconds(chance.choice((0.01, 0.5, 3.0)) * chance.random())
        commit = chance.random() < 0.75
        self.database.end(name, commit)
        if chance.random() < 0.35:
            return  # dies before its outcome
        outcome = OutcomeItem(id=name, outcome="COMMIT" if commit else "ROLLBACK")
        for _ in range(chance.choice((1, 1, 2))):
            await pass_seconds(chance.choice((0.0, 0.0, 4.0)) * chance.random())
            try:
                await self.call(lambda core: core.outcomes.record("p", [outcome]))
            except NotifyError:
                continue

    async def answer_checks(self) -> None:
        """A producer process that polls for checks; answers may be late or lost."""
        while True:
            poll = Poll(producer_group="p", instance="i", sources=["s"], wait=POLL_SECONDS, max=10)
            try:
                checks = await self.call(lambda core, poll=poll: core.checks.poll(poll))
            except NotifyError:
                await pass_seconds(0.2)
                continue
            for check in checks:
                ask = self.database.naive_question if self.naive else self.database.atomic_question
                outcome = ask(check["id"])
                await pass_seconds(self.chance.choice((0.0, 0.0, 2.0)) * self.chance.random())
                item = OutcomeItem(
                    id=check["id"],
                    outcome=outcome or "UNKNOWN",
                    check=check["token"],
                    unavailable=outcome is None,
                )
                try:
                    await self.call(lambda core, item=item: core.outcomes.record("p", [item]))
                except NotifyError:
                    continue

    # --- consumers --------------------------------------------------------------------------------------------

    async def consume(self, group: str = GROUP, instance: str = "x") -> None:
        """A consumer with an inbox that sometimes dies before its effect, or before its ack."""
        chance = self.chance
        effects = self.effects.setdefault(self._who(group, instance), set())
        while True:
            request = Receive(instance=instance, max=chance.randint(1, 5), wait=POLL_SECONDS, lease=2.0)
            try:
                handed = await self.call(lambda core, request=request: core.delivery.receive(group, request))
            except NotifyError:
                await pass_seconds(0.2)
                continue
            for receipt, message, _ in [each for h in handed for each in h.each()]:
                name = ids.to_text(message.transaction_id)
                self.delivered.add(name)
                self._see(group, instance, message)
                fate = chance.random() if not self.calm else 1.0
                if fate < 0.1:
                    continue  # dies before the effect
                await pass_seconds(chance.choice((0.0, 0.0, 1.5)) * chance.random())
                effects.add(name)  # effect and inbox row commit together
                if fate < 0.2:
                    continue  # dies before the ack
                action = "retry" if fate < 0.3 else "ack"
                if group == GROUP and 0.3 <= fate < 0.34:
                    action = "dead_letter"
                    self.dead.add(name)
                if action == "ack":
                    self.settled.add((group, message.queue, message.offset))
                item = SettleItem(receipt=receipt, action=action, delay=0.5)
                try:
                    await self.call(lambda core, item=item: core.delivery.settle(group, [item]))
                except NotifyError:
                    continue

    def _who(self, group: str, instance: str) -> str:
        """The consumers that must have each message: the group, or for broadcasts each instance."""
        return f"{group}@{instance}" if group == SECOND and self.mode == "broadcast" else group

    def _see(self, group: str, instance: str, message: StoredMessage) -> None:
        """Check promise 7: first deliveries of a key follow the log and wait for acks; an owner is alone."""
        if group != SECOND:
            return
        if self.mode in ("failover", "exclusive") and self.core is not None:
            leases = self.core.delivery.groups[SECOND].leases.values()
            others = {lease.instance.name for lease in leases} - {instance}
            if others and instance in {lease.instance.name for lease in leases}:
                self.disorder.append(f"DISORDER: {instance} and {others} have messages in mode {self.mode}")
        if self.mode != "ordered" or not message.key_hash:
            return
        seen = self.first_seen.setdefault(message.key_hash, [])
        place = (message.queue, message.offset)
        if place in [(before.queue, before.offset) for before in seen]:
            return
        for before in seen:
            earlier = (before.committed_us, before.offset) < (message.committed_us, message.offset)
            if not earlier if before.queue == message.queue else before.committed_us > message.committed_us:
                self.disorder.append(f"DISORDER: {place} was first delivered after {before.queue, before.offset}")
            if (group, before.queue, before.offset) not in self.settled:
                self.disorder.append(f"DISORDER: {place} did not wait for {before.queue, before.offset} of its key")
        seen.append(message)

    # --- the run ----------------------------------------------------------------------------------------------

    async def chaos(self) -> None:
        """Make a few faults of the server."""
        chance = self.chance
        for _ in range(chance.randint(0, 6)):
            await pass_seconds(chance.random() * 4)
            action = chance.choice(("kill", "kill", "stop", "fill", "fill", "grow", "grow"))
            self.suffered[action] += 1
            if action == "kill":
                self.kill_server()
                await pass_seconds(chance.random() * 2)
                await self.start_server()
            elif action == "stop":
                # Leases last two seconds, so some expire during the stop.
                loop: Any = asyncio.get_running_loop()
                loop.now += chance.random() * 6
            elif action == "fill":
                self.is_full = True
                await pass_seconds(chance.random() * 4)
                self.is_full = False
            else:
                await self._grow()

    async def _grow(self) -> None:
        """Give the topic more queues; a key may then belong to another queue."""
        assert self.core is not None
        topic = self.core.store.topic(TOPIC)
        if topic is not None and topic.queues < 4:
            with contextlib.suppress(NotifyError):
                self.core.topics.put_soon(dataclasses.replace(topic, queues=topic.queues + self.chance.randint(1, 2)))
                await self.core.queues.sync()

    async def run(self) -> list[str]:
        """Run, and return the violations."""
        try:
            await self.start_server()
            assert self.core is not None
            follow = self.core.delivery.following.subscribe
            await follow(Subscription(GROUP, TOPIC, fair_by=self.fair_by), "latest")
            mode = "shared" if self.unordered else self.mode
            fair_by = self.fair_by if mode == "ordered" else ""
            await follow(Subscription(SECOND, TOPIC, mode, fair_by=fair_by), "latest")
            for instance in ("x", "y") if self.mode == "broadcast" else ():
                await self.core.delivery.receive(SECOND, Receive(instance=instance, max=1))
            actors = [asyncio.ensure_future(f()) for f in (self.answer_checks, self.consume, self.consume)]
            actors += [asyncio.ensure_future(self.consume(SECOND, instance)) for instance in ("x", "y")]
            await asyncio.gather(self.chaos(), *(self.produce() for _ in range(self.transactions)))
            self.calm, self.is_full = True, False
            quiet = 0
            for _ in range(200):
                await pass_seconds(5)
                assert self.core is not None
                lag = sum(c.lag() for g in self.core.delivery.groups.values() for c in g.cursors.values())
                done = not lag and not await self.core.store.undecided(None, None, None, 1)
                quiet = quiet + 1 if done and not self.core.store.next_due_us() else 0
                if quiet == 2:  # once is not enough: a commit that is decided may not be visible yet
                    break
            for actor in actors:
                actor.cancel()
            await asyncio.gather(*actors, return_exceptions=True)
            return await self.violations()
        finally:
            if self.core is not None:
                self.kill_server()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def violations(self) -> list[str]:
        assert self.core is not None
        broken = []
        committed = {name for name, state in self.database.rows.items() if state == "COMMITTED"}
        letters = set()
        if self.core.store.has_topic(dead_letter_topic(GROUP)):
            kept = self.core.store.read(dead_letter_topic(GROUP), 0, 0, 10_000, 1 << 30)
            letters = {ids.to_text(m.transaction_id) for m in kept}
            if len(letters) != len(kept):
                broken.append("DUP_ENQUEUE: a message is in the dead letters twice")
        broken += [f"GHOST: nobody refused {name}, which is in the dead letters" for name in letters - self.dead]
        for who, effects in self.effects.items():
            missing = committed - effects - (letters if who == GROUP else set())
            broken += [f"LOST: {name} committed and had no effect in {who}" for name in missing]
        self.look_for_faults()
        broken += self.disorder
        for group in self.core.delivery.groups.values():
            behind = [(c.topic, c.queue, c.lag()) for c in group.cursors.values() if c.lag()]
            broken += [f"STUCK: group {group.name} is never given what is left of {place}" for place in behind]
        for name in self.delivered - committed:
            broken.append(f"GHOST: {name} was delivered and did not commit")
        for t in await self.core.store.undecided(None, None, None, 100):
            broken.append(f"IN DOUBT: {ids.to_text(t.id)} is still {t.state.name}")
        topic = self.core.store.topic(TOPIC)
        places = [
            message
            for queue in range(0 if topic is None else topic.queues)
            for message in self.core.store.read(TOPIC, queue, 0, 10_000, 1 << 30)
        ]
        if len({m.transaction_id for m in places}) != len(places):
            broken.append("DUP_ENQUEUE: a message is in the queue twice")
        return broken
