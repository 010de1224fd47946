"""Payloads in shipped tables whose halves lie in a segment that is gone by then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from notify.object_store.store import Store
from notify.storage.log import LogStore
from notify.storage.records import State
from notify.storage.shipped import manifest
from notify.storage.shipped.manifest import Manifest
from notify.storage.shipped.shipper import Shipper
from notify.storage.topics import Topic
from tests.support.logs import T0, commit
from tests.support.object_store import bodies
from tests.support.shipping import ship_directory
from tests.support.transactions import sent

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
