"""Retention drops old segments; messages that still wait are carried forward, also over crashes and repeatedly."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable
from pathlib import Path

import pytest

from notify.errors import Unavailable
from notify.storage.checks import Due
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log import LogStore, checkpoint, journal
from notify.storage.log.disk import Disk
from notify.storage.records import Put, State
from notify.storage.topics import Topic
from tests.contract.retained import HOUR, fill, opened, rest, subscribed
from tests.contract.stores import T0
from tests.support.disks import UnsyncedDisk
from tests.support.transactions import bodies_in, content, message, sent


def test_settled_messages_go_and_waiting_ones_stay(tmp_path: Path) -> None:
    async def run() -> None:
        store = await subscribed(tmp_path / "log")
        old = await fill(store, 60, T0)
        pending = sent(b"undecided")
        delayed = sent(b"delayed", delay_us=100 * HOUR)
        await store.put([pending, delayed], T0)
        await store.decide([(delayed.id, "g", State.COMMITTED)], T0)
        await fill(store, 10, T0 + 1)
        await store.settle("c", "t", 0, [(0, 20), (30, 25)], SettleKind.ACK, T0)
        segments = len(store.segments.all())
        assert await store.retain(T0 + HOUR - 1) == 0
        new = await fill(store, 30, T0 + 2 * HOUR)
        dropped = await store.retain(T0 + 2 * HOUR)
        assert dropped >= 5
        assert len(store.segments.all()) < segments + 6

        async def check(store: LogStore) -> None:
            remaining = rest(store)
            expected = {n: old[n] for n in [*range(20, 30), *range(55, 60)]}
            assert {n: remaining[n] for n in expected} == expected
            # The newest segment of that time may still be whole; of those before it only carried messages are left.
            assert not {*range(20), *range(30, 45)} & remaining.keys()
            assert [remaining[n] for n in range(70, 100)] == new
            assert await store.half_contents([Due(pending.id, 0, "", "", 0, ())]) == [[content(b"undecided")]]
            assert store.bounds("t", 0)[1] == 100

        await check(store)
        await store.close()
        store = opened(tmp_path / "log")
        await store.open(T0)
        await check(store)
        # A second time: carried messages are carried again, unless they were settled meanwhile.
        await fill(store, 40, T0 + 4 * HOUR)
        await store.settle("c", "t", 0, [(20, 5)], SettleKind.ACK, T0)
        assert await store.retain(T0 + 4 * HOUR) >= 1
        left = rest(store)
        assert {n: left[n] for n in range(25, 30)} == {n: old[n] for n in range(25, 30)}
        assert await store.half_contents([Due(pending.id, 0, "", "", 0, ())]) == [[content(b"undecided")]]
        assert (await store.decide([(pending.id, "g", State.COMMITTED)], T0 + 4 * HOUR))[0].changed
        assert store.release_due(T0 + 101 * HOUR, 10) == 1
        await store.sync()
        await store.close()
        store = opened(tmp_path / "log")
        await store.open(T0)
        left = rest(store)
        assert sorted(left.values())[-2:] == [b"delayed", b"undecided"]
        # Once all messages are settled, the indexes of dropped segments go, and no old message is left.
        await store.settle("c", "t", 0, [(0, 200)], SettleKind.ACK, T0)
        await fill(store, 20, T0 + 9 * HOUR)
        await store.retain(T0 + 9 * HOUR)
        first = store.segments.all()[0].base
        assert [name for name in store.disk.names() if name.endswith(".idx") and int(name[:20]) < first] == []
        assert store.bounds("t", 0)[0] > 60
        await store.close()

    asyncio.run(run())


def test_a_message_committed_after_its_halfs_segment_expired(tmp_path: Path) -> None:
    """Retention counts from the commit: the half is old, the commit is young."""

    async def run() -> None:
        store = opened(tmp_path / "log")
        await store.open(T0)
        await store.create_topic(Topic("t"))
        late = sent(b"late")
        await store.put([late], T0)
        await fill(store, 20, T0)
        await store.decide([(late.id, "g", State.COMMITTED)], T0 + 2 * HOUR)
        await fill(store, 20, T0 + 2 * HOUR)
        assert await store.retain(T0 + 2 * HOUR) >= 1
        assert b"late" in rest(store).values()
        await store.close()
        store = opened(tmp_path / "log")
        await store.open(T0)
        assert b"late" in rest(store).values()
        await store.close()

    asyncio.run(run())


def test_a_topic_may_keep_longer(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "log")
        await store.open(T0)
        await store.create_topic(Topic("t", retention_us=10 * HOUR))
        await fill(store, 40, T0)
        await fill(store, 20, T0 + 5 * HOUR)
        assert await store.retain(T0 + 5 * HOUR) == 0
        assert await store.retain(T0 + 11 * HOUR) >= 1
        await store.close()

    asyncio.run(run())


def test_a_topic_keeps_its_bytes_and_what_a_group_has_not_settled(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "log", retention_us=0)
        await store.open(T0)
        await store.create_topic(Topic("t", retention_bytes=4000))
        await store.subscribe(Subscription("c", "t"), [0])
        everything = await fill(store, 100, T0)
        assert await store.retain(T0) == 0  # the group has settled no message
        await store.settle("c", "t", 0, [(0, 40)], SettleKind.ACK, T0)
        assert await store.retain(T0) > 0
        start = store.bounds("t", 0)[0]
        assert 30 <= start <= 40
        await store.settle("c", "t", 0, [(40, 60)], SettleKind.ACK, T0)
        assert await store.retain(T0) > 0
        start, end = store.bounds("t", 0)
        assert 100 - 40 <= start <= 100 - 4000 // len(message(everything[0]).payload)
        for reopened in (False, True):
            if reopened:
                await store.close()
                store = opened(tmp_path / "log", retention_us=0)
                await store.open(T0)
            assert store.bounds("t", 0) == (start, end)
            assert [rest(store)[n] for n in range(start, 100)] == everything[start:]
        await store.close()

    asyncio.run(run())


def test_the_log_as_a_whole_keeps_its_room_and_all_ids(tmp_path: Path) -> None:
    async def run() -> None:
        def reopened() -> LogStore:
            return opened(tmp_path / "log", retention_bytes=20_000)

        store = reopened()
        await store.open(T0)
        await store.create_topic(Topic("t"))
        old = [sent(b"old" + bytes(200)) for _ in range(60)]
        await store.put(old, T0)
        await store.decide([(t.id, "g", State.COMMITTED) for t in old[:50]], T0)
        await store.decide([(t.id, "g", State.ROLLED_BACK) for t in old[50:]], T0)
        await fill(store, 60, T0 + 1)
        assert await store.retain(T0 + 2) > 0
        assert store.journal.end - store.segments.first_base <= 20_000 + 4096
        for _ in range(2):
            assert store.bounds("t", 0)[0] > 50
            assert len(rest(store)) == 110 - store.bounds("t", 0)[0]
            # Ids are known for the time of retention, although their messages are gone.
            assert await store.states([t.id for t in old]) == [State.COMMITTED] * 50 + [State.ROLLED_BACK] * 10
            again = (await store.put([old[3]], T0 + 3))[0]
            assert again.put is Put.ALREADY
            await store.close()
            store = reopened()
            await store.open(T0)
        await fill(store, 30, T0 + 2 * HOUR)
        await store.retain(T0 + 2 * HOUR)
        await store.retain(T0 + 2 * HOUR)
        assert await store.states([old[0].id]) == [None]
        await store.close()

    asyncio.run(run())


def test_delayed_messages_outlive_their_segments(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "log")
        await store.open(T0)
        await store.create_topic(Topic("t"))
        waiting = [sent(b"wait %d" % n, deliver_at_us=T0 + (100 + n) * HOUR) for n in range(20)]
        await store.put(waiting, T0)
        await store.decide([(t.id, "g", State.COMMITTED) for t in waiting], T0)
        for hours in (2, 4, 6):
            await fill(store, 40, T0 + hours * HOUR)
            assert await store.retain(T0 + hours * HOUR) >= 0
            await store.close()
            store = opened(tmp_path / "log")
            await store.open(T0 + hours * HOUR)
        assert store.segments.first_base > 4096
        assert store.delayed() == 20
        assert store.release_due(T0 + 200 * HOUR, 100) == 20
        await store.sync()
        released = bodies_in(store.read("t", 0, 0, 1000, 1 << 20))[-20:]
        assert released == [b"wait %d" % n for n in range(20)]
        await store.close()

    asyncio.run(run())


def test_carrying_forward_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention beside producers and a group that acknowledges loses no waiting message and refuses no producer."""
    monkeypatch.setattr(journal, "LOOP_SYNC_SECONDS", 0.0)  # the thread writes the frames, beside the loop's work

    async def run() -> None:
        store = await subscribed(tmp_path / "log")
        now_us = T0
        bodies: list[bytes] = []
        settled: set[int] = set()

        async def produce() -> None:
            nonlocal now_us
            for n in range(400):
                if n % 20 == 0:
                    retained.clear()
                    await retained.wait()  # otherwise a quick disk has stored all before retention begins
                now_us += HOUR // 50
                body = b"%d" % n + bytes(150)
                t = sent(body, delay_us=3 * HOUR if n % 9 == 0 else 0)
                await store.put([t], now_us)
                await store.decide([(t.id, "g", State.COMMITTED)], now_us)
                bodies.append(body)
                store.release_due(now_us, 100)

        async def acknowledge() -> None:
            while not producing.done():
                end = store.bounds("t", 0)[1]
                some = [n for n in range(0, end, 3) if n not in settled]
                if some:
                    await store.settle("c", "t", 0, [(n, 1) for n in some], SettleKind.ACK, now_us)
                    settled.update(some)
                await asyncio.sleep(0.002)  # the pace of the load

        dropped = 0
        retained = asyncio.Event()
        producing = asyncio.ensure_future(produce())
        acknowledging = asyncio.ensure_future(acknowledge())
        while not producing.done():
            dropped += await store.retain(now_us)
            retained.set()
            await asyncio.sleep(0.001)  # the pace of the load
        await asyncio.gather(producing, acknowledging)
        now_us += 10 * HOUR
        while store.release_due(now_us, 1000):
            pass
        await store.sync()
        assert dropped > 10
        for reopened in (False, True):
            if reopened:
                await store.close()
                store = opened(tmp_path / "log")
                await store.open(now_us)
            remaining = rest(store)
            end = store.bounds("t", 0)[1]
            assert end == 400
            waiting = [n for n in range(end) if n not in settled]
            missing = [n for n in waiting if n not in remaining]
            corrupt = {m.offset for m in store.read("t", 0, 0, 10_000, 1 << 30) if m.corrupt}
            assert (missing, corrupt & set(waiting)) == ([], set()), reopened
            # Each message is there once at most, and every message that is not settled is there.
            assert len(set(remaining.values())) == len(remaining) and set(remaining.values()) <= set(bodies)
        await store.close()

    asyncio.run(run())


def test_a_bound_below_what_waits_ends_and_says_so(tmp_path: Path) -> None:
    """Carrying a backlog larger than the bound frees no room: retention stops, and raises an error that says so."""

    async def run() -> None:
        store = await subscribed(tmp_path / "log", retention_us=0, retention_bytes=8000)
        await fill(store, 100, T0)
        end = store.journal.end
        with pytest.raises(Unavailable, match="let them catch up"):
            await store.retain(T0)
        assert store.journal.end - end < 8000
        # Every fourth message waits: less than half is carried, which frees room, and the call ends.
        for first in range(0, 100, 4):
            await store.settle("c", "t", 0, [(first, 3)], SettleKind.ACK, T0)
        segments = len(store.segments.all())
        assert 0 < await store.retain(T0) <= segments
        assert sorted(rest(store)) == [*range(3, 100, 4)] or set(range(3, 100, 4)) <= rest(store).keys()
        await store.close()

    asyncio.run(run())


def test_retention_frees_a_full_disk(tmp_path: Path) -> None:
    """Retention writes before it can drop a segment: on a full disk it takes the ballast's room."""

    async def run() -> None:
        disk = NoRoomButTheBallast(tmp_path / "log")
        store = LogStore(tmp_path / "log", segment_bytes=4096, disk=disk, retention_us=HOUR)
        await store.open(T0)
        await store.create_topic(Topic("t"))
        await fill(store, 60, T0)
        await fill(store, 3, T0 + 2 * HOUR)
        disk.is_full = True
        assert "ballast" in disk.names()
        assert await store.retain(T0 + 2 * HOUR) > 0
        await store.close()

    asyncio.run(run())


class NoRoomButTheBallast(UnsyncedDisk):
    """A disk that, once full, has room only after the ballast is removed."""

    is_full = False

    def reserve(self, fd: int, offset: int, size: int) -> None:
        self._check()
        super().reserve(fd, offset, size)

    def replace(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._check()
        super().replace(name, chunks)

    def _check(self) -> None:
        if self.is_full and "ballast" in self.names():
            raise OSError(errno.ENOSPC, "injected: no space left on device")


def test_dropped_segments_are_recorded(tmp_path: Path) -> None:
    """A reader of the files tells a segment that retention dropped from one that was lost."""
    directory = tmp_path / "log"

    async def run() -> None:
        store = opened(directory)
        await store.open(T0)
        await store.create_topic(Topic("t"))
        await store.checkpoint()
        assert recorded(directory).dropped_to == 0
        await fill(store, 60, T0)
        assert await store.retain(T0 + 2 * HOUR) > 0
        first = store.segments.first_base
        assert recorded(directory).dropped_to == first > 0
        await store.close()
        store = opened(directory)
        await store.open(T0 + 2 * HOUR)
        await store.checkpoint()
        assert recorded(directory).dropped_to == first
        await store.close()
        # A checkpoint of a version that did not record it: the next start takes what is there for what was kept.
        saved = checkpoint.load(Disk(directory))
        assert saved is not None
        saved.state.dropped_to = None
        for file in directory.glob("*.ckpt"):
            file.unlink()
        name = checkpoint.checkpoint_name(saved.position)
        (directory / name).write_bytes(checkpoint.encoded(saved.state, saved.position, saved.time_us))
        store = opened(directory)
        await store.open(T0 + 2 * HOUR)
        await store.checkpoint()
        assert recorded(directory).dropped_to == first
        await store.close()

    asyncio.run(run())


def recorded(directory: Path) -> checkpoint.SavedState:
    saved = checkpoint.load(Disk(directory))
    assert saved is not None
    return saved.state
