"""A data directory restored from what was shipped: whole up to the last segment, and clear about what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.cli.data_directory import begun
from notify.object_store.store import Store
from notify.server.database import open_database
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log import LogStore
from notify.storage.log.disk import Disk
from notify.storage.log.gaps import OFFSETS_APART
from notify.storage.log.restored_start import begin_at_the_end
from notify.storage.records import State
from notify.storage.shipped import identity, manifest, restoring
from notify.storage.shipped.manifest import Manifest
from notify.storage.topics import Topic
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS
from tests.support.commands import cli
from tests.support.disks import UnsyncedDisk
from tests.support.groups import publish, subscribe
from tests.support.http import admin, call
from tests.support.shipping import ship_directory
from tests.support.transactions import bodies_in, sent

T0 = 1_800_000_000_000_000
SEGMENT_BYTES = 4096


class Shipped:
    """A log whose sealed segments are in a store."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.data_dir = place / "data"
        self.root = place / "store"
        self.url = f"file://{self.root}"
        self.bodies: list[bytes] = []

    def write(self, count: int = 60, *, data_dir: Path | None = None, closed: bool = True) -> None:
        """Commit messages, leave halves undecided, settle some, in one life of the log's process."""
        asyncio.run(self._write(count, data_dir or self.data_dir))

    async def _write(self, count: int, data_dir: Path) -> None:
        store = open_log(data_dir)
        await store.open(T0)
        if not store.has_topic("t"):
            store.create_topic_soon(Topic("t"))
            await store.subscribe(Subscription("g", "t"), [0])
        for n in range(count):
            body = b"%d" % len(self.bodies)
            self.bodies.append(body)
            t = sent(body * 20, key=str(n % 3))
            await store.put([t, sent(b"undecided")], T0 + n)
            await store.decide([(t.id, "g", State.COMMITTED)], T0 + n)
        end = store.bounds("t", 0)[1]
        await store.settle("g", "t", 0, [(end - count, count // 2)], SettleKind.ACK, T0 + count)
        await store.close()

    def ship(self, data_dir: Path | None = None, **options: Any) -> Manifest:
        return ship_directory(data_dir or self.data_dir, self.url, **options)

    def restore(self, name: str = "restored", *flags: str) -> tuple[int, dict[str, Any]]:
        return cli("restore", "--from", self.url, "--data-dir", str(self.place / name), *flags, "--json")

    def objects(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(pattern))


@pytest.fixture
def shipped(tmp_path: Path) -> Shipped:
    made = Shipped(tmp_path)
    made.write()
    made.ship()
    return made


def open_log(data_dir: Path) -> LogStore:
    return LogStore(data_dir / "log", segment_bytes=SEGMENT_BYTES, disk=UnsyncedDisk(data_dir / "log"))


def looked_at(data_dir: Path, look: Callable[[LogStore], Any]) -> Any:
    """The result of `look` for a data directory's log."""

    async def opened() -> Any:
        store = open_log(data_dir)
        await store.open(T0)
        try:
            return look(store)
        finally:
            await store.close()

    return asyncio.run(opened())


def bodies(data_dir: Path) -> list[bytes]:
    found: list[bytes] = looked_at(data_dir, lambda s: bodies_in(s.read("t", 0, 0, 10_000, 1 << 30)))
    return [body[: len(body) // 20] for body in found]


def test_a_restored_log_is_what_was_shipped_and_goes_on(shipped: Shipped) -> None:
    code, told = shipped.restore()
    assert (code, told["damages"]) == (0, []), told
    assert told["complaints"] == ["no administrators' records were shipped; settings, limits and tokens are new"]
    listed = manifest.load(Store(shipped.url))
    assert listed is not None and (listed.generation, told["generation"]) == (2, 2)
    assert listed.end == told["position"] and told["segments"] == listed.count > 3
    assert identity.read(shipped.place / "restored") == identity.Identity(listed.lineage, 2)
    kept = bodies(shipped.place / "restored")
    assert kept == shipped.bodies[: len(kept)] and 0 < len(kept) < len(shipped.bodies)
    shipped.bodies = []
    shipped.write(data_dir=shipped.place / "restored")
    again = shipped.ship(shipped.place / "restored")  # the same store, where the former log ended
    assert again.generation == 2 and again.count > listed.count
    offsets = looked_at(shipped.place / "restored", lambda s: [m.offset for m in s.read("t", 0, 0, 10_000, 1 << 30)])
    assert offsets[: len(kept)] == list(range(len(kept)))
    assert offsets[len(kept) :] == [len(kept) + OFFSETS_APART + n for n in range(60)]


def test_the_former_server_ships_no_more(shipped: Shipped) -> None:
    assert shipped.restore()[0] == 0
    shipped.write()
    with pytest.raises(Exception, match="restored elsewhere: generation 2"):
        shipped.ship()


@pytest.mark.long
def test_a_restore_is_repeated_from_any_generation(shipped: Shipped) -> None:
    """The second disk is lost before it shipped anything, the third after it did."""
    assert shipped.restore("second")[0] == 0
    shipped.write(1, data_dir=shipped.place / "second")
    assert shipped.restore("third")[1]["generation"] == 3
    shipped.write(60, data_dir=shipped.place / "third")
    shipped.ship(shipped.place / "third")
    code, told = shipped.restore("fourth")
    assert (code, told["generation"], told["damages"]) == (0, 4, [])
    offsets = {
        name: looked_at(shipped.place / name, lambda s: s.bounds("t", 0)[1]) for name in ("second", "third", "fourth")
    }
    assert offsets["second"] < 2 * OFFSETS_APART < offsets["third"] < 3 * OFFSETS_APART < offsets["fourth"]


def test_a_directory_that_is_not_empty_is_refused(shipped: Shipped) -> None:
    (shipped.place / "restored").mkdir()
    (shipped.place / "restored" / "notes").write_text("mine")
    code, told = shipped.restore()
    assert code == 2 and "is not empty" in told["text"]
    listed = manifest.load(Store(shipped.url))
    assert listed is not None and listed.generation == 1


def test_the_root_of_a_new_volume_is_empty(tmp_path: Path) -> None:
    """A restore to a new volume was refused, because ext4 had made a directory there."""
    (tmp_path / "lost+found").mkdir()
    assert begun(tmp_path).is_dir()


def test_the_records_of_a_data_directory_are_in_it_whatever_its_name_is(tmp_path: Path) -> None:
    """SQLAlchemy took the part behind a question mark for parameters: the file was elsewhere."""
    directory = tmp_path / "a?b=c#d%20e"
    directory.mkdir()
    open_database(str(directory)).dispose()
    assert (directory / "admin.db").stat().st_size > 0 and list(tmp_path.iterdir()) == [directory]


def test_a_store_without_segments_is_refused(tmp_path: Path) -> None:
    code, told = Shipped(tmp_path).restore()
    assert code == 2 and "nothing was shipped" in told["text"]


@pytest.mark.parametrize("harm", ["missing", "cut short", "other bytes"])
def test_a_lost_segment_is_named_with_what_can_still_be_had(shipped: Shipped, harm: str) -> None:
    log = shipped.objects("segments/*.log")[-2]
    if harm == "missing":
        log.unlink()
    elif harm == "cut short":
        log.write_bytes(log.read_bytes()[:100])
    else:
        data = bytearray(log.read_bytes())
        data[200] ^= 1
        log.write_bytes(data)
    code, told = shipped.restore()
    base = int(log.name.partition("-")[0])
    assert code == 2 and log.name in told["text"] and f"--until {base}," in told["text"], told
    code, told = shipped.restore("restored", "--until", str(base))
    assert code == 0 and told["position"] == base, told
    kept = bodies(shipped.place / "restored")
    assert kept == shipped.bodies[: len(kept)] and kept
    shipped.write(data_dir=shipped.place / "restored")
    assert shipped.ship(shipped.place / "restored").generation == 2  # the store continues from there, too


def test_a_store_that_lists_late_has_lost_nothing(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator was told to give up what the store has."""
    newest = shipped.objects("segments/*.log")[-1].name
    names = Store.names
    monkeypatch.setattr(Store, "names", lambda self, folder: [n for n in names(self, folder) if newest not in n])
    code, told = shipped.restore()
    listed = manifest.load(Store(shipped.url))
    assert code == 0 and listed is not None and told["position"] == listed.end, told


def test_until_is_where_a_segment_ends(shipped: Shipped) -> None:
    code, told = shipped.restore("restored", "--until", "77")
    assert code == 2 and "ends at 77" in told["text"]
    code, told = cli("restore", str(shipped.place), "--data-dir", str(shipped.place / "new"), "--until", "7")
    assert code == 2 and "--until is only for a store" in told["text"]


def test_lost_indexes_and_checkpoints_are_made_up_for(shipped: Shipped) -> None:
    """One index is missing and one damaged; the newest checkpoint is missing, the one before is damaged."""
    for _ in range(2):
        shipped.write(20)
        shipped.ship()
    missing, damaged, *_ = shipped.objects("segments/*.idx")
    missing.unlink()
    damaged.write_bytes(b"rot")
    *_, before, newest = shipped.objects("segments/*.ckpt")
    newest.unlink()
    before.write_bytes(b"rot")
    code, told = shipped.restore()
    assert (code, told["damages"]) == (0, []), told
    assert len([c for c in told["complaints"] if "built again" in c]) == 2, told["complaints"]
    assert len([c for c in told["complaints"] if "an earlier checkpoint serves" in c]) == 2, told["complaints"]
    kept = bodies(shipped.place / "restored")
    assert kept == shipped.bodies[: len(kept)] and kept
    assert len(list((shipped.place / "restored" / "log").glob("*.idx"))) == told["segments"]


@pytest.mark.long
def test_log_lines_are_not_part_of_the_printed_result(shipped: Shipped) -> None:
    """The line about an index that is built again stood on stdout, before the JSON, which nobody could read then."""
    missing, *_ = shipped.objects("segments/*.idx")
    missing.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "notify", "restore", "--from", shipped.url, "--data-dir", str(shipped.place / "new"),
         "--json"],
        capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["damages"] == [] and done.returncode == 0
    assert "index_rebuilt" in done.stderr


def test_without_any_checkpoint_the_whole_log_is_replayed(shipped: Shipped) -> None:
    for path in shipped.objects("segments/*.ckpt"):
        path.unlink()
    code, told = shipped.restore()
    assert (code, told["damages"]) == (0, []), told
    assert bodies(shipped.place / "restored")


def test_an_interrupted_restore_goes_on(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while it fetches, then just before the files take their place: the directory is none yet."""
    fetched: list[str] = []
    copy_to = Store.copy_to

    def counted(store: Store, name: str, sink: Any, most: int) -> tuple[int, str]:
        fetched.append(name)
        if len(fetched) == 7:
            sink.write(b"half of it")
            raise KeyboardInterrupt
        return copy_to(store, name, sink, most)

    monkeypatch.setattr(Store, "copy_to", counted)
    with pytest.raises(BaseException, match="1"):  # the exit code of a command that is interrupted
        code, told = shipped.restore()
        raise SystemExit(code)
    assert not (shipped.place / "restored" / "log").exists()
    before = len(fetched)

    def crash(*_: Any) -> None:
        raise MemoryError("just before the end")

    with monkeypatch.context() as patched:
        patched.setattr(restoring.identity, "write", crash)
        with pytest.raises(MemoryError):
            shipped.restore()
    assert not (shipped.place / "restored" / "log").exists()
    code, told = shipped.restore()
    assert (code, told["damages"], told["generation"]) == (0, [], 3), told
    assert len(set(fetched)) + 1 == len(fetched) and len(fetched) > before, "only the interrupted object came twice"
    kept = bodies(shipped.place / "restored")
    assert kept == shipped.bodies[: len(kept)] and kept


def test_a_server_that_still_ships_is_noticed(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ships while the restore fetches. Nothing is taken from it; repeated, the restore has that, too."""
    fetch = restoring.Restoring.fetch

    def while_fetching(self: restoring.Restoring, *arguments: Any) -> None:
        fetch(self, *arguments)
        monkeypatch.undo()
        shipped.write()
        shipped.ship()

    monkeypatch.setattr(restoring.Restoring, "fetch", while_fetching)
    code, told = shipped.restore()
    assert code == 2 and "stop it, and repeat" in told["text"]
    code, told = shipped.restore()
    assert (code, told["generation"]) == (0, 2)
    assert len(bodies(shipped.place / "restored")) > 60


def test_segments_that_stand_in_pages_are_restored(tmp_path: Path) -> None:
    made = Shipped(tmp_path)
    made.write()
    listed = made.ship(most_inline=2, page_segments=2)
    assert len(listed.pages) > 1
    code, told = made.restore()
    assert (code, told["segments"]) == (0, listed.count), told
    base = manifest.load_page(Store(made.url), listed.pages[1])[1].base
    code, told = made.restore("cut", "--until", str(base))
    assert (code, told["position"]) == (0, base), told
    cut = manifest.load(Store(made.url))
    assert cut is not None and (cut.end, cut.generation, len(cut.pages)) == (base, 3, 1)


@pytest.mark.long
def test_a_restore_fetches_dropped_segments_only_for_waiting_messages(tmp_path: Path) -> None:
    """Segments that retention dropped stay in the store. Of them a restore takes those with unsettled messages."""

    async def live() -> None:
        store = LogStore(
            made.data_dir / "log", segment_bytes=SEGMENT_BYTES, disk=UnsyncedDisk(made.data_dir / "log"),
            retention_us=60_000_000,
        )  # fmt: skip
        await store.open(T0)
        store.create_topic_soon(Topic("t"))
        await store.subscribe(Subscription("g", "t"), [0])
        at_us = T0
        for n in range(90):
            at_us += 86_400_000_000
            t = sent(b"%d" % n * 100)
            await store.put([t], at_us)
            await store.decide([(t.id, "g", State.COMMITTED)], at_us)
            if n != 40:
                await store.settle("g", "t", 0, [(n, 1)], SettleKind.ACK, at_us)
            if n in (30, 60):
                await store.sealed_up()
                made.ship()
        await store.sealed_up()
        made.ship()
        dropped = await store.retain(at_us)
        assert dropped > 5
        for _ in range(30):
            await store.put([sent(b"more" * 100, committed=True)], at_us)
        await store.sealed_up()
        made.ship()
        await store.close()

    made = Shipped(tmp_path)
    asyncio.run(live())
    code, told = made.restore()
    listed = manifest.load(Store(made.url))
    assert code == 0 and listed is not None and len(told["complaints"]) == 1, told
    assert told["segments"] < listed.count
    waiting = looked_at(made.place / "restored", lambda s: bodies_in(s.read("t", 0, 40, 1, 1 << 30)))
    assert waiting == [b"40" * 100]


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(shipped.place)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, told = shipped.restore()
    assert code == 2 and "has room for 1,000 bytes" in told["text"]
    assert not list((shipped.place / "restored").glob("*/log/*.log"))


def test_a_manifest_of_another_version_is_told_apart(shipped: Shipped) -> None:
    path = shipped.root / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    code, told = shipped.restore()
    assert code == 2 and "format 9" in told["text"]


@pytest.mark.parametrize("harm", ["", "missing"])
def test_the_administrators_records_are_restored(tmp_path: Path, harm: str) -> None:
    made = Shipped(tmp_path)
    made.write()
    open_database(str(made.data_dir)).dispose()
    made.ship()
    (records,) = made.objects("records/*.db")
    if harm:
        records.unlink()
    code, told = made.restore()
    restored = made.place / "restored" / "admin.db"
    assert code == 0, told
    if harm:
        assert "records are lost" in told["complaints"][0] and not restored.exists()
    else:
        assert told["complaints"] == [] and restored.stat().st_mode & 0o777 == 0o600
        with contextlib.closing(sqlite3.connect(restored)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_an_object_larger_than_its_manifest_says_fills_no_disk(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.6 GB were written where the manifest says 100 bytes, and compared afterwards."""
    largest = 0
    copy_to = Store.copy_to

    def watched(store: Store, name: str, sink: Any, most: int) -> tuple[int, str]:
        nonlocal largest
        try:
            return copy_to(store, name, sink, most)
        finally:
            largest = max(largest, os.fstat(sink.fileno()).st_size)

    segment = max(shipped.objects("segments/*.log"), key=lambda path: path.stat().st_size)
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.truncate(100 << 20)
    monkeypatch.setattr(Store, "copy_to", watched)
    code, told = shipped.restore()
    assert code != 0 and f"more than {size:,} bytes" in str(told), told
    assert size // 2 < largest <= max(path.stat().st_size for path in shipped.objects("segments/*") if path != segment)
    assert not list((shipped.place).rglob("*.tmp"))


# --- a gap in the offsets: what counts messages does not count it -------------------------------------------------


async def _restored(log: Path) -> None:
    begin_at_the_end(Disk(log), 1)
    store = LogStore(log, disk=UnsyncedDisk(log))
    await store.open(1)
    await store.begin_generation(2, 1)
    await store.close()


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose log was restored: three messages, and a group that has settled none."""
    running = ServerProcess(tmp_path / "data").start()
    publish(running.url, "t", ["a", "b", "c"])
    subscribe(running.url, "g", "t", start="earliest")
    running.stop()
    asyncio.run(_restored(tmp_path / "data" / "log"))
    running.start()
    yield running
    running.stop()


def test_messages_are_counted_and_not_offsets(restored: ServerProcess) -> None:
    (row,) = admin(restored.url, "GET", "topics?sort=kept")["topics"]
    assert row["queues"][0]["end"] == OFFSETS_APART + 3
    assert row["newest_at"]
    page = call(restored.url, "GET", "/topics")
    assert 'data-l="Kept">3</td>' in page and 'data-l="Sent in all">3</td>' in page

    asked = {"topic": "t", "reason": "looked at", "dry_run": True}
    (moved,) = admin(restored.url, "POST", "groups/g/reset", asked | {"to": "latest"})["result"]["queues"]
    assert (moved["again"], moved["left_out"]) == (0, 3)
    purge = {"before": "latest", "force": True, "reason": "looked at", "dry_run": True}
    purged = admin(restored.url, "POST", "topics/t/purge", purge)["result"]
    assert (purged["queues"][0]["dropped"], purged["missed"]) == (3, {"g": 3})
    code, told = cli("topic", "delete", "t", "--reason", "looked at", "--dry-run", "--url", restored.url)
    assert code == 0 and "its 3 messages at most" in str(told), told

    admin(restored.url, "POST", "groups/g/reset", asked | {"to": "latest", "dry_run": False})
    (moved,) = admin(restored.url, "POST", "groups/g/reset", asked | {"to": "earliest"})["result"]["queues"]
    assert (moved["again"], moved["left_out"]) == (3, 0)


def test_tail_shows_the_messages_on_both_sides_of_the_gap(restored: ServerProcess) -> None:
    publish(restored.url, "t", ["d"])
    code, shown = cli("topic", "tail", "t", "--last", "3", "--url", restored.url)
    lines = shown["text"].splitlines()
    assert (code, [line.split("\t")[-1] for line in lines]) == (0, ["b", "c", "d"])
    assert lines[-1].startswith(f"t/0@{OFFSETS_APART + 3}")
