"""A topic's messages from a store and its server, as one stream: what retention dropped here is read from there."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from notify.errors import InvalidRequest, NotFound, ObjectStoreFailed
from notify.object_store.store import Store
from notify.protocol.wire import instant
from notify.spark.messages.options import Options
from notify.spark.messages.planning import Planning
from notify.spark.messages.reading import Piece, Reading
from notify.spark.messages.shipped import ShippedMessages
from notify.storage.log import LogStore
from notify.storage.records import State
from notify.storage.shipped import manifest
from notify.storage.topics import Topic
from notify.testing.process import ServerProcess
from tests.support.shipping import ship_directory
from tests.support.transactions import sent

HOUR_US = 3_600_000_000
START_US = time.time_ns() // 1000 - 48 * HOUR_US
STEP_US = 60_000_000
QUEUES = 2
COUNT = 160
SHIPPED = 100
TOPIC = "orders"


@dataclass
class World:
    """A server that lacks what retention dropped, and the store that has it."""

    server: ServerProcess
    store: str

    def options(self, *, store: str | None = None, **given: Any) -> Options:
        chosen = self.store if store is None else store
        options = {"servers": self.server.url, "topics": TOPIC, "store": chosen, "timeoutSeconds": "30"}
        return Options.of(options | {name: str(value) for name, value in given.items()}, "earliest")

    def numbers(self, **given: Any) -> list[int]:
        """The numbers of the messages from the query's beginning to its end."""
        options = self.options(**given)
        with closing(Planning(options)) as planning, Reading(options) as reading:
            pieces = planning.pieces(planning.beginning(), planning.ending())
            return numbers_of(reading, pieces)


def numbers_of(reading: Reading, pieces: list[Piece]) -> list[int]:
    batches = [batch for piece in pieces for batch in reading.rows(piece)]
    return [int(body) for batch in batches for body in batch.column("body").to_pylist()]


async def commit(store: LogStore, body: bytes, key: str, topic: str, at_us: int) -> None:
    one = sent(body, key=key, topic=topic)
    await store.put([one], at_us)
    await store.decide([(one.id, one.producer_group, State.COMMITTED)], at_us)


async def fill(directory: Path, first: int, end: int) -> None:
    """Commit messages, one a minute; between them those of another topic. The topic of that name before has others."""
    store = LogStore(directory, segment_bytes=4096)
    await store.open(START_US)
    if not first:
        await store.create_topic(Topic(TOPIC))
        for n in range(10):
            await commit(store, b"-%d" % n, "x", TOPIC, START_US)
        await store.delete_topic(TOPIC)
        await store.create_topic(Topic(TOPIC, QUEUES))
        await store.create_topic(Topic("others", QUEUES))
    for n in range(first, end):
        at_us = START_US + n * STEP_US
        await commit(store, b"%d" % n, f"k{n % 7}", TOPIC, at_us)
        await commit(store, b"other", f"k{n}", "others", at_us)
    await store.sealed_up()
    await store.close()


async def drop(directory: Path, until: int) -> None:
    """Have retention drop what is older than a message."""
    store = LogStore(directory, segment_bytes=4096, retention_us=1)
    await store.open(START_US)
    assert await store.retain(START_US + until * STEP_US) > 2
    await store.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("shipped") / "data"
    data.mkdir()
    store = f"file://{data.parent}/store"
    asyncio.run(fill(data / "log", 0, SHIPPED))
    ship_directory(data, store, most_inline=6, page_segments=3)
    asyncio.run(fill(data / "log", SHIPPED, COUNT))
    asyncio.run(drop(data / "log", SHIPPED // 2))
    server = ServerProcess(data).start()
    yield World(server, store)
    server.stop()


@pytest.mark.long
def test_every_message_once_over_the_seam(world: World) -> None:
    assert sorted(world.numbers(rowsPerPartition=9)) == list(range(COUNT))
    here = world.numbers(store="")
    assert sorted(here) == list(range(min(here), COUNT)) and 0 < min(here) < SHIPPED


@pytest.mark.long
def test_micro_batches_over_the_seam(world: World) -> None:
    options = world.options()
    read: list[int] = []
    with closing(Planning(options)) as planning, Reading(options) as reading:
        at = planning.beginning()
        while (following := planning.following(at, 13)) != at:
            read += numbers_of(reading, planning.pieces(at, following))
            at = following
    assert sorted(read) == list(range(COUNT))


@pytest.mark.long
def test_a_query_begins_at_an_instant_that_only_the_store_knows(world: World) -> None:
    for first in (0, 7, 30, SHIPPED, COUNT - 1):
        begun = sorted(world.numbers(startingOffsets=instant(START_US + first * STEP_US)))
        assert begun == list(range(first, COUNT)), first
    ended = world.numbers(endingOffsets=instant(START_US + 30 * STEP_US))
    assert sorted(ended) == list(range(30))


def test_segments_dropped_during_a_task_are_read_from_the_store(world: World) -> None:
    """The range was planned when the server had it."""
    options = world.options()
    with closing(Planning(options)) as planning, Reading(options) as reading:
        state = planning.latest()[TOPIC]
        piece = Piece(TOPIC, state.number, 0, 0, 5, 0)
        assert len(numbers_of(reading, [piece])) == 5
        with Reading(world.options(store="")) as alone, pytest.raises(NotFound, match="option store"):
            numbers_of(alone, [piece])


def test_without_the_store_old_offsets_are_told_to_be_gone(world: World) -> None:
    with pytest.raises(NotFound, match="failOnDataLoss") as lost:
        world.numbers(store="", startingOffsets='{"orders": {"0": 0, "1": 0}}')
    assert lost.value.code == "data_loss"
    here = world.numbers(store="", startingOffsets='{"orders": {"0": 0, "1": 0}}', failOnDataLoss="false")
    assert sorted(here) == sorted(world.numbers(store=""))
    assert sorted(world.numbers(startingOffsets='{"orders": {"0": 0, "1": 0}}')) == list(range(COUNT))


@pytest.mark.long
def test_a_store_of_another_log_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    asyncio.run(fill(tmp_path / "data" / "log", 0, SHIPPED))
    ship_directory(tmp_path / "data", f"file://{tmp_path}/store")
    with pytest.raises(InvalidRequest, match="of another log"):
        world.numbers(store=f"file://{tmp_path}/store")
    with pytest.raises(InvalidRequest, match="has no manifest"):
        world.numbers(store=f"file://{tmp_path}/nowhere")


def test_a_store_that_loses_what_it_listed_is_told(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.store.removeprefix("file://"), tmp_path / "store")
    for table in sorted((tmp_path / "store" / "messages").iterdir())[:2]:
        table.unlink()
    with pytest.raises(ObjectStoreFailed, match="messages/"):
        world.numbers(store=f"file://{tmp_path}/store")


def test_only_a_few_footers_are_read_to_find_an_offset(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halving, not walking: what a task reads does not grow with the log."""
    read: set[str] = set()

    def read_range(store: Store, name: str, start: int, size: int) -> bytes:
        read.add(name)
        return original(store, name, start, size)

    original = Store.read_range
    monkeypatch.setattr(Store, "read_range", read_range)
    with closing(ShippedMessages(world.options())) as store:
        number = 2  # the topic of this name that was made second
        assert [batch.num_rows for batch in store.rows(TOPIC, number, 0, 20, 21)] == [1]
    listed = manifest.load(Store(world.store))
    assert listed is not None and listed.pages
    tables = {name for name in read if name.startswith("messages/")}
    assert 0 < len(tables) <= 6 < listed.count // 2
