"""Old segments leave a store: only what is old, gone from the log and needed by nobody leaves the list, and then the
store."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from notify.object_store.store import Store
from notify.storage import crash_point
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log import LogStore
from notify.storage.records import State
from notify.storage.shipped import manifest
from notify.storage.shipped import retention as keeping
from notify.storage.shipped.manifest import Manifest
from notify.storage.shipped.restoring import Restoring
from notify.storage.shipped.shipper import Shipper
from notify.storage.shipped.status import Order
from notify.storage.topics import Topic
from tests.support.clock import eventually
from tests.support.disks import UnsyncedDisk
from tests.support.shipping import ship_directory
from tests.support.transactions import bodies_in, sent

DAY = 86_400_000_000
T0 = time.time_ns() // 1000 // DAY * DAY - 40 * DAY
LATER = T0 + 10 * DAY
KEEP = 8 * DAY
COUNT = 60
WAITING = 30
"""The first offset that no group has settled."""


class Log:
    """A log that a server ships, and whose retention drops segments in its second life."""

    def __init__(self, place: Path) -> None:
        self.data = place / "data"
        self.root = place / "store"
        self.url = f"file://{self.root}"
        self.data.mkdir()

    async def _live(self, at_us: int, settled: list[tuple[int, int]], retains: bool) -> None:
        store = LogStore(
            self.data / "log", segment_bytes=4096, disk=UnsyncedDisk(self.data / "log"), retention_us=DAY,
            clock=lambda: at_us,
        )  # fmt: skip
        await store.open(at_us)
        if not store.has_topic("t"):
            await store.create_topic(Topic("t"))
            await store.subscribe(Subscription("c", "t"), [0])
        if retains:
            assert await store.retain(at_us) > 2
        for _ in range(COUNT):
            one = sent(b"%06d" % store.bounds("t", 0)[1])
            await store.put([one], at_us)
            await store.decide([(one.id, "g", State.COMMITTED)], at_us)
        await store.settle("c", "t", 0, settled, SettleKind.ACK, at_us)
        await store.sealed_up()
        await store.close()

    def live(self, at_us: int, settled: list[tuple[int, int]], *, retains: bool = False, **options: int) -> Manifest:
        """Write, settle, and ship."""
        asyncio.run(self._live(at_us, settled, retains))
        return ship_directory(self.data, self.url, **options)

    def shipper(self, at_us: int = LATER + DAY) -> Shipper:
        shipper = Shipper(Store(self.url), self.data, clock=lambda: at_us)
        shipper.begin()
        return shipper

    def listed(self) -> Manifest:
        known = manifest.load(Store(self.url))
        assert known is not None
        return known

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    def named(self) -> set[str]:
        """The files that the list names."""
        listed, names = self.listed(), {"manifest.json"}
        for segment in manifest.segments_from(Store(self.url), listed):
            names |= {segment.log_name, segment.index_name, segment.parquet_name}
            names |= {segment.checkpoint_name} if segment.checkpoint is not None else set()
        return names | {page.name for page in listed.pages}

    def first_offset(self) -> int:
        """The first offset that the store has."""
        segments = manifest.segments_from(Store(self.url), self.listed())
        tables = (pq.read_table(self.root / segment.parquet_name)["offset"] for segment in segments)
        return int(next(table[0].as_py() for table in tables if len(table)))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """A log whose messages from WAITING on wait, and whose earlier segments are gone from the server."""
    made = Log(tmp_path)
    whole = made.live(T0, [(0, WAITING)])
    after = made.live(LATER, [], retains=True)
    assert whole.base == 0 == after.base and after.count > whole.count + 3
    return made


def test_segments_leave_the_list_and_then_the_store(log: Log) -> None:
    shipper, before = log.shipper(), log.files()
    assert before == log.named()
    dropped = shipper.drop_old(KEEP)
    listed = log.listed()
    assert dropped > 1 and listed == shipper.manifest and 0 < listed.base == listed.dropped_to
    assert 0 < log.first_offset() <= WAITING, "what a group has not settled stays"
    assert log.files() == before, "the files go afterwards"
    assert shipper.remove_dropped() >= 3 * dropped
    assert log.files() == log.named()
    assert (shipper.drop_old(KEEP), shipper.remove_dropped()) == (0, 0)


def test_young_segments_and_those_still_in_the_log_stay(log: Log, tmp_path: Path) -> None:
    assert log.shipper().drop_old(12 * DAY) == 0, "it is younger"
    (tmp_path / "other").mkdir()
    kept = Log(tmp_path / "other")
    kept.live(T0, [(0, COUNT)])
    kept.live(LATER, [])
    assert kept.shipper().drop_old(KEEP) == 0, "the server has it, too"


@pytest.mark.long
def test_ids_are_known_for_seven_days(log: Log, tmp_path: Path) -> None:
    (tmp_path / "young").mkdir()
    young = Log(tmp_path / "young")
    young.live(T0, [(0, COUNT)])
    young.live(T0 + 6 * DAY, [], retains=True)
    assert young.shipper(T0 + 30 * DAY).drop_old(DAY) == 0
    young.live(T0 + 8 * DAY, [(COUNT, COUNT)])
    assert young.shipper(T0 + 30 * DAY).drop_old(DAY) > 0


@pytest.mark.parametrize("point", crash_point.KEEP_POINTS)
def test_a_crash_leaves_a_store_that_is_whole(log: Log, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    class Killed(BaseException):
        """Stands for the death of the process."""

    def die(name: str) -> None:
        if name == point:
            raise Killed

    shipper, before = log.shipper(), log.listed()
    with monkeypatch.context() as patch:
        patch.setattr(crash_point, "reached", die)
        with pytest.raises(Killed):
            shipper.drop_old(KEEP)
            shipper.remove_dropped()
    assert log.named() <= log.files()
    assert (log.listed() == before) == (point == "keep.before_manifest")
    again = log.shipper()
    again.drop_old(KEEP)
    assert again.remove_dropped() > 0 and log.files() == log.named()


def test_files_are_removed_a_part_at_a_time(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MOST_REMOVED", 2)
    shipper = log.shipper()
    shipper.drop_old(KEEP)
    assert shipper.remove_dropped() == 2 and log.files() > log.named()
    while shipper.remove_dropped():
        assert log.files() >= log.named()
    assert log.files() == log.named()


def test_pages_leave_as_a_whole(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.live(T0, [(0, COUNT)], most_inline=3, page_segments=2)
    log.live(LATER, [], retains=True, most_inline=3, page_segments=2)
    before = log.listed()
    shipper = log.shipper()
    assert shipper.drop_old(KEEP) > 0
    after = log.listed()
    assert after.pages == before.pages[-len(after.pages) :] and 0 < len(after.pages) < len(before.pages)
    shipper.remove_dropped()
    assert log.files() == log.named()


def restored(log: Log, restoring: Restoring, to: Path) -> list[bytes]:
    """The messages that wait in the restored log."""
    asyncio.run(restoring.finish(LATER + DAY))

    async def waiting() -> list[bytes]:
        store = LogStore(to / "log", disk=UnsyncedDisk(to / "log"))
        await store.open(LATER + DAY)
        try:
            return bodies_in(store.read("t", 0, WAITING, COUNT, 1 << 30))
        finally:
            await store.close()

    return asyncio.run(waiting())


def test_a_restore_has_all_that_waits(log: Log, tmp_path: Path) -> None:
    shipper = log.shipper()
    shipper.drop_old(KEEP)
    shipper.remove_dropped()
    to = tmp_path / "restored"
    to.mkdir()
    restoring = Restoring(Store(log.url), to)
    restoring.prepare()
    restoring.fetch()
    assert restored(log, restoring, to) == [b"%06d" % n for n in range(WAITING, WAITING + COUNT)]


def test_a_restore_lists_nothing_that_was_dropped_meanwhile(log: Log, tmp_path: Path) -> None:
    to = tmp_path / "restored"
    to.mkdir()
    restoring = Restoring(Store(log.url), to)
    restoring.prepare()
    restoring.fetch()
    shipper = log.shipper()
    shipper.drop_old(KEEP)
    shipper.remove_dropped()
    restored(log, restoring, to)
    assert log.listed().generation == 2 and log.files() == log.named()


@pytest.mark.long
def test_the_process_that_ships_drops_old_segments(log: Log) -> None:
    order = Order(str(log.data), log.url, 1e9, 60.0, KEEP / 1e6)
    worker: Any = [sys.executable, "-m", "notify.storage.shipped.worker"]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        try:
            eventually(lambda: log.listed().base > 0 and log.files() == log.named(), "files to go")
        finally:
            process.stdin.close()
