"""Writes, damages and reopens logs, for `make crash` and its short form."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from pathlib import Path

from notify.errors import StorageFailed
from notify.storage.log import LogStore
from notify.storage.log.disk import Disk
from notify.storage.log.recovery import SegmentReader
from notify.storage.log.segments import Segments
from tests.crash.disks import PowerLossDisk
from tests.crash.workload import T0, History, run_until_failure, violations, work
from tests.support.disks import NoThreads, UnsyncedDisk
from tests.support.transactions import sent
from tests.support.virtual_loop import run as run_in_virtual_time


def write_log(directory: Path, steps: int, seed: int = 1) -> History:
    """Write a log of so many steps and a last frame of one small half, left as by a kill; return the steps' history."""
    history = History()

    async def run() -> None:
        store = LogStore(directory, disk=UnsyncedDisk(directory))
        await store.open(T0)
        await work(store, history, random.Random(seed), steps)
        last = sent(b"the last frame")
        history.intents[last.id] = [last.messages[0].payload]
        await store.put([last], T0)
        await store.sealed_up()
        shutil.copytree(directory, directory.parent / "killed")
        await store.close()

    asyncio.run(run())
    shutil.rmtree(directory)
    (directory.parent / "killed").rename(directory)
    return history


def reopened(directory: Path, history: History) -> tuple[list[str], LogStore]:
    """Violations after recovery, and the closed store, which lists its damages."""

    async def run() -> tuple[list[str], LogStore]:
        store = LogStore(directory, disk=UnsyncedDisk(directory))
        await store.open(T0)
        broken = await violations(store, history)
        await store.close()
        return broken, store

    return asyncio.run(run())


def last_frames(directory: Path) -> tuple[Path, int, int]:
    """The log file, and the positions where its last frame begins and ends."""
    disk = Disk(directory)
    segments = Segments(disk)
    segments.open_existing()
    frames = list(SegmentReader(disk, segments.last).frames(segments.last.base + 64))
    path = directory / segments.last.name
    base = segments.last.base
    segments.close()
    return path, frames[-1].base - base, frames[-1].end - base


def lose_power_repeatedly(directory: Path, seed: int, times: int = 3) -> None:
    """Lose power under load at random moments of virtual time, so that a seed gives the same run on every machine.

    Raises AssertionError with the acknowledged data that is lost.
    """
    chance = random.Random(seed)
    history = History()
    for _ in range(times):
        broken = run_in_virtual_time(_until_power_is_lost(directory, history, chance))
        assert broken == [], broken
    broken, _ = reopened(directory, history)
    assert broken == [], broken


async def _until_power_is_lost(directory: Path, history: History, chance: random.Random) -> list[str]:
    """Violations after the previous loss."""
    disk = PowerLossDisk(directory, chance)
    store = LogStore(directory, disk=disk, segment_bytes=1 << 14, threads=NoThreads(lambda: chance.random() * 0.001))
    await store.open(T0)
    broken = await violations(store, history)
    asyncio.get_running_loop().call_later(chance.random() * 0.05, disk.lose_power)
    assert await run_until_failure(store, history, chance, 100_000), "the power was not lost"
    await let_go(store)
    return broken


async def let_go(store: LogStore) -> None:
    """Close a store whose disk is gone: its files and lock, without writing."""
    with contextlib.suppress(StorageFailed):
        await store.close()
