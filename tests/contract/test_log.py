"""What only the log does: it agrees with memory step by step, and with itself over segments and syncs."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notify import ids
from storage.log import LogStore
from storage.log.disk import Disk
from storage.memory import MemoryStore
from storage.store import (
    Flush,
    NewMessage,
    NewTransaction,
    Put,
    SettleKind,
    State,
    Subscription,
    Topic,
)
from tests.contract.stores import SECOND, T0, Bench, commit, half

steps = st.lists(
    st.tuples(
        st.sampled_from(["half", "commit", "rollback", "message", "settle", "restart", "delay", "release"]),
        st.integers(0, 7),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps)
def test_the_log_does_what_memory_does(steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any sequence of operations, with restarts, leaves the log and the plain model with the same answers."""

    async def whole() -> None:
        log = Bench("small-segments", tmp_path_factory.mktemp("log") / "log")
        model = MemoryStore()
        await log.store.open(T0)
        known: list[NewTransaction] = []
        now = T0
        await _both(log, model, lambda s: s.create_topic(Topic("t", queues=2)))
        await _both(log, model, lambda s: s.subscribe(Subscription("c", "t"), [0, 0]))
        for step, n in steps:
            now += SECOND
            at = now
            if step in ("half", "message", "delay"):
                options = {"delay_us": n * SECOND} if step == "delay" else {}
                t = half(bytes([n]) * n * 100, key=str(n), committed=step == "message", **options)
                known.append(t)
                await _both(log, model, lambda s, t=t, at=at: s.put([t], at))
            elif step in ("commit", "rollback") and known:
                t = known[n % len(known)]
                outcome = State.COMMITTED if step == "commit" else State.ROLLED_BACK
                await _both(log, model, lambda s, t=t, o=outcome, at=at: s.decide([(t.id, "g", o)], at))
            elif step == "settle":
                await _both(log, model, lambda s, n=n, at=at: s.settle("c", "t", n % 2, [(n, 2)], SettleKind.ACK, at))
            elif step == "release":
                assert log.store.release_due(at, 3) == model.release_due(at, 3)
                await log.store.sync()
            elif step == "restart":
                await log.restart(now)
        await log.restart(now)
        for queue in range(2):
            assert log.store.read("t", queue, 0, 100, 1 << 20) == model.read("t", queue, 0, 100, 1 << 20)
            mine, plain = log.store.progress("c", "t", queue), model.progress("c", "t", queue)
            assert (mine.floor, mine.settled) == (plain.floor, plain.settled)
        states = [t.id for t in known]
        assert await log.store.states(states) == await model.states(states)
        assert log.store.next_due_us() == model.next_due_us()
        await log.store.close()

    asyncio.run(whole())


async def _both(log: Bench, model: MemoryStore, call: Callable[[Any], Awaitable[Any]]) -> None:
    assert await call(log.store) == await call(model)


class HeldDisk(Disk):
    """Its syncs wait until they are let go."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.go = threading.Event()
        self.go.set()

    def sync(self, fd: int) -> None:
        assert self.go.wait(10)
        super().sync(fd)


def test_only_a_synced_topic_waits_for_the_sync(tmp_path: Path) -> None:
    async def whole() -> None:
        disk = HeldDisk(tmp_path / "log")
        store = LogStore(tmp_path / "log", disk=disk)
        await store.open(T0)
        for flush in Flush:
            await store.create_topic(Topic(flush.name, flush=flush))
        await _idle(store)
        store.journal._sync_average = 1.0  # a slow disk: its syncs are the thread's
        disk.go.clear()
        halves = {flush: half(topic=flush.name) for flush in Flush}
        synced = asyncio.create_task(store.put([halves[Flush.SYNC]], T0))
        await asyncio.sleep(0.05)  # the writer is in its sync now
        result = await asyncio.wait_for(store.put([halves[Flush.MEMORY]], T0), 1)
        assert result[0].flush == Flush.MEMORY
        waiting = asyncio.create_task(store.put([halves[Flush.ASYNC]], T0))
        await asyncio.sleep(0.05)
        assert not synced.done() and not waiting.done()  # its frame is behind the one that is being synced
        disk.go.set()
        assert (await synced)[0].flush == Flush.SYNC
        assert (await waiting)[0].flush == Flush.ASYNC
        await _idle(store)  # else that frame's own sync, or the mark behind it, would be held
        disk.go.clear()
        another = half(topic="ASYNC")
        assert (await asyncio.wait_for(store.put([another], T0), 1))[0].flush == Flush.ASYNC
        assert (await asyncio.wait_for(store.put([another], T0), 1))[0].put == Put.ALREADY
        disk.go.set()
        await store.close()

    asyncio.run(whole())


async def _idle(store: LogStore) -> None:
    """Until no frame is on its way and the durable mark behind the last one is written."""
    async with asyncio.timeout(10):
        while store.journal.in_flight is not None or not store.journal._marked:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class SlowDirectory(Disk):
    """Long enough between listing the directory and acting on it for another thread to come in."""

    def names(self) -> list[str]:
        names = super().names()
        time.sleep(0.02)
        return names


def test_checkpoints_are_written_one_after_the_other(tmp_path: Path) -> None:
    """Retention's, while a segment is sealed: each would drop the same old one, and the second not find it."""

    async def whole() -> None:
        store = LogStore(tmp_path / "log", disk=SlowDirectory(tmp_path / "log"))
        await store.open(T0)
        await store.create_topic(Topic("t"))
        for _ in range(3):
            await asyncio.gather(*(store.checkpoint() for _ in range(4)))
            await store.put([half()], T0)
        assert len(list((tmp_path / "log").glob("*.ckpt"))) == 2
        await store.close()

    asyncio.run(whole())


def test_a_part_is_not_sealed_before_its_last_frame(tmp_path: Path) -> None:
    """Every frame fills a segment, so that the next one is full before this one is sealed.

    Found by `make crash`: the index of such a segment lacked that frame, and its messages were in no queue.
    """

    async def whole() -> None:
        store = LogStore(tmp_path / "log", segment_bytes=512, write_delay=lambda: 0.001)
        await store.open(T0)
        await store.create_topic(Topic("t"))

        chance = random.Random(1)

        async def caller() -> None:
            for _ in range(30):
                await asyncio.sleep(chance.random() * 0.002)
                await commit(store, *[half(bytes(300)) for _ in range(5)])

        await asyncio.gather(*(caller() for _ in range(8)))
        assert store.bounds("t", 0) == (0, 1200)
        await store.close()
        reopened = LogStore(tmp_path / "log")
        await reopened.open(T0)
        offset = 0
        while found := reopened.read("t", 0, offset, 1000, 1 << 30):
            assert [m.offset for m in found] == list(range(offset, offset + len(found)))
            offset += len(found)
        assert offset == 1200
        await reopened.close()

    asyncio.run(whole())


def test_ids_are_found_whatever_their_producers_clocks_say(tmp_path: Path) -> None:
    """Segments whose ranges of ids overlap, begin late, or lie in each other."""

    async def whole() -> None:
        store = LogStore(tmp_path / "log", segment_bytes=2048)
        await store.open(T0)
        await store.create_topic(Topic("t"))
        chance = random.Random(3)
        made: dict[bytes, State] = {}
        for step in range(120):
            skew = chance.choice((0, 0, 0, -60_000, 5_000, 3_600_000))
            milliseconds = 1_700_000_000_000 + step * 100 + skew
            name = ((milliseconds << 80) | (7 << 76) | (2 << 62) | chance.getrandbits(60)).to_bytes(16)
            outcome = chance.choice((State.COMMITTED, State.ROLLED_BACK))
            await store.put([NewTransaction(name, "g", [NewMessage("t", bytes(300))])], T0)
            await store.decide([(name, "g", outcome)], T0)
            made[name] = outcome
        await store.sealed_up()
        assert len(store.state.parts) > 20
        for _ in range(2):
            assert dict(zip(made, await store.states(list(made)), strict=True)) == made
            assert await store.states([bytes(16), b"\xff" * 16, ids.new_id()]) == [None] * 3
            assert all(len(store.messages(n)) == (made[n] == State.COMMITTED) for n in made)
            await store.close()
            store = LogStore(tmp_path / "log", segment_bytes=2048)
            await store.open(T0)
        await store.close()

    asyncio.run(whole())
