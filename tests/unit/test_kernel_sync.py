"""Syncs by the kernel: what one is, when a frame takes that way, and what happens where it fails or is refused."""

from __future__ import annotations

import asyncio
import errno
import os
import select
from pathlib import Path

import pytest

from notify.errors import StorageFailed
from notify.storage.log import LogStore
from notify.storage.log.disk import Disk
from notify.storage.log.journal import EARLY_ENTRIES
from notify.storage.log.kernel_sync import KernelSync
from notify.storage.records import Put
from notify.storage.topics import Topic
from tests.contract.stores import T0
from tests.support.clock import PATIENCE_SECONDS
from tests.support.disks import UnsyncedDisk
from tests.support.transactions import sent


def kernel_sync() -> KernelSync:
    try:
        return KernelSync()
    except OSError as error:
        pytest.skip(f"this kernel has no such calls: {error}")


class Plain(Disk):
    """A disk as it is in production, with a count of the syncs that a thread or the loop waited for, and what syncs."""

    kernel: KernelSync | None = None
    waited = 0

    def kernel_sync(self) -> KernelSync | None:
        return self.kernel

    def sync(self, fd: int) -> None:
        self.waited += 1
        super().sync(fd)


class Counting(KernelSync):
    """Counts its syncs. `refusal` is raised by each submission, `failure` by each result."""

    def __init__(self, refusal: OSError | None = None, failure: OSError | None = None) -> None:
        kernel_sync().close()
        super().__init__()
        self.count = 0
        self.refusal, self.failure = refusal, failure

    def submit(self, fd: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.count += 1
        super().submit(fd)

    def result(self) -> None:
        super().result()
        if self.failure is not None:
            raise self.failure


def test_a_sync_is_told_by_its_descriptor(tmp_path: Path) -> None:
    """It can be repeated, and a file system without it, or a file that is not open, is an error at once."""
    sync = kernel_sync()
    with (tmp_path / "file").open("wb", buffering=0) as file:
        for _ in range(3):
            file.write(b"x")
            sync.submit(file.fileno())
            assert select.select([sync.event_fd], [], [], PATIENCE_SECONDS)[0]
            sync.result()
            assert not select.select([sync.event_fd], [], [], 0)[0]
    reading, writing = os.pipe()
    with pytest.raises(OSError) as refused:
        sync.submit(writing)
    assert refused.value.errno == errno.EINVAL
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError) as unknown:
        sync.submit(writing)
    assert unknown.value.errno == errno.EBADF
    sync.close()


def test_a_disk_with_a_sync_of_its_own_is_not_passed_over(tmp_path: Path) -> None:
    assert UnsyncedDisk(tmp_path).kernel_sync() is None
    kernel = Disk(tmp_path).kernel_sync()
    if kernel is not None:
        kernel.close()


def test_requests_read_before_the_next_turn_of_the_loop_share_the_sync(tmp_path: Path) -> None:
    """An outcome and the next half, which a producer sends one right after the other, cost one sync."""

    async def run() -> int:
        disk = Plain(tmp_path)
        store = LogStore(tmp_path, disk=disk)
        await store.open(T0)
        await store.create_topic(Topic("t", 1))
        before = disk.waited
        first = asyncio.ensure_future(store.put([sent(b"1")], T0))
        await asyncio.sleep(0)  # the first is on its way, and its frame is not closed yet
        second = asyncio.ensure_future(store.put([sent(b"2")], T0))
        await asyncio.gather(first, second)
        syncs = disk.waited - before
        await store.close()
        return syncs

    assert asyncio.run(run()) == 1


async def test_the_kernel_syncs_where_there_is_more_to_do(tmp_path: Path) -> None:
    """A frame of many entries, or one that many wait for, blocks neither the loop nor a thread; a small one does."""
    disk = Plain(tmp_path / "log")
    disk.kernel = counting = Counting()
    store = LogStore(tmp_path / "log", disk=disk)
    await store.open(T0)
    await store.create_topic(Topic("t"))
    before = disk.waited
    assert counting.count == 0
    (stored,) = await store.put([sent(b"small")], T0)
    assert stored.put is Put.STORED
    assert (disk.waited, counting.count) == (before + 1, 0)
    await store.put([sent(b"large") for _ in range(EARLY_ENTRIES)], T0)
    assert (disk.waited, counting.count) == (before + 1, 1)
    await asyncio.gather(*(store.put([sent(b"one of several")], T0) for _ in range(8)))
    assert (disk.waited, counting.count) == (before + 1, 2)
    await store.close()


async def test_a_large_frame_does_not_wait_for_the_requests_behind_it(tmp_path: Path) -> None:
    """Its sync begins while the next request is handled; both were in one frame, and answered together."""
    disk = Plain(tmp_path / "log")
    disk.kernel = Counting()
    store = LogStore(tmp_path / "log", disk=disk)
    await store.open(T0)
    await store.create_topic(Topic("t"))
    journal = store.journal
    first = asyncio.ensure_future(store.put([sent(b"first") for _ in range(EARLY_ENTRIES)], T0))
    second = asyncio.ensure_future(store.put([sent(b"second") for _ in range(EARLY_ENTRIES)], T0))
    await asyncio.sleep(0)  # a turn of the loop
    assert journal.in_flight is not None
    assert len(journal.in_flight.entries) == len(journal.open.entries) == EARLY_ENTRIES
    await asyncio.gather(first, second)
    await store.close()


async def test_a_sync_that_fails_in_the_kernel_ends_the_log(tmp_path: Path) -> None:
    """Promise 11: nothing that waited is acknowledged, and no sync is tried after it."""
    disk = Plain(tmp_path / "log")
    disk.kernel = counting = Counting(failure=OSError(errno.EIO, "injected"))
    told: list[StorageFailed] = []
    store = LogStore(tmp_path / "log", disk=disk, on_failure=told.append)
    await store.open(T0)
    await store.create_topic(Topic("t"))
    large = [sent(b"large") for _ in range(EARLY_ENTRIES)]
    both = await asyncio.gather(store.put(large, T0), store.put([sent(b"behind")], T0), return_exceptions=True)
    assert [type(answer) for answer in both] == [StorageFailed, StorageFailed]
    assert len(told) == 1
    waited = disk.waited
    with pytest.raises(StorageFailed):
        await store.put([sent(b"later")], T0)
    await store.close()
    assert (disk.waited, counting.count) == (waited, 1)


async def test_where_the_kernel_refuses_a_thread_syncs(tmp_path: Path) -> None:
    """A file system that cannot do it says so when it is asked: nothing is lost, and it is not asked again."""
    disk = Plain(tmp_path / "log")
    disk.kernel = Counting(refusal=OSError(errno.EINVAL, "injected"))
    store = LogStore(tmp_path / "log", disk=disk)
    await store.open(T0)
    await store.create_topic(Topic("t"))
    before = disk.waited
    for n in range(1, 3):
        results = await store.put([sent(b"large") for _ in range(EARLY_ENTRIES)], T0)
        assert all(result.put is Put.STORED for result in results)
        assert disk.waited == before + n
    await store.close()
    reopened = LogStore(tmp_path / "log")
    await reopened.open(T0)
    assert not reopened.damages
    assert len(await reopened.undecided(None, None, None, 100)) == 2 * EARLY_ENTRIES
    await reopened.close()
