"""The feed of a consumer over Kafka: what a poll brings goes to the window that it was fetched for, and its sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tests.support.clock import PATIENCE_SECONDS

pytest.importorskip("confluent_kafka")

from notify.client.kafka import feed as feeds
from notify.client.kafka.feed import MOST_POLLED, QUICK_SECONDS, Feed, PollSize
from notify.client.kafka.partitions import Partitions
from notify.kafka.progress import Progress


class Record:
    def __init__(self, partition: int, offset: int, body: bytes = b"") -> None:
        self._place, self._body = (partition, offset), body

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._place[0]

    def offset(self) -> int:
        return self._place[1]

    def error(self) -> None:
        return None

    def key(self) -> None:
        return None

    def leader_epoch(self) -> int:
        return 7

    def __len__(self) -> int:
        return len(self._body)


class Client:
    """Kafka's client: it has these records, and calls back within a call for many."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.call_back: Callable[[], None] = lambda: None
        self.asked: list[int] = []
        self.changes: list[tuple[str, list[tuple[int, int]]]] = []

    def poll(self, seconds: float) -> Record | None:
        return self.records.pop(0) if self.records else None

    def consume(self, most: int, seconds: float) -> list[Record]:
        self.asked.append(most)
        call_back, self.call_back = self.call_back, lambda: None
        call_back()
        taken, self.records = self.records[:most], self.records[most:]
        return taken

    def __getattr__(self, name: str) -> Any:
        """Note a change of the assignment: its name, and the partitions with their offsets."""
        return lambda places: self.changes.append((name, [(p.partition, p.offset) for p in places]))

    def close(self) -> None:
        pass


class Cluster:
    settings: ClassVar[dict[str, str]] = {}

    def __init__(self, client: Client) -> None:
        self.consumer = lambda own: client


def polled(client: Client, work: Callable[[Feed, Partitions], Any]) -> None:
    """Run `work` with a feed of partitions 0 and 1, of which nothing is fetched yet."""

    async def run() -> None:
        partitions = Partitions(1000)
        for number in range(2):
            partitions.open(("t", number), Progress(0, left=True), in_order=False)
        feed = Feed(Cluster(client), "g", "i", partitions)  # type: ignore[arg-type]
        await asyncio.wait_for(work(feed, partitions), PATIENCE_SECONDS)
        await feed.close()

    asyncio.run(run())


def nexts(partitions: Partitions) -> list[int]:
    return [window.next for _, window in partitions.items()]


def test_one_poll_brings_records_of_several_partitions_in_their_order() -> None:
    client = Client([Record(*place) for place in ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (0, 5))])

    async def work(feed: Feed, partitions: Partitions) -> None:
        assert await feed.poll(10, 0.0) == 6
        assert nexts(partitions) == [6, 2]
        assert [window.ready for _, window in partitions.items()] == [4, 2]
        assert partitions.take_jumps() == {("t", 0): (3, 5)}

    polled(client, work)


def test_a_poll_ends_at_its_records_and_at_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "POLLED_BYTES", 10_000)
    client = Client([Record(0, offset, b"x" * 4_000) for offset in range(20)])

    async def work(feed: Feed, partitions: Partitions) -> None:
        assert await feed.poll(3, 0.0) <= 3
        assert await feed.poll(13, 0.0) == 3

    polled(client, work)
    assert max(client.asked) <= 3, "more than the bytes allow"


def test_records_fetched_before_a_rebalance_in_the_same_call_are_fetched_again() -> None:
    """Records 3 and 4 were fetched for the earlier window, which had not finished 1 and 2: the new one would pass these
    by."""
    client = Client([Record(0, 0), Record(0, 1), Record(0, 2)])

    async def work(feed: Feed, partitions: Partitions) -> None:
        assert await feed.poll(3, 0.0) == 3
        client.records = [Record(1, 0), Record(1, 1), Record(0, 3), Record(0, 4)]

        async def rebalance() -> None:
            partitions.close([("t", 0)])
            partitions.open(("t", 0), Progress(1, left=True), in_order=False)

        client.call_back = lambda: feed.thread.wait_for(rebalance())
        assert await feed.poll(10, 0.0) == 2
        windows = dict(partitions.items())
        assert (windows["t", 0].next, windows["t", 1].next) == (1, 2)
        places = [(0, 1)]
        assert client.changes == [("incremental_unassign", places), ("incremental_assign", places), ("resume", places)]

    polled(client, work)


def test_a_partition_that_is_revoked_within_the_call_gets_nothing_of_it() -> None:
    client = Client([Record(1, 0), Record(0, 0), Record(1, 1)])

    async def work(feed: Feed, partitions: Partitions) -> None:
        async def rebalance() -> None:
            partitions.close([("t", 0)])

        client.call_back = lambda: feed.thread.wait_for(rebalance())
        await feed.poll(10, 0.0)
        assert nexts(partitions) == [2] and client.changes == []

    polled(client, work)


def asked(
    poll: PollSize, polls: int, *, handled_in: float, polled_in: float = 0.0, came: int | None = None
) -> list[int]:
    """The records that each of so many polls asks for, after a first one. `came` None: each brings them all."""
    now = 100.0
    size = poll.next(now)
    sizes = []
    for _ in range(polls):
        now += polled_in
        poll.came(now, size if came is None else came)
        now += handled_in
        size = poll.next(now)
        sizes.append(size)
    return sizes


def test_quick_handlers_get_more_at_a_time_and_slow_ones_as_few_as_batch_says() -> None:
    poll = PollSize(32)
    assert asked(poll, 7, handled_in=QUICK_SECONDS / 2) == [64, 128, 256, 512, 1024, MOST_POLLED, MOST_POLLED]
    assert poll.half == MOST_POLLED // 2
    assert asked(poll, 6, handled_in=QUICK_SECONDS * 2) == [1000, 500, 250, 125, 62, 32]
    assert poll.half == 0


def test_a_poll_that_takes_long_does_not_make_handlers_slow() -> None:
    assert asked(PollSize(32), 3, handled_in=QUICK_SECONDS / 2, polled_in=QUICK_SECONDS * 5) == [64, 128, 256]


def test_few_records_that_come_one_by_one_are_no_whole_poll() -> None:
    assert set(asked(PollSize(32), 20, handled_in=QUICK_SECONDS / 10, came=1)) == {32}


def test_a_batch_of_one_and_a_large_one() -> None:
    assert (PollSize(1).low, PollSize(8).low, PollSize(10_000).low) == (1, 5, 17)
    assert asked(PollSize(1), 3, handled_in=0.0) == [2, 4, 8]
    assert asked(PollSize(10_000), 3, handled_in=0.0) == [10_000, 10_000, 10_000]
