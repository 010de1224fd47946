"""A restored log gives out no offset again: its queues continue behind all that an earlier life of it may have had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from notify.errors import InvalidRequest
from notify.protocol.wire import Receive, SettleItem, decode_payload
from notify.server.core.flow import Flow
from notify.server.delivery import Delivery
from notify.server.metrics import Metrics
from notify.server.topics import Topics
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log import LogStore
from notify.storage.log.disk import Disk
from notify.storage.log.gaps import OFFSETS_APART
from notify.storage.log.records import progressed, records
from notify.storage.log.recovery import walk
from notify.storage.log.restored_start import begin_at_the_end
from notify.storage.log.segments import Segments
from notify.storage.topics import Backlog, Topic
from tests.contract.stores import T0, Bench, bodies, commit
from tests.support.disks import UnsyncedDisk
from tests.support.transactions import sent

LOGS = ("log", "small-segments")


async def restored(b: Bench, generation: int) -> None:
    """Have the log continue as a restore from shipped segments leaves it: sealed to its end."""
    await b.restart()
    await b.store.close()
    begin_at_the_end(Disk(b.directory), T0)
    b.store = LogStore(b.directory, disk=UnsyncedDisk(b.directory))
    await b.store.open(T0)
    await b.store.begin_generation(generation, T0)


@pytest.mark.parametrize("kind", LOGS)
def test_offsets_go_on_behind_those_that_are_lost(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        b = Bench(kind, tmp_path / "log")
        await b.store.open(T0)
        b.store.create_topic_soon(Topic("t"))
        await b.store.subscribe(Subscription("behind", "t"), [0])
        await b.store.subscribe(Subscription("through", "t"), [0])
        for n in range(3):
            await commit(b.store, sent(b"%d" % n))
        await b.store.settle("through", "t", 0, [(0, 3)], SettleKind.ACK, T0)
        await b.store.settle("behind", "t", 0, [(1, 1)], SettleKind.ACK, T0)
        await restored(b, 2)
        for again in (False, True, True):
            if again:
                await b.restart()
            first = OFFSETS_APART + 3
            if not again:
                await commit(b.store, sent(b"later"))
            assert b.store.bounds("t", 0) == (0, first + 1)
            assert b.store.count("t", 0, 0, first + 1) == 4
            assert b.store.gaps("t", 0) == [(3, first)]
            assert [m.offset for m in b.store.read("t", 0, 1, 10, 1 << 20)] == [1, 2, first]
            assert [m.offset for m in b.store.read("t", 0, 77, 10, 1 << 20)] == [first]
            assert b.store.progress("through", "t", 0).floor == first
            behind = b.store.progress("behind", "t", 0)
            assert behind.next_unsettled(2) == 2 and behind.next_unsettled(3) == first
            b.store.subscribe_soon(Subscription("new", "t"), [0])
            assert b.store.progress("new", "t", 0).next_unsettled(3) == first
        await b.store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", LOGS)
def test_a_topic_of_a_restored_log_begins_behind_one_of_its_name_that_is_lost(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        b = Bench(kind, tmp_path / "log")
        await b.store.open(T0)
        b.store.create_topic_soon(Topic("t"))
        await restored(b, 3)
        b.store.create_topic_soon(Topic("t", queues=2))
        b.store.create_topic_soon(Topic("new"), [Subscription("g", "new")])
        await commit(b.store, sent(b"first", topic="new"))
        for again in (False, True, True):
            if again:
                await b.restart()
            assert b.store.bounds("t", 0) == b.store.bounds("t", 1) == (0, 2 * OFFSETS_APART)
            assert b.store.bounds("new", 0) == (0, 2 * OFFSETS_APART + 1)
            assert b.store.progress("g", "new", 0).floor == 2 * OFFSETS_APART
            assert b.store.progress("late", "t", 1).floor == 2 * OFFSETS_APART
            assert [m.offset for m in b.store.read("new", 0, 0, 10, 1 << 20)] == [2 * OFFSETS_APART]
        await b.store.close()

    asyncio.run(scenario())


def test_two_restores_of_the_same_segments_share_no_offset(tmp_path: Path) -> None:
    async def end_of(directory: str, generation: int) -> int:
        b = Bench("log", tmp_path / directory)
        await b.store.open(T0)
        b.store.create_topic_soon(Topic("t"))
        await commit(b.store, sent(b"kept"))
        await restored(b, generation)
        with pytest.raises(InvalidRequest, match="not above"):
            await b.store.begin_generation(generation, T0)
        end: int = b.store.bounds("t", 0)[1]
        await commit(b.store, sent(b"new"))
        with pytest.raises(InvalidRequest, match="a segment of its own"):
            await b.store.begin_generation(generation + 1, T0)
        await b.store.close()
        return end

    second, third = (asyncio.run(end_of(str(n), n)) for n in (2, 3))
    assert third - second == OFFSETS_APART


@pytest.mark.parametrize("mode", ["shared", "ordered"])
@pytest.mark.parametrize("tags", [(), ("red",)])
def test_groups_go_on_across_the_lost_offsets(mode: str, tags: tuple[str, ...], tmp_path: Path) -> None:
    """Nothing is recorded of offsets that no message has, and none of them is counted as waiting."""

    async def scenario() -> None:
        b = Bench("log", tmp_path / "log")
        await b.store.open(T0)
        b.store.create_topic_soon(Topic("t"))
        metrics = Metrics()
        delivery = Delivery(b.store, lambda: T0, metrics, Topics(b.store, on_first_use=True))
        await delivery.following.subscribe(Subscription("g", "t", mode=mode, tags=tags), 0)
        for n in range(3):
            await commit(b.store, sent(b"%d" % n, key=str(n), tag="red"), sent(b"blue", tag="blue"))
        await restored(b, 2)
        for n in range(3, 6):
            await commit(b.store, sent(b"%d" % n, key=str(n), tag="red"), sent(b"blue", tag="blue"))
        delivery = Delivery(b.store, lambda: T0, metrics, Topics(b.store, on_first_use=True))
        assert delivery.followers.lag("t") == 12
        handed = await delivery.receive("g", Receive(instance="i", max=100))
        got = [decode_payload(m.payload).body for h in handed for m in h.messages]
        reds = [b"%d" % n for n in range(6)]
        assert [body for body in got if body != b"blue"] == reds and len(got) == (6 if tags else 12)
        receipts = [r for h in handed for r, *_ in h.each()]
        await delivery.settle("g", [SettleItem(receipt=r, action="ack") for r in receipts])
        assert delivery.followers.lag("t") == 0
        assert b.store.progress("g", "t", 0).floor == b.store.bounds("t", 0)[1]
        assert (metrics.expired, metrics.filtered) == (0, 6 if tags else 0)
        await b.store.close()
        longest = max((count for first, count in _settled(tmp_path / "log")), default=0)
        assert longest <= 12, "the records name offsets that no message has"

    asyncio.run(scenario())


def _settled(directory: Path) -> list[tuple[int, int]]:
    """All runs of the log's records of progress."""
    disk = Disk(directory)
    segments = Segments(disk)
    assert not segments.open_existing()
    runs = [
        (run[0], run[1])
        for segment in segments.all()
        for frame in walk(disk, segment, 0, True, [])
        for record in records(frame.body)
        for progress in progressed(record.kind, record.data)
        for run in progress.runs
    ]
    segments.close()
    return runs


def test_a_backlog_that_drops_the_oldest_keeps_its_bound_over_the_lost_offsets(tmp_path: Path) -> None:
    async def scenario() -> None:
        b = Bench("log", tmp_path / "log")
        await b.store.open(T0)
        topics = Topics(b.store, on_first_use=True)
        b.store.create_topic_soon(Topic("t", backlog=4, backlog_policy=Backlog.DROP_OLDEST))
        delivery = Delivery(b.store, lambda: T0, Metrics(), topics)
        await delivery.following.subscribe(Subscription("g", "t"), 0)
        for n in range(3):
            await commit(b.store, sent(b"%d" % n))
        await restored(b, 2)
        await commit(b.store, sent(b"3"))
        delivery = Delivery(b.store, lambda: T0, Metrics(), Topics(b.store, on_first_use=True))
        flow = Flow(b.store, delivery, lambda: T0, Metrics())
        flow.drop_oldest()
        assert bodies(b.store) == [b"0", b"1", b"2", b"3"]
        for n in range(4, 9):
            await commit(b.store, sent(b"%d" % n))
            flow.drop_oldest()
        assert bodies(b.store) == [b"5", b"6", b"7", b"8"]
        await b.store.close()

    asyncio.run(scenario())
