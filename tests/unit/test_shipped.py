"""Shipping a log's segments to a store: what is listed is there and whole, and nothing else is listed."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from notify.errors import Conflict, InvalidRequest, ObjectStoreFailed
from notify.object_store.object_file import Pace
from notify.object_store.store import ObjectMissing, Store, digest_of
from notify.spark.messages.options import Options
from notify.spark.messages.shipped import ShippedMessages
from notify.storage.log import LogStore
from notify.storage.records import State
from notify.storage.shipped import identity, layout, manifest
from notify.storage.shipped.manifest import Manifest, Page, ShippedSegment, StoredObject
from notify.storage.shipped.shipper import Shipper
from notify.storage.topics import Topic
from tests.support.logs import T0, commit, write_log
from tests.support.object_store import bodies
from tests.support.shipping import ship_directory
from tests.support.transactions import sent


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("written") / "data"
    write_log(data_dir)
    return data_dir


@pytest.fixture
def data(written: Path, tmp_path: Path) -> Path:
    """A data directory with several sealed segments."""
    return Path(shutil.copytree(written, tmp_path / "data"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def rows(store: Store, listed: Manifest, tmp_path: Path) -> list[dict[str, Any]]:
    """The messages of all listed tables."""
    found: list[dict[str, Any]] = []
    for segment in manifest.segments_from(store, listed):
        copy = tmp_path / "copy.parquet"
        with copy.open("wb") as file:
            assert store.copy_to(segment.parquet_name, file, segment.parquet.size) == (
                segment.parquet.size,
                segment.parquet.sha256,
            )
        found += pq.read_table(copy).to_pylist()
    return found


def test_sealed_segments_are_shipped_as_they_are_and_as_tables(data: Path, url: str, tmp_path: Path) -> None:
    listed = ship_directory(data, url)
    store = Store(url)
    assert manifest.load(store) == listed
    assert listed.count > 3
    names = sorted(path.name for path in (data / "log").glob("*.log"))
    assert [f"{s.base:020d}.log" for s in listed.segments] == names[:-1]
    for segment in listed.segments:
        local = (data / "log" / f"{segment.base:020d}.log").read_bytes()
        assert store.read(segment.log_name, 1 << 20) == local
        assert digest_of(local) == (segment.log.size, segment.log.sha256)
        assert store.read(segment.index_name, 1 << 20) == (data / "log" / f"{segment.base:020d}.idx").read_bytes()
    last = listed.segments[-1]
    assert last.checkpoint is not None
    assert store.digest(last.checkpoint_name) == (last.checkpoint.size, last.checkpoint.sha256)
    messages = rows(store, listed, tmp_path)
    assert len(messages) == sum(s.messages for s in listed.segments) > 40
    assert [m["body"] for m in messages] == [b"%06d" % n for n in range(len(messages))]
    assert messages[1] == messages[1] | {
        "topic": "t",
        "queue": 0,
        "offset": 1,
        "key": "k1",
        "tag": "a",
        "headers": None,
    }
    assert messages[0]["tag"] is None and messages[0]["committed_at"].timestamp() == T0 / 1e6


def test_shipping_goes_on_where_it_stood(data: Path, url: str, tmp_path: Path) -> None:
    first = ship_directory(data, url)
    assert ship_directory(data, url).segments == first.segments
    write_log(data, 60, first=60)
    then = ship_directory(data, url)
    assert then.segments[: first.count] == first.segments and then.count > first.count
    bodies = [m["body"] for m in rows(Store(url), then, tmp_path)]
    assert bodies == [b"%06d" % n for n in range(len(bodies))]


def test_old_segments_go_into_pages(data: Path, url: str) -> None:
    plain = ship_directory(data, url + "-plain")
    paged = ship_directory(data, url, most_inline=2, page_segments=1)
    store = Store(url)
    assert len(paged.segments) <= 2 and len(paged.pages) >= 2
    strip = [s.base for s in plain.segments]
    assert [s.base for s in manifest.segments_from(store, paged)] == strip
    assert (paged.base, paged.end, paged.count) == (plain.base, plain.end, plain.count)
    from_there = paged.pages[0].end
    assert [s.base for s in manifest.segments_from(store, paged, from_there)] == [b for b in strip if b >= from_there]
    assert not list(manifest.segments_from(store, paged, first_us=T0 + 3600_000_000))
    page = Path(url.removeprefix("file://")) / paged.pages[0].name
    page.write_bytes(page.read_bytes().replace(b'"messages":', b'"Messages":'))
    with pytest.raises(ObjectStoreFailed, match="differs"):
        list(manifest.segments_from(store, paged))


def test_another_log_is_refused(data: Path, url: str, tmp_path: Path) -> None:
    ship_directory(data, url)
    write_log(tmp_path / "other")
    with pytest.raises(Conflict, match="restore from it"):
        ship_directory(tmp_path / "other", url)
    identity.write(tmp_path / "other", identity.new())
    with pytest.raises(Conflict, match="restore from it") as raised:
        ship_directory(tmp_path / "other", url)
    assert raised.value.code == "foreign_store"


def test_a_restored_log_takes_the_place_of_this_one(data: Path, url: str) -> None:
    own = ship_directory(data, url)
    store = Store(url)
    shipper = Shipper(store, data)
    shipper.begin()
    manifest.replace(store, msgspec.structs.replace(own, generation=2))
    with pytest.raises(Conflict) as raised:
        ship_directory(data, url)
    assert raised.value.code == "superseded"
    write_log(data, 60, first=60)
    with pytest.raises(Conflict) as raised:
        shipper.ship_next()
    assert raised.value.code == "superseded"
    listed = manifest.load(store)
    assert listed is not None and listed.segments == own.segments
    identity.write(data, identity.Identity(own.lineage, 2))
    assert ship_directory(data, url).segments[-1].generation == 2


def test_two_shippers_of_one_log_notice_each_other(data: Path, url: str) -> None:
    one, other = Shipper(Store(url), data), Shipper(Store(url), data)
    one.begin()
    other.begin()
    assert other.ship_next() is not None
    with pytest.raises(Conflict, match="another process"):
        one.ship_next()


def test_a_store_that_lost_its_manifest_gets_no_new_one(data: Path, url: str) -> None:
    ship_directory(data, url)
    manifest_file = Path(url.removeprefix("file://")) / layout.MANIFEST
    kept = manifest_file.read_bytes()
    manifest_file.unlink()  # as where its disk is not mounted
    with pytest.raises(ObjectStoreFailed, match="is it mounted"):
        ship_directory(data, url)
    assert not manifest_file.exists()
    manifest_file.write_bytes(kept)
    assert ship_directory(data, url) == manifest.decoded(kept)


def test_nothing_is_overwritten_that_another_log_has_listed(data: Path, url: str, tmp_path: Path) -> None:
    """Both found the store empty; then the other one was quicker."""
    shipper = Shipper(Store(url), data)
    shipper.begin()
    (Path(url.removeprefix("file://")) / layout.MANIFEST).unlink()
    write_log(tmp_path / "other")
    theirs = ship_directory(tmp_path / "other", url)
    with pytest.raises(Conflict, match="another log"):
        shipper.ship_next()
    store = Store(url)
    assert all(store.digest(s.log_name) == (s.log.size, s.log.sha256) for s in theirs.segments)


def test_an_older_copy_of_the_log_is_refused(data: Path, url: str, tmp_path: Path) -> None:
    ship_directory(data, url)
    shutil.copytree(data, tmp_path / "older")
    write_log(data, 60, first=60)
    ship_directory(data, url)
    with pytest.raises(Conflict, match="older or another copy"):
        ship_directory(tmp_path / "older", url)


@pytest.mark.parametrize("lie", ["lost", "short", "other", "empty"])
@pytest.mark.parametrize("suffix", [".log", ".idx", ".ckpt", ".parquet"])
def test_a_store_that_lies_lists_nothing(data: Path, url: str, lie: str, suffix: str) -> None:
    class Lying(Store):
        def _write(self, path: str, *others: Any) -> tuple[int, str]:
            written = super()._write(path, *others)
            file = Path(path.removeprefix("file://"))
            if path.endswith(suffix):
                content = file.read_bytes()
                file.write_bytes({"short": content[:-1], "other": b"?" + content[1:]}.get(lie, b""))
                if lie == "lost":
                    file.unlink()
            return written

    shipper = Shipper(Lying(url, tries=1), data)
    shipper.begin()
    with pytest.raises(ObjectStoreFailed):
        while shipper.ship_next() is not None:
            pass
    listed = manifest.load(Store(url))
    assert listed is not None
    store = Store(url)
    for segment in listed.segments:  # segments without a checkpoint may have been listed
        assert segment.checkpoint is None and store.digest(segment.log_name)[1] == segment.log.sha256
    whole = ship_directory(data, url)
    assert whole.end == int(sorted((data / "log").glob("*.log"))[-1].stem)


def test_a_store_that_gives_an_earlier_manifest_is_waited_for(data: Path, url: str) -> None:
    """It was taken for that of another process, and this log was shipped no more until a restart."""
    file = Path(url.removeprefix("file://")) / layout.MANIFEST
    shipper = Shipper(Store(url), data)
    shipper.begin()
    earlier = file.read_bytes()
    assert shipper.ship_next() is not None
    newest = file.read_bytes()
    file.write_bytes(earlier)
    with pytest.raises(ObjectStoreFailed, match="earlier"):
        shipper.ship_next()
    file.write_bytes(newest)
    assert shipper.ship_next() is not None
    file.write_bytes(earlier)  # where it stays so, the log is shipped from there on again
    assert ship_directory(data, url).end == int(sorted((data / "log").glob("*.log"))[-1].stem)


def segment_of(base: int, end: int, **fields: Any) -> ShippedSegment:
    something = StoredObject(1, "0" * 64)
    return ShippedSegment(
        base=base, end=end, generation=1, created_us=1, first_us=1, last_us=2, messages=1,
        log=something, idx=something, parquet=something, **fields,
    )  # fmt: skip


def bad_manifests() -> Iterator[tuple[bytes, str]]:
    encode = msgspec.json.encode
    lineage = identity.new().lineage
    good = Manifest(lineage=lineage, segments=(segment_of(0, 9), segment_of(9, 12)))
    yield b"", "not a manifest"
    yield b"{}", "not a manifest"
    yield encode(good)[:-5], "not a manifest"
    yield encode(msgspec.structs.replace(good, format=2)), "format 2"
    yield encode(msgspec.structs.replace(good, lineage="x")), "UUID"
    yield encode(msgspec.structs.replace(good, segments=(segment_of(0, 9), segment_of(10, 12)))), "between 9 and 10"
    yield encode(msgspec.structs.replace(good, segments=(segment_of(0, 0),))), "without bytes"
    yield encode(msgspec.structs.replace(good, dropped_to=4)), "dropped"
    page = Page(
        base=0, end=8, generation=1, first_us=0, last_us=0, segments=1, messages=1, bytes=8,
        object=StoredObject(1, "0"),
    )  # fmt: skip
    yield encode(msgspec.structs.replace(good, pages=(page,))), "between 8 and 0"


@pytest.mark.parametrize(("data", "what"), list(bad_manifests()))
def test_a_manifest_that_is_not_sound_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(ObjectStoreFailed, match=what):
        manifest.decoded(data)


def test_unknown_fields_of_a_newer_version_are_passed_over() -> None:
    listed = Manifest(lineage=identity.new().lineage, segments=(segment_of(0, 9),))
    newer = json.loads(msgspec.json.encode(listed)) | {"news": 1}
    assert manifest.decoded(json.dumps(newer).encode()) == listed


def test_the_store_of_a_directory(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/a")
    assert store.names("segments") == [] and not store.exists("x")
    with pytest.raises(ObjectMissing):
        store.read("x", 10)
    assert store.put("segments/x", lambda file: file.write(b"abc")) == digest_of(b"abc") == store.digest("segments/x")
    assert store.read_range("segments/x", 1, 1) == b"b" and store.read("segments/x", 3) == b"abc"
    with pytest.raises(ObjectStoreFailed, match="larger"):
        store.read("segments/x", 2)
    store.replace("m", b"1")
    store.replace("m", b"2")
    assert store.read("m", 9) == b"2" and store.names("segments") == ["segments/x"]
    store.delete("m")
    store.delete("m")
    assert not store.exists("m") and list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "segments"]
    with pytest.raises(ZeroDivisionError):
        store.put("segments/y", lambda file: 1 // 0)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "not a store"),
        ("relative/path", "not a store"),
        ("nope://x", "not a store"),
        ("s3://k:secret@b/p", "credentials"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as raised:
        Store(url)
    assert "secret" not in str(raised.value)


def test_a_store_without_a_sign_of_life_is_given_up(tmp_path: Path) -> None:
    hangs = threading.Event()
    store = Store(f"file://{tmp_path}/a", stall_seconds=0.05, tries=2)
    with pytest.raises(ObjectStoreFailed, match="no sign of life"):
        store._tried("wait", lambda _: hangs.wait(60))
    hangs.set()


def test_a_failure_that_passes_is_tried_again(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/a")
    failures = [OSError("away"), OSError("away")]

    def call(_: Any) -> str:
        if failures:
            raise failures.pop()
        return "there"

    assert store._tried("ask", call) == "there"


def test_names_have_one_form() -> None:
    assert layout.log_name(64, 2) == "segments/00000000000000000064-000002.log"


def test_a_store_that_is_full_lists_nothing_and_is_filled_once_it_has_room(data: Path, url: str) -> None:
    class Full(Store):
        room = 0

        def _write(self, path: str, *others: Any) -> tuple[int, str]:
            if self.room <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= 1
            return super()._write(path, *others)

    store = Full(url, tries=2)
    shipper = Shipper(store, data)
    with pytest.raises(ObjectStoreFailed, match="No space left"):
        shipper.begin()
    store.room = 6
    shipper.begin()
    with pytest.raises(ObjectStoreFailed, match="No space left"):
        while shipper.ship_next() is not None:
            pass
    there = manifest.load(Store(url))
    assert there is not None and there.count <= 1
    store.room = 1000
    shipper.begin()
    while shipper.ship_next() is not None:
        pass
    assert manifest.load(Store(url)) == ship_directory(data, url)


def test_a_pace_bounds_the_rate() -> None:
    pace = Pace(1_000_000)
    began = time.monotonic()
    for _ in range(4):
        pace(50_000)
    assert time.monotonic() - began >= 0.15


@pytest.mark.long
@pytest.mark.parametrize("spoil", ["garbage", "cut off", "empty", "of another tool"])
def test_a_table_that_is_not_the_one_shipped_is_the_stores_fault(data: Path, url: str, spoil: str) -> None:
    """Errors of the library that reads it came up in a query of Spark, without a word of the object."""
    listed = ship_directory(data, url)
    (first, *_) = manifest.segments_from(Store(url), listed)
    path = Path(url.removeprefix("file://")) / first.parquet_name
    whole = path.read_bytes()
    spoiled = {"garbage": b"x" * len(whole), "cut off": whole[: len(whole) // 2], "empty": b""}
    if spoil in spoiled:
        path.write_bytes(spoiled[spoil])
    else:
        pq.write_table(pa.table({"a": ["b"]}), path)
        size = path.stat().st_size
        path.write_bytes(path.read_bytes().rjust(len(whole), b"\0") if size < len(whole) else path.read_bytes())
    messages = ShippedMessages(Options(("t",), "", url, timeout_seconds=0.1))
    with closing(messages), pytest.raises(ObjectStoreFailed, match="not the table that the server shipped"):
        list(messages.rows("t", 1, 0, 0, 1 << 40))


# --- payloads in shipped tables whose halves lie in a segment that is gone by then ----------------------------------

HOUR_US = 3_600_000_000


def with_log(data_dir: Path, scenario: Callable[[LogStore], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        store = LogStore(data_dir / "log", retention_us=HOUR_US)
        await store.open(T0)
        await store.create_topic(Topic("t", 1))
        await scenario(store)
        await store.close()

    data_dir.mkdir()
    asyncio.run(whole())


async def finish(store: LogStore) -> None:
    """Have the segment that is written to sealed."""
    store.begin_segment()
    await store.sync()
    await commit(store, sent(b"after"))
    await store.sealed_up()


async def half_and_outcome_apart(store: LogStore) -> None:
    """The first segment has the half of `late`, the second one its outcome."""
    late = sent(b"late")
    await store.put([late], T0)
    await commit(store, sent(b"early"))
    await finish(store)
    await store.decide([(late.id, late.producer_group, State.COMMITTED)], T0 + 2 * HOUR_US)
    await finish(store)


def test_a_payload_of_a_segment_that_was_dropped_after_it_was_shipped(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    shipper = Shipper(Store(url), tmp_path / "data")

    async def scenario(store: LogStore) -> None:
        await half_and_outcome_apart(store)
        shipper.begin()
        first = shipper.ship_next()
        assert first is not None
        store.hold_from(first.end)
        assert await store.retain(T0 + 2 * HOUR_US) == 1
        second = shipper.ship_next()
        assert second is not None and second.unreadable == 0

    with_log(tmp_path / "data", scenario)
    assert bodies(url, tmp_path) == [b"early", b"after", b"late"]


def test_a_payload_of_a_segment_that_was_dropped_before_anything_was_shipped(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"

    async def scenario(store: LogStore) -> None:
        await half_and_outcome_apart(store)
        assert await store.retain(T0 + 2 * HOUR_US) == 1
        await finish(store)

    with_log(tmp_path / "data", scenario)
    listed = ship_directory(tmp_path / "data", url)
    assert listed.base == listed.dropped_to > 0
    assert bodies(url, tmp_path)[:2] == [b"after", b"late"]
    assert not any(segment.unreadable for segment in listed.segments)


def test_a_payload_that_is_damaged_leaves_its_row_without_a_body(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with_log(tmp_path / "data", half_and_outcome_apart)
    path = min((tmp_path / "data" / "log").glob("*.log"))
    path.write_bytes(path.read_bytes().replace(b"early", b"EARLY"))
    listed = ship_directory(tmp_path / "data", url)
    assert bodies(url, tmp_path)[0] is None
    assert listed.segments[0].unreadable == 1


def test_a_table_has_row_groups_of_bounded_size(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"

    async def scenario(store: LogStore) -> None:
        for n in range(40):
            await commit(store, sent(bytes([n]) * 1_000_000))
        await finish(store)

    with_log(tmp_path / "data", scenario)
    listed: Manifest = ship_directory(tmp_path / "data", url)
    assert manifest.load(Store(url)) == listed
    table = pq.ParquetFile(tmp_path / "store" / listed.segments[0].parquet_name)
    groups = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
    assert sum(groups) >= 40 and max(groups) <= 16
