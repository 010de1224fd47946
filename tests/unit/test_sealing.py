"""Finishing segments before they are full, and what retention drops while their shipping is under way."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from notify.storage.log import LogStore, rewrite
from notify.storage.log.disk import Disk
from notify.storage.log.format import segment_header
from notify.storage.records import State
from notify.storage.topics import Topic
from tests.support.clock import PATIENCE_SECONDS, eventually_async
from tests.support.logs import SMALL_SEGMENT, T0, commit
from tests.support.transactions import bodies_in, sent

HOUR_US = 3_600_000_000


@asynccontextmanager
async def opened(directory: Path, **options: Any) -> AsyncIterator[LogStore]:
    """A log with topic `t`."""
    store = LogStore(directory, **options)
    await store.open(T0)
    try:
        if not store.has_topic("t"):
            await store.create_topic(Topic("t", 1))
        yield store
    finally:
        await store.close()


def names(directory: Path, suffix: str) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob(f"*{suffix}"))


async def test_a_segment_that_holds_something_is_finished(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, sent(b"1"))
        end = store.begin_segment()
        await eventually_async(lambda: names(tmp_path, ".idx") == [0], "the index of the finished segment")
        assert names(tmp_path, ".log")[1] >= end
        assert store.begin_segment() == names(tmp_path, ".log")[1], "a blank segment is left as it is"
        await store.sync()
        assert len(names(tmp_path, ".log")) == 2
        assert store.behind(0)[0] == 1 and store.behind(names(tmp_path, ".log")[1]) == (0, 0)
        await commit(store, sent(b"2"))
        assert bodies_in(store.read("t", 0, 0, 10, 1 << 20)) == [b"1", b"2"]

    async with opened(tmp_path) as store:
        assert bodies_in(store.read("t", 0, 0, 10, 1 << 20)) == [b"1", b"2"]


async def test_a_segment_is_finished_while_frames_are_on_their_way(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for n in range(20):
            waiting = [asyncio.ensure_future(commit(store, sent(b"%d-%d" % (n, i)))) for i in range(5)]
            await asyncio.sleep(0)  # their halves are appended, and the first frame is perhaps being written
            store.begin_segment()
            await asyncio.gather(*waiting)
        store.begin_segment()
        await store.sync()
        await eventually_async(
            lambda: names(tmp_path, ".idx") == names(tmp_path, ".log")[:-1], "an index for each finished segment"
        )
        assert len(names(tmp_path, ".log")) >= 20
        assert len(store.read("t", 0, 0, 1000, 1 << 20)) == 100


async def test_a_checkpoint_at_a_segments_beginning_is_kept(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, sent(b"1"))
        store.begin_segment()
        await store.sync()
        await store.sealed_up()
        for n in range(4):
            await commit(store, sent(b"%d" % n))
            await store.checkpoint()
        assert names(tmp_path, ".log")[1] in names(tmp_path, ".ckpt")
        assert len(names(tmp_path, ".ckpt")) == 3


async def test_a_segment_that_was_not_sealed_before_a_crash_is_sealed_without_another_write(tmp_path: Path) -> None:
    async with opened(tmp_path / "log") as store:
        await commit(store, sent(b"1"))
        store.begin_segment()
        await store.sync()
        await store.sealed_up()
    _, second = names(tmp_path / "log", ".log")
    (tmp_path / "log" / f"{0:020d}.idx").unlink()
    for name in names(tmp_path / "log", ".ckpt"):
        (tmp_path / "log" / f"{name:020d}.ckpt").unlink()
    (tmp_path / "log" / f"{second:020d}.log").write_bytes(segment_header(second, T0))
    store = LogStore(tmp_path / "log")
    await store.open(T0)
    await store.sealed_up()
    assert names(tmp_path / "log", ".idx") == [0] and second in names(tmp_path / "log", ".ckpt")
    assert bodies_in(store.read("t", 0, 0, 10, 1 << 20)) == [b"1"]
    store.let_go()


@pytest.mark.parametrize("suffix", [".idx", ".ckpt"])
async def test_a_failed_seal_is_retried_without_another_write(tmp_path: Path, suffix: str) -> None:
    class FullOnce(Disk):
        failures = 1

        def replace(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
            if name.endswith(suffix) and self.failures:
                self.failures -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            super().replace(name, chunks)

    async with opened(tmp_path, disk=FullOnce(tmp_path)) as store:
        await commit(store, sent(b"1"))
        store.begin_segment()
        await store.sync()
        await eventually_async(lambda: not store.disk.failures, "the first try")
        await store.sealed_up()
        store.begin_segment()
        await store.sealed_up()
        second = names(tmp_path, ".log")[1]
        assert names(tmp_path, ".idx") == [0] and second in names(tmp_path, ".ckpt")
        assert names(tmp_path, ".log") == [0, second]


@pytest.mark.parametrize("bound", ["time", "room"])
async def test_retention_waits_for_what_is_not_listed(tmp_path: Path, bound: str) -> None:
    options = {"retention_us": HOUR_US} if bound == "time" else {"retention_us": HOUR_US, "retention_bytes": 1}
    now_us = T0 + (2 * HOUR_US if bound == "time" else 0)

    async with opened(tmp_path, segment_bytes=SMALL_SEGMENT, **options) as store:
        for n in range(60):
            await commit(store, sent(b"%d" % n))
        await store.sealed_up()
        bases = names(tmp_path, ".log")
        store.hold_from(0)
        assert await store.retain(now_us) == 0
        store.hold_from(bases[2])
        assert await store.retain(now_us) == 2
        assert names(tmp_path, ".log")[0] == bases[2]
        store.hold_from(bases[3] - 1)
        assert await store.retain(now_us) == 0
        store.hold_from(None)
        assert await store.retain(now_us) >= 2


async def test_a_later_segment_that_points_at_none_of_the_dropped_ones_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of 10,000 small segments would else be read as a whole for each segment that is dropped."""
    read: list[int] = []
    below = rewrite._below

    def counted(entries: Any, high: int) -> Any:
        read.append(len(entries))
        return below(entries, high)

    monkeypatch.setattr(rewrite, "_below", counted)

    async with opened(tmp_path, segment_bytes=SMALL_SEGMENT, retention_us=HOUR_US) as store:
        late = sent(b"late")
        await store.put([late], T0)
        for n in range(100):
            await commit(store, sent(b"%d" % n))
        await store.decide([(late.id, late.producer_group, State.COMMITTED)], T0 + HOUR_US)
        store.begin_segment()
        await store.sync()
        await store.sealed_up()
        segments = len(names(tmp_path, ".log"))
        store.hold_from(names(tmp_path, ".log")[1])
        assert await store.retain(T0 + HOUR_US) == 1 and segments > 6
        assert len(read) <= 4, "its own entries, those of the live segments, and those of the one that points at it"
        assert bodies_in(store.read("t", 0, 100, 1, 1 << 20)) == [b"late"]


class HeldDisk(Disk):
    """A disk on which an index is written once the test allows it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.has_begun, self.may_end, self.begun = threading.Event(), threading.Event(), 0

    def replace(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        if name.endswith(".idx"):
            self.begun += 1
            self.has_begun.set()
            assert self.may_end.wait(PATIENCE_SECONDS)
        super().replace(name, chunks)


async def test_a_wait_for_the_sealer_that_is_cancelled_cancels_no_sealing(tmp_path: Path) -> None:
    """A server that stopped while a segment was dropped wrote the same index twice at a time."""
    disk = HeldDisk(tmp_path)
    async with opened(tmp_path, disk=disk) as store:
        await commit(store, sent(b"1"))
        store.begin_segment()
        await asyncio.to_thread(disk.has_begun.wait, PATIENCE_SECONDS)
        waiting = asyncio.ensure_future(store.sealed_up())
        await asyncio.sleep(0)  # it waits now
        waiting.cancel()
        await asyncio.wait([waiting])
        await commit(store, sent(b"2"))
        disk.may_end.set()
        await store.sealed_up()
        assert disk.begun == 1
