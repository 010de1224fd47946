"""Records over Kafka in a consumer's hand: the fate of each, without brokers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from notify.client import AsyncConsumer, Consumer, ReceivedMessage
from notify.client.handling.hand import Hand
from notify.client.threads.handler_threads import HandlerThreads
from notify.errors import DeadLetter
from notify.kafka.progress import Progress
from notify.kafka.records import ID, OWN, TAG
from tests.support.clock import PATIENCE_SECONDS, eventually_async

pytest.importorskip("confluent_kafka")

from notify.client.kafka.feed import PollSize
from notify.client.kafka.handling import Handling
from notify.client.kafka.partitions import Partitions
from notify.client.kafka.plan import Plan
from notify.client.kafka.retries import Departure
from notify.client.kafka.window import Item, Window


class Record:
    def __init__(self, offset: int, text: str, key: str | None = None, headers: Any = None, partition: int = 0) -> None:
        self._offset, self._text, self._key, self._headers = offset, text, key, headers
        self._partition = partition

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return None if self._key is None else self._key.encode()

    def value(self) -> bytes:
        return self._text.encode()

    def headers(self) -> Any:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_000


class Settled:
    """Takes what leaves for other topics; it arrives at once."""

    def __init__(self) -> None:
        self.departures: list[Departure] = []

    def depart(self, departure: Departure) -> None:
        departure.window.leave(departure.item)
        self.departures.append(departure)
        departure.window.finish(departure.item)


class World:
    """A consumer's handling of two partitions."""

    def __init__(self, consumer: Any, *, concurrency: int = 4, most: int | None = None) -> None:
        consumer._callers, consumer._contexts = {}, []
        consumer._pool = HandlerThreads(concurrency, "test")
        self.consumer = consumer
        self.hand = Hand(lambda: consumer._start_caller(self.hand), consumer._count, concurrency, 32, most)
        self.is_stopped = False
        self.plan = Plan(
            "kafka://b", "g", "i", consumer._handlers, self.hand, consumer._cancel, lambda: self.is_stopped,
            concurrency, 32, 30.0, 30.0,
        )  # fmt: skip
        self.partitions = Partitions(1000)
        self.settled = Settled()
        self.handling = Handling(self.plan, self.partitions, self.settled, PollSize(32))  # type: ignore[arg-type]
        in_order = any(handler.mode == "ordered" for handler in consumer._handlers.values())
        self.windows = [self.partitions.open(("t", n), Progress(0, left=True), in_order=in_order) for n in range(2)]

    def add(self, window: Window, records: list[Record]) -> None:
        for record in records:
            self.partitions.add(window, [Item(record.offset(), record.key(), 1, record)])
        self.partitions.look(window)

    async def until_handled(self) -> None:
        await eventually_async(lambda: not self.handling.under_way, "everything to be handled")


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), PATIENCE_SECONDS)

    asyncio.run(bounded())


def made(function: Callable[..., Any], **options: Any) -> Any:
    kind = AsyncConsumer if asyncio.iscoroutinefunction(function) else Consumer
    consumer = kind("kafka://127.0.0.1:1", group="g", concurrency=4)
    consumer.subscribe("t", **options)(function)
    return consumer


def texts_of(given: Any) -> list[str]:
    return [m.text for m in given] if isinstance(given, list) else [given.text]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("batch", [None, 8])
def test_each_message_of_a_run_has_its_own_fate(is_async: bool, batch: int | None) -> None:
    def judge(given: Any) -> None:
        for text in texts_of(given):
            if text == "3":
                raise DeadLetter("never")
            if text in "56":
                raise ValueError(f"not {text}")

    async def judge_async(given: Any) -> None:
        judge(given)

    async def work() -> None:
        world = World(made(judge_async if is_async else judge, batch=batch))
        world.add(world.windows[0], [Record(n, str(n)) for n in range(10)])
        world.handling.begin()
        await world.until_handled()
        gone = {d.item.offset: d.topic.rpartition("-")[0] for d in world.settled.departures}
        assert sorted(gone) == [3, 5, 6] and gone[3] != gone[5] == gone[6]
        assert world.windows[0].progress().offset == 10
        assert (world.consumer.handled, world.consumer.failed) == (7, 3)
        assert world.hand.count == 0

    run(work)


def test_waiting_items_of_a_revoked_partition_are_returned() -> None:
    free, began, seen = threading.Event(), threading.Event(), []

    def handle(message: ReceivedMessage) -> None:
        began.set()
        assert free.wait(PATIENCE_SECONDS)
        seen.append((message.queue, message.offset))

    async def work() -> None:
        world = World(made(handle), concurrency=1)
        kept, revoked = world.windows
        world.add(kept, [Record(0, "first")])
        world.handling.begin()
        await asyncio.to_thread(began.wait, PATIENCE_SECONDS)
        world.add(kept, [Record(n, "kept") for n in (1, 2)])
        world.add(revoked, [Record(n, "revoked", partition=1) for n in (0, 1)])
        world.handling.begin()
        revoked.stop()
        world.handling.give_back([revoked])
        assert await world.handling.finished(0, [revoked]) == []
        assert revoked.progress().left and revoked.progress().offset == 0
        world.partitions.close([("t", 1)])
        free.set()
        await world.until_handled()
        assert seen == [(0, 0), (0, 1), (0, 2)] and kept.progress().offset == 3

    run(work)


def test_the_fate_of_a_lost_partition_changes_nothing() -> None:
    free, began = threading.Event(), threading.Event()

    def handle(message: ReceivedMessage) -> None:
        began.set()
        assert free.wait(PATIENCE_SECONDS)
        raise ValueError("too late")

    async def work() -> None:
        world = World(made(handle))
        world.add(world.windows[0], [Record(0, "a")])
        world.handling.begin()
        await asyncio.to_thread(began.wait, PATIENCE_SECONDS)
        world.partitions.close([("t", 0)])
        free.set()
        await world.until_handled()
        assert not world.settled.departures and world.windows[0].progress().offset == 0

    run(work)


def test_a_slow_call_holds_up_no_message_behind_it() -> None:
    others, done = threading.Event(), []

    def handle(message: ReceivedMessage) -> None:
        if message.text == "0":
            assert others.wait(PATIENCE_SECONDS)
        done.append(message.text)
        if len(done) == 39:
            others.set()

    async def work() -> None:
        world = World(made(handle), concurrency=2)
        world.add(world.windows[0], [Record(n, str(n)) for n in range(40)])
        world.handling.begin()
        await world.until_handled()
        assert done[-1] == "0" and sorted(done) == sorted(map(str, range(40)))

    run(work)


def test_runs_are_not_cut_into_ever_smaller_ones() -> None:
    """Each run costs as much as some messages."""

    async def handle(message: ReceivedMessage) -> None: ...

    async def work() -> None:
        world = World(made(handle), most=100)
        put, sizes = world.hand.put, []

        def noted(runs: Any) -> None:
            sizes.extend([run.unsettled for run in runs])
            put(runs)

        world.hand.put = noted  # type: ignore[method-assign]
        for partition, window in enumerate(world.windows):
            world.add(window, [Record(n, "", partition=partition) for n in range(1000)])
        world.handling.begin()
        await world.until_handled()
        assert sum(sizes) == 2000 and len(sizes) <= 200

    run(work)


def test_no_handler_is_idle_while_the_others_are_slow() -> None:
    others, seen = threading.Event(), []

    def handle(message: ReceivedMessage) -> None:
        if message.text == "0":
            assert others.wait(PATIENCE_SECONDS)
        seen.append(message.text)
        if len(seen) == 9:
            others.set()

    async def work() -> None:
        world = World(made(handle), concurrency=4, most=4)
        world.hand._limit = None  # it is not cautious any more
        world.add(world.windows[0], [Record(n, str(n)) for n in range(10)])
        world.handling.begin()
        await world.until_handled()
        assert seen[-1] == "0" and sorted(seen) == [*map(str, range(10))]

    run(work)


def test_one_message_of_a_key_is_handled_at_a_time() -> None:
    at_once: set[str | None] = set()
    seen: list[tuple[str | None, int]] = []

    async def handle(message: ReceivedMessage) -> None:
        assert message.key not in at_once
        at_once.add(message.key)
        await asyncio.sleep(0)  # lets the others run
        at_once.discard(message.key)
        seen.append((message.key, message.offset))

    async def work() -> None:
        world = World(made(handle, mode="ordered"))
        world.add(world.windows[0], [Record(n, "", key="abc"[n % 3]) for n in range(60)])
        world.handling.begin()
        await eventually_async(lambda: world.windows[0].progress().offset == 60, "everything to be handled")
        for key in "abc":
            assert [offset for of, offset in seen if of == key] == list(range("abc".index(key), 60, 3))
        assert world.consumer.failed == 0

    run(work)


def test_a_paused_group_gets_its_records_later_in_their_order() -> None:
    free, began, seen = threading.Event(), threading.Event(), []

    def handle(message: ReceivedMessage) -> None:
        began.set()
        assert free.wait(PATIENCE_SECONDS)
        seen.append(message.offset)

    async def work() -> None:
        world = World(made(handle), concurrency=1)
        world.add(world.windows[0], [Record(n, "") for n in range(20)])
        world.handling.begin()
        await asyncio.to_thread(began.wait, PATIENCE_SECONDS)
        world.handling.hold(True)
        assert world.handling.under_way == 1
        free.set()
        await world.until_handled()
        world.handling.begin()
        assert seen == [0] and not world.handling.under_way
        world.handling.hold(False)
        world.handling.begin()
        await eventually_async(lambda: len(seen) == 20, "the others to be handled")
        assert seen == list(range(20))

    run(work)


def test_a_record_is_the_message_that_was_sent() -> None:
    seen: list[ReceivedMessage] = []
    own: Any = [(ID, b"x.1"), (TAG, b"red"), ("region", b"eu"), (OWN + "own-notify-x", b"1"), ("gone", None)]

    async def work() -> None:
        world = World(made(seen.append))
        world.add(world.windows[0], [Record(0, "a", "k", own), Record(1, "b")])
        world.handling.begin()
        await eventually_async(lambda: world.windows[0].progress().offset == 2, "both to be handled")
        first, second = sorted(seen, key=lambda message: message.text)  # two threads handled them
        assert (first.id, first.key, first.tag, first.text) == ("x.1", "k", "red", "a")
        assert first.headers == {"region": "eu", "notify-x": "1"}
        assert (second.id, second.key, second.headers, second.attempt) == ("t/0@1", None, {}, 1)
        assert first.committed_at == "2023-11-14T22:13:20Z"

    run(work)


def test_a_batch_of_several_runs_goes_back_when_its_handler_exits() -> None:
    """The places of one run were put back in another, which failed, and the consumer waited in vain for the rest."""

    async def exits(messages: list[ReceivedMessage]) -> None:
        assert len(messages) == 4
        raise SystemExit(3)

    async def work() -> None:
        world = World(made(exits, batch=8))
        for partition, window in enumerate(world.windows):
            world.add(window, [Record(n, str(n), partition=partition) for n in range(partition, 2 + partition)])
        world.handling.begin()
        await eventually_async(lambda: world.consumer._left is not None, "the handler to exit")
        world.handling.hold(True)  # as the consumer's end does
        await world.until_handled()
        assert world.hand.count == 0 and not world.settled.departures
        assert (world.consumer.handled, world.consumer.failed) == (0, 0)

    run(work)
