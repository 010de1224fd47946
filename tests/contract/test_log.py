"""The log alone: it agrees with the model in memory step by step, and keeps its order over segments and syncs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notify.errors import Corrupt
from notify.protocol import ids
from notify.runtime import faults
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log import LogStore, history, journal
from notify.storage.memory import MemoryStore
from notify.storage.records import NewMessage, NewTransaction, Put, State
from notify.storage.topics import Flush, Topic
from tests.contract.stores import SECOND, T0, Bench, commit
from tests.support.clock import PATIENCE_SECONDS, eventually_async
from tests.support.disks import NoThreads, UnsyncedDisk
from tests.support.transactions import sent
from tests.support.virtual_loop import run as run_in_virtual_time

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
    """After any sequence of operations and restarts the log answers as the model in memory does."""

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
                t = sent(bytes([n]) * n * 100, key=str(n), committed=step == "message", **options)
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
            own, plain = log.store.progress("c", "t", queue), model.progress("c", "t", queue)
            assert (own.floor, own.settled) == (plain.floor, plain.settled)
        states = [t.id for t in known]
        assert await log.store.states(states) == await model.states(states)
        assert log.store.next_due_us() == model.next_due_us()
        await log.store.close()

    asyncio.run(whole())


async def _both(log: Bench, model: MemoryStore, call: Callable[[Any], Awaitable[Any]]) -> None:
    assert await call(log.store) == await call(model)


class HeldDisk(UnsyncedDisk):
    """A disk whose syncs wait while it is held; `is_held` is set when one waits."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.go = threading.Event()
        self.go.set()
        self.is_held = threading.Event()

    def hold(self) -> None:
        self.is_held.clear()
        self.go.clear()

    def sync(self, fd: int) -> None:
        if not self.go.is_set():
            self.is_held.set()
            assert self.go.wait(2 * PATIENCE_SECONDS), "the test must release the disk"


def test_only_a_synced_topic_waits_for_the_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LOOP_SYNC_SECONDS", 0.0)  # the thread syncs, as with a slow disk
    monkeypatch.setattr(journal, "IDLE_MARK_SECONDS", 3600.0)  # no idle mark writes a frame

    async def whole() -> None:
        disk = HeldDisk(tmp_path / "log")
        store = LogStore(tmp_path / "log", disk=disk)
        await store.open(T0)

        def put(topic: Flush) -> asyncio.Task[Any]:
            return asyncio.create_task(store.put([sent(topic=topic.name)], T0))

        for flush in Flush:
            await store.create_topic(Topic(flush.name, flush=flush))
        disk.hold()
        synced = put(Flush.SYNC)
        await eventually_async(disk.is_held.is_set, "the writer to be in its sync")
        assert (await asyncio.wait_for(put(Flush.MEMORY), PATIENCE_SECONDS))[0].flush == Flush.MEMORY
        waiting = put(Flush.ASYNC)
        # When this second put returns, the loop has begun the put of ASYNC, too.
        assert (await asyncio.wait_for(put(Flush.MEMORY), PATIENCE_SECONDS))[0].flush == Flush.MEMORY
        assert not synced.done() and not waiting.done()  # ASYNC's frame is behind the one that is being synced
        disk.go.set()
        assert (await synced)[0].flush == Flush.SYNC
        assert (await waiting)[0].flush == Flush.ASYNC
        await eventually_async(lambda: store.journal.in_flight is None, "the sync of ASYNC's frame")
        disk.hold()
        another = sent(topic="ASYNC")
        assert (await asyncio.wait_for(store.put([another], T0), PATIENCE_SECONDS))[0].flush == Flush.ASYNC
        await eventually_async(disk.is_held.is_set, "the sync that nobody waits for")
        assert (await asyncio.wait_for(store.put([another], T0), PATIENCE_SECONDS))[0].put == Put.ALREADY
        disk.go.set()
        await store.close()

    asyncio.run(whole())


class SlowDirectory(UnsyncedDisk):
    """A disk that lists its directory slowly, so that another thread can act between a list and its use."""

    def names(self) -> list[str]:
        names = super().names()
        time.sleep(0.02)  # the pause widens the window of the fault; nothing waits for it otherwise
        return names


def test_checkpoints_are_written_one_after_the_other(tmp_path: Path) -> None:
    """Retention and sealing may checkpoint at once: both dropped the same old file, and the second did not find it."""

    async def whole() -> None:
        store = LogStore(tmp_path / "log", disk=SlowDirectory(tmp_path / "log"))
        await store.open(T0)
        await store.create_topic(Topic("t"))
        for _ in range(3):
            await asyncio.gather(*(store.checkpoint() for _ in range(4)))
            await store.put([sent()], T0)
        assert len(list((tmp_path / "log").glob("*.ckpt"))) == 2
        await store.close()

    asyncio.run(whole())


@pytest.mark.parametrize("segment_bytes", [512, 4096], ids=["a frame each", "some frames each"])
def test_a_part_is_not_sealed_before_its_last_frame(tmp_path: Path, segment_bytes: int) -> None:
    """A segment that is full while the one before it is being sealed is sealed only with its last frame.

    `make crash` showed the fault: the index of such a segment lacked that frame, and its messages were in no queue.
    """

    async def whole() -> None:
        disk = UnsyncedDisk(tmp_path / "log")
        store = LogStore(tmp_path / "log", segment_bytes=segment_bytes, disk=disk, threads=NoThreads(lambda: 0.001))
        await store.open(T0)
        await store.create_topic(Topic("t"))

        chance = random.Random(1)

        async def caller() -> None:
            for _ in range(30):
                await asyncio.sleep(chance.random() * 0.002)  # a pause in virtual time, as the disk's delay is
                await commit(store, *[sent(bytes(300)) for _ in range(5)])

        await asyncio.gather(*(caller() for _ in range(8)))
        assert store.bounds("t", 0) == (0, 1200)
        await store.close()
        reopened = LogStore(tmp_path / "log", disk=disk, threads=NoThreads(lambda: 0.0))
        await reopened.open(T0)
        offset = 0
        while messages := reopened.read("t", 0, offset, 1000, 1 << 30):
            assert [m.offset for m in messages] == list(range(offset, offset + len(messages)))
            offset += len(messages)
        assert offset == 1200
        await reopened.close()

    run_in_virtual_time(whole())


def test_a_fault_in_sealing_is_counted_and_does_not_end_it(tmp_path: Path) -> None:
    """Sealing continues after a fault. The fault was lost with its task, and sealing stopped until the next start."""

    class Faulty(NoThreads):
        faults = 2

        async def in_thread(self, function: Callable[..., None], *arguments: object) -> None:
            if self.faults:
                self.faults -= 1
                raise ValueError("planted")
            await super().in_thread(function, *arguments)

    async def whole() -> None:
        disk = UnsyncedDisk(tmp_path / "log")
        store = LogStore(tmp_path / "log", segment_bytes=512, disk=disk, threads=Faulty(lambda: 0.001))
        await store.open(T0)
        await store.create_topic(Topic("t"))
        before = faults.count()
        for _ in range(6):
            await commit(store, sent(bytes(600)))
        await store.sealed_up()
        assert faults.count() == before + 2
        assert store.state.parts.sealed and not store.state.parts.being_sealed
        await store.close()

    run_in_virtual_time(whole())


def test_ids_are_found_whatever_their_producers_clocks_say(tmp_path: Path) -> None:
    """Ids are found in segments whose ranges of ids overlap, begin late, or lie within each other."""

    def opened() -> LogStore:
        return LogStore(tmp_path / "log", segment_bytes=2048, disk=UnsyncedDisk(tmp_path / "log"))

    async def whole() -> None:
        store = opened()
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
            store = opened()
            await store.open(T0)
        await store.close()

    asyncio.run(whole())


def opened_below(folder: Path) -> list[str]:
    """The files below a folder that this process has open. Other threads may open and close theirs meanwhile."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(os.readlink(descriptor))
    return [file for file in opened if file.startswith(f"{folder}/")]


def test_a_log_that_cannot_be_opened_is_let_go_of(tmp_path: Path) -> None:
    """It kept its files and its lock: opened again, it was said to be in use by another process."""

    async def scenario() -> None:
        unreadable = tmp_path / f"{1:020d}.ckpt"
        unreadable.write_bytes(b"no checkpoint")
        with pytest.raises(Corrupt):
            await LogStore(tmp_path).open(T0)
        assert not opened_below(tmp_path)
        unreadable.unlink()
        store = LogStore(tmp_path)
        await store.open(T0)
        assert opened_below(tmp_path)
        await store.close()

    asyncio.run(scenario())


def test_a_search_for_what_was_done_with_a_message_ends_after_a_while() -> None:
    """The search tells what it found until then, and that it may be a part. The clock is that of the thread's work."""
    worked = iter((0.0, 2 * history.MOST_SEARCH_SECONDS))
    place = history.Place(topic=1, queue=0, offset=7, start=0)
    found = history.find_settlements(None, [None], place, {"group": -1}, worked.__next__)  # type: ignore[arg-type, list-item]
    assert found == ([], False)
