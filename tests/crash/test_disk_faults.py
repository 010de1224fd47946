"""Torn tails, flipped bits, failed syncs, lost power, full disks: in process, on the real log."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from pathlib import Path

import pytest

from notify.errors import Corrupt, DiskFull, StorageFailed
from notify.storage.log import LogStore, journal
from notify.storage.records import State
from notify.storage.topics import Topic
from tests.crash.disks import FailingSyncDisk, FullDisk, PowerLossDisk
from tests.crash.log_faults import last_frames, let_go, lose_power_repeatedly, reopened, write_log
from tests.crash.workload import T0, History, run_until_failure, violations, work
from tests.support.disks import NoThreads, UnsyncedDisk
from tests.support.transactions import sent
from tests.support.virtual_loop import run as run_in_virtual_time


@pytest.mark.long
def test_torn_tails_of_every_length(tmp_path: Path) -> None:
    """Promise 9: cut the last frame at every byte; what was acknowledged before it stays."""
    history = write_log(tmp_path / "log", 12)
    path, begin, end = last_frames(tmp_path / "log")
    whole = path.read_bytes()
    for cut in range(begin, end):
        work_dir = tmp_path / "torn"
        shutil.copytree(tmp_path / "log", work_dir)
        (work_dir / path.name).write_bytes(whole[:cut] + bytes(64))
        broken, store = reopened(work_dir, history)
        assert broken == [], f"cut at {cut}"
        assert all(d.torn for d in store.damages), f"cut at {cut} was taken for damage"
        # Cut where only zeros would follow, the frame is whole all the same.
        unhurt = not whole[begin:cut].strip(b"\0") or not whole[cut:end].strip(b"\0")
        assert len(store.damages) == (0 if unhurt else 1), f"cut at {cut}"
        shutil.rmtree(work_dir)


def test_damage_below_the_durable_mark_is_kept_and_reported_not_cut(tmp_path: Path) -> None:
    """Promise 10: a flipped byte in the middle is quarantined; what follows it survives."""
    history = write_log(tmp_path / "log", 30)
    path, begin, _ = last_frames(tmp_path / "log")
    data = bytearray(path.read_bytes())
    data[begin // 2] ^= 0x40
    path.write_bytes(data)
    size = len(data.rstrip(b"\0"))
    broken, store = reopened(tmp_path / "log", history)
    assert [d.torn for d in store.damages] == [False]
    assert (tmp_path / "log" / store.damages[0].copy).exists()
    assert len(path.read_bytes().rstrip(b"\0")) >= size - 64
    assert not any("promise 2" in v or "promise 5" in v for v in broken), broken


@pytest.mark.parametrize("seed", range(4))
def test_every_flipped_bit_is_noticed(tmp_path: Path, seed: int) -> None:
    """Promise 2: no flipped bit makes the log deliver what was not sent. A sample here, every bit in `make crash`."""
    history = write_log(tmp_path / "log", 20, seed)
    path, _, end = last_frames(tmp_path / "log")
    check_flips(tmp_path, path, history, random.Random(seed).sample(range(64 * 8, end * 8), 30))


def check_flips(tmp_path: Path, path: Path, history: History, bits: list[int]) -> None:
    whole = path.read_bytes().rstrip(b"\0") + bytes(64)
    for bit in bits:
        work_dir = tmp_path / "flipped"
        shutil.copytree(tmp_path / "log", work_dir)
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (work_dir / path.name).write_bytes(data)
        broken, store = reopened(work_dir, history)
        wrong = [v for v in broken if v.startswith(("promise 2", "promise 3: delivered", "promise 5"))]
        assert wrong == [], f"bit {bit}: {wrong}"
        assert store.damages, f"bit {bit} was not noticed"
        shutil.rmtree(work_dir)


@pytest.mark.parametrize("seed", range(25))
def test_power_loss_keeps_everything_acknowledged(tmp_path: Path, seed: int) -> None:
    """Promises 1 and 9: at a random moment any subset of unsynced sectors is lost; several times over."""
    lose_power_repeatedly(tmp_path / "log", seed)


@pytest.mark.parametrize("fail_at", [3, 4, 7, 15])
def test_a_failed_sync_acknowledges_nothing_and_is_not_tried_again(tmp_path: Path, fail_at: int) -> None:
    """Promise 11."""
    history = History()

    async def run() -> tuple[int, bool, bool]:
        failures: list[StorageFailed] = []
        disk = FailingSyncDisk(tmp_path / "log", fail_at)
        store = LogStore(tmp_path / "log", disk=disk, on_failure=failures.append)
        await store.open(T0)
        failed = await run_until_failure(store, history, random.Random(fail_at), 100)
        with pytest.raises(StorageFailed):
            await work(store, history, random.Random(0), 1)
        await store.close()
        return disk.syncs_after_failure, failed, bool(failures)

    syncs, failed, told = asyncio.run(run())
    assert (syncs, failed, told) == (0, True, True)
    broken, _ = reopened(tmp_path / "log", history)
    assert broken == []


def test_a_full_disk_refuses_writes_reads_on_and_recovers(tmp_path: Path) -> None:
    """Promise 12."""
    history = History()

    async def run() -> None:
        disk = FullDisk(tmp_path / "log", 60_000)
        store = LogStore(tmp_path / "log", disk=disk)
        await store.open(T0)
        with pytest.raises(DiskFull):
            await work(store, history, random.Random(1), 1000)
        assert history.committed
        assert await violations(store, history) == []
        disk.room = None
        await work(store, history, random.Random(2), 20)
        assert await violations(store, history) == []
        await store.close()

    asyncio.run(run())
    broken, _ = reopened(tmp_path / "log", history)
    assert broken == []


def test_the_checks_notice_a_planted_fault(tmp_path: Path) -> None:
    """A log that acknowledges before it syncs loses what it acknowledged: the power-loss test must see it."""
    broken: list[str] = []
    for seed in range(20):
        chance = random.Random(seed)
        history = History()
        directory = tmp_path / str(seed)

        class Hasty(PowerLossDisk):
            def sync(self, fd: int) -> None:
                if self.name_of[fd].endswith(".log") and self.size(fd) > 200:
                    return  # says it is durable, and it is not

        async def run(directory: Path = directory, chance: random.Random = chance, history: History = history) -> None:
            disk = Hasty(directory, chance)
            store = LogStore(directory, disk=disk, threads=NoThreads(lambda: 0.0))
            await store.open(T0)
            await run_until_failure(store, history, chance, 10)
            disk.lose_power()
            await let_go(store)

        run_in_virtual_time(run())
        broken += reopened(directory, history)[0]
    assert any("promise 1" in v for v in broken)


def open_files(below: Path) -> list[str]:
    """The files under a directory that this process has open."""
    targets = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [path for path in targets if path.startswith(str(below))]


def test_a_disk_that_refuses_room_is_a_failed_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for want of room: with EIO, as a file system that was shut down says. Found by `make crash`."""
    monkeypatch.setattr(journal, "RESERVE_BYTES", 1 << 16)  # it asks for more room soon

    class Refusing(UnsyncedDisk):
        refuses = False

        def reserve(self, fd: int, offset: int, size: int) -> None:
            if self.refuses:
                raise OSError(errno.EIO, "injected: reserve failed")
            super().reserve(fd, offset, size)

    async def run() -> None:
        disk = Refusing(tmp_path / "log")
        told: list[StorageFailed] = []
        store = LogStore(tmp_path / "log", disk=disk, on_failure=told.append)
        await store.open(T0)
        history = History()
        assert not await run_until_failure(store, history, random.Random(1), 20)
        disk.refuses = True
        assert await run_until_failure(store, history, random.Random(2), 100_000)
        assert len(told) == 1
        with pytest.raises(StorageFailed):
            await store.sync()
        await store.close()
        assert open_files(tmp_path) == []
        histories.append(history)

    histories: list[History] = []
    asyncio.run(run())
    assert reopened(tmp_path / "log", histories[0])[0] == []


def test_two_processes_cannot_share_a_log(tmp_path: Path) -> None:
    async def run() -> None:
        first = LogStore(tmp_path / "log")
        await first.open(T0)
        with pytest.raises(StorageFailed, match="another process"):
            await LogStore(tmp_path / "log").open(T0)
        await first.close()

    asyncio.run(run())


def test_an_end_that_is_damaged_after_a_clean_stop_hides_nothing_that_follows(tmp_path: Path) -> None:
    """The checkpoint stands behind the log's end then: what is appended there would never be applied again."""

    async def run() -> None:
        store = await opened(tmp_path / "log")
        await store.create_topic(Topic("t"))
        for number in range(5):
            await store.put([sent(b"%d" % number)], T0)
        await store.close()
        path = sorted((tmp_path / "log").glob("*.log"))[-1]
        data = bytearray(path.read_bytes())
        data[-40:] = bytes(40)
        path.write_bytes(data)
        store = await opened(tmp_path / "log")
        assert [d.torn for d in store.damages] == [False]
        assert "durable" in store.complaints()[0]
        late = sent(b"after the damage")
        await store.put([late], T0)
        shutil.copytree(tmp_path / "log", tmp_path / "killed")
        await store.close()
        again = await opened(tmp_path / "killed")
        assert await again.states([late.id]) == [State.PREPARED]
        assert again.damages == [] or not any(d.torn for d in again.damages)
        await again.close()

    asyncio.run(run())


def test_a_checkpoint_before_the_log_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        store = await opened(tmp_path / "log", segment_bytes=4096)
        await store.create_topic(Topic("t"))
        for number in range(60):
            await store.put([sent(b"%d" % number + bytes(200))], T0)
        await store.sealed_up()
        await store.close()
        checkpoints = sorted((tmp_path / "log").glob("*.ckpt"))
        position = int(checkpoints[-1].stem)
        for path in (tmp_path / "log").glob("*.log"):
            if int(path.stem) <= position:
                path.unlink()
        with pytest.raises(Corrupt, match="missing"):
            await opened(tmp_path / "log", segment_bytes=4096)

    asyncio.run(run())


def test_a_directory_that_cannot_be_synced_finishes_the_log(tmp_path: Path) -> None:
    """At a roll, too: a sync is never tried again, since the kernel may have dropped what it could not write."""

    class NoDirectorySync(UnsyncedDisk):
        fails = False

        def sync_directory(self) -> None:
            if self.fails:
                raise OSError(errno.EIO, "injected: fsync of the directory failed")

    async def run() -> None:
        disk = NoDirectorySync(tmp_path / "log")
        store = LogStore(tmp_path / "log", disk=disk, segment_bytes=4096)
        await store.open(T0)
        await store.create_topic(Topic("t"))
        disk.fails = True
        with pytest.raises(StorageFailed):
            for number in range(60):
                await store.put([sent(b"%d" % number + bytes(200))], T0)
        assert store.journal.failed is not None
        disk.fails = False
        await let_go(store)

    asyncio.run(run())


async def opened(directory: Path, segment_bytes: int = 1 << 20) -> LogStore:
    store = LogStore(directory, disk=UnsyncedDisk(directory), segment_bytes=segment_bytes)
    await store.open(T0)
    return store
