"""A consumer over Kafka that stops, is cancelled or paused: nothing begins, is written twice or piles up."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from notify.client import AsyncConsumer, Consumer, DeadLetter
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running

pytest.importorskip("confluent_kafka")

from notify.client.kafka import feed, ownership
from notify.client.kafka.control import Orders
from notify.client.kafka.feed import Feed
from notify.client.kafka.handling import Handling
from notify.client.kafka.membership import Membership
from notify.client.kafka.modes import OtherModes
from notify.client.kafka.starting import Starts
from notify.client.kafka.topics import Topics
from notify.client.kafka.window import Window
from notify.kafka import control
from notify.kafka.cluster import Cluster
from notify.kafka.groups import retry_topic
from notify.kafka.progress import Progress
from tests.support.kafka import KafkaNode, Wrapped, committed
from tests.support.kafka_consumers import is_assigned, make_topic, produce, progress, worker
from tests.support.told import CONSUMING, Told

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.long
def test_no_handler_begins_once_the_consumer_is_told_to_stop(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"{n}" for n in range(20)])
    consumer = AsyncConsumer(kafka_url, group=unique)
    seen = []

    @consumer.subscribe(unique, start="earliest")
    async def handle(message: Any) -> None:
        seen.append(message.text)
        consumer.stop()

    asyncio.run(consumer.run())
    assert seen == ["0"]
    assert progress(kafka_url, unique)[unique, 0].offset == 1, "the others come again"


@pytest.mark.long
def test_cancelled_within_a_commit_a_consumer_writes_its_retries_once(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"{n}" for n in range(8)])
    committing, cancelling = threading.Event(), threading.Event()

    class Slow(Wrapped):
        """A producer whose first commit returns only after the consumer was cancelled."""

        def commit_transaction(self, *given: Any) -> None:
            self._client.commit_transaction(*given)
            committing.set()
            assert cancelling.wait(PATIENCE_SECONDS)

    make, cancel = Cluster.producer, Handling.cancel

    async def note_and_cancel(self: Handling) -> None:
        cancelling.set()
        await cancel(self)

    monkeypatch.setattr(
        Cluster, "producer", lambda self, own: Slow(make(self, own)) if "transactional.id" in own else make(self, own)
    )
    monkeypatch.setattr(Handling, "cancel", note_and_cancel)
    consumer = AsyncConsumer(kafka_url, group=unique)

    @consumer.subscribe(unique, start="earliest", retry_min=3600.0, retry_max=3600.0)
    async def handle(message: Any) -> None:
        raise RuntimeError("again")

    async def cancelled() -> None:
        running = asyncio.create_task(consumer.run())
        assert await asyncio.to_thread(committing.wait, PATIENCE_SECONDS)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(cancelled())
    left = progress(kafka_url, unique)[unique, 0]
    gone = [offset for offset in range(8) if offset < left.offset or offset in left.done]
    assert len(committed(kafka_url, retry_topic(unique))) == len(gone) > 0


@pytest.mark.long
def test_a_paused_group_leaves_its_backlog_where_it_is(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"{n}" for n in range(500)])
    produce(kafka_url, control.TOPIC, [control.Control(paused=True).encoded().decode()], key=unique.encode())
    fetched, polls, many = [], [], threading.Event()
    add, poll = Window.add, Feed.poll

    def noted(self: Window, item: Any) -> bool:
        fetched.append(item)
        return add(self, item)

    async def counted(self: Feed, most: int, seconds: float) -> int:
        polls.append(most)
        if len(polls) == 15:
            many.set()
        return await poll(self, most, seconds)

    consumer = Consumer(kafka_url, group=unique)
    consumer.subscribe(unique, start="earliest")(lambda message: None)
    with running(consumer):
        eventually(lambda: is_assigned(kafka_url, unique), "the partition")
        monkeypatch.setattr(Window, "add", noted)
        monkeypatch.setattr(Feed, "poll", counted)
        assert many.wait(PATIENCE_SECONDS)
        assert len(fetched) < 10
        produce(kafka_url, control.TOPIC, [control.Control().encoded().decode()], key=unique.encode())
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 500, "everything, once it is resumed")


def owner_of(kafka_url: str, group: str, instance: str) -> Consumer:
    consumer = Consumer(kafka_url, group=group, instance=instance, lease=5.0)
    consumer.subscribe(group, mode="failover", start="earliest")(lambda message: None)
    return consumer


def has_done(kafka_url: str, group: str, count: int) -> bool:
    return progress(kafka_url, group).get((group, 0), Progress(0)).offset == count


@pytest.mark.long
def test_a_stopping_owner_makes_way_although_its_client_does_not_end(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left its group only once its client had ended, for which it waited up to a minute."""
    released, close = threading.Event(), Feed.close
    held_up: list[Feed] = []

    async def closed(self: Feed, seconds: float) -> None:
        held_up.append(self)
        if self is held_up[0]:
            await asyncio.to_thread(released.wait, 2 * PATIENCE_SECONDS)
        await close(self, seconds)

    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["a"])
    first, second = (owner_of(kafka_url, unique, name) for name in ("first", "second"))
    with running(first):
        eventually(lambda: has_done(kafka_url, unique, 1), "the first owner")
        monkeypatch.setattr(Feed, "close", closed)
        with running(second):
            first.stop()
            produce(kafka_url, unique, ["b"])
            try:
                eventually(lambda: has_done(kafka_url, unique, 2), "the other instance to take over")
            finally:
                released.set()
    assert len(held_up) == 2


@pytest.mark.long
def test_an_owner_whose_client_hangs_while_it_leaves_does_not_stay_the_owner(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client continued with its heartbeats, and nobody received for five minutes."""
    hanging: list[Any] = []
    monkeypatch.setattr(ownership, "POLL_INTERVAL_SECONDS", feed.SESSION_SECONDS + 1.0)
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["a"])
    with monkeypatch.context() as patched:
        patched.setattr(ownership, "leave", lambda group, end: hanging.append(end))
        with running(owner_of(kafka_url, unique, "first")):
            eventually(lambda: has_done(kafka_url, unique, 1), "the first owner")
    with running(owner_of(kafka_url, unique, "second")):
        produce(kafka_url, unique, ["b"])
        eventually(lambda: has_done(kafka_url, unique, 2), "the other instance to take over")
    (end,) = hanging
    end()


def native_threads() -> Counter[str]:
    """The threads of Kafka's clients in this process, by name."""
    names = Counter[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names[(task / "comm").read_text().strip()] += 1
    return Counter({name: count for name, count in names.items() if name.startswith("rdk:")})


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the threads of a process are not shown here")
@pytest.mark.parametrize("mode", ["shared", "failover"])
def test_a_stopped_consumer_leaves_no_client_behind(kafka_url: str, unique: str, mode: str) -> None:
    """Its producer kept its threads and connections until the garbage was collected, which may be never."""
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["a"])
    progress(kafka_url, unique)  # the tests' own clients are made
    consumer = Consumer(kafka_url, group=unique)

    @consumer.subscribe(unique, mode=mode, start="earliest")
    def handle(message: Any) -> None:
        raise DeadLetter("a transaction writes it to another topic")

    def left() -> Counter[str]:
        gc.collect()  # what nobody holds is none of the consumer's
        return native_threads() - before

    before = native_threads()
    with running(consumer):
        eventually(lambda: has_done(kafka_url, unique, 1), "the dead letter")
    eventually(lambda: not left(), "the end of all threads that the consumer's clients had")
    assert consumer is not None, "it may live for long, stopped"


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Feed, "look"),
        (Topics, "make"),
        (Orders, "_begin"),
        (OtherModes, "_are_there"),
        (Topics, "subscribed"),
        (Starts, "look"),
        (Membership, "_begin"),
    ],
)
def test_a_stop_is_heard_in_every_step_of_the_start(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, kind: type, step: str
) -> None:
    """The consumer looked whether it was to stop only once it had started, and waited for calls under way."""
    reached, released = threading.Event(), threading.Event()
    original = getattr(kind, step)

    def held_up(self: Any, *given: Any) -> Any:
        reached.set()
        assert released.wait(PATIENCE_SECONDS)
        return original(self, *given)

    monkeypatch.setattr(kind, step, held_up)
    consumer = AsyncConsumer(kafka_url, group=unique)

    @consumer.subscribe(unique)
    async def handle(message: Any) -> None:
        raise AssertionError("nothing was sent")

    async def stopped() -> None:
        run = asyncio.create_task(consumer.run())
        assert await asyncio.to_thread(reached.wait, PATIENCE_SECONDS)
        consumer.stop()
        ended, _ = await asyncio.wait([run], timeout=PATIENCE_SECONDS / 3)
        released.set()
        await run
        assert ended, "the consumer waited for the step that is under way"

    asyncio.run(stopped())


def test_a_process_whose_brokers_say_nothing_ends_when_it_is_told_to(unique: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"kafka://127.0.0.1:{silent.getsockname()[1]}"
        with worker(url, unique, unique, tmp_path / "notes", {}) as consumer:
            connection, _ = silent.accept()
            consumer.process.terminate()
            assert consumer.process.wait(PATIENCE_SECONDS) == 0, "it ended before it had learned of silent brokers"
            connection.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "stands_still"),
    [("shared", False), ("shared", True), pytest.param("failover", True, marks=pytest.mark.long)],
)
def test_a_second_signal_ends_a_consumer_at_once(
    kafka_node: KafkaNode, unique: str, mode: str, stands_still: bool
) -> None:
    """It waited for its last commit and its leave for a minute where a broker stood still, and said nothing before."""
    make_topic(kafka_node.url, unique)
    produce(kafka_node.url, unique, ["a"])
    with Told(CONSUMING, kafka_node.url, unique, mode) as consumer:
        consumer.wait_for("handling")
        if stands_still:
            kafka_node.cluster.signal_node(0, signal.SIGSTOP)
        try:
            consumer.tell("handling", signal.SIGTERM)
            consumer.tell("the consumer stops", signal.SIGTERM)
            told = time.monotonic()
            assert consumer.end() == 128 + signal.SIGTERM
            took = time.monotonic() - told
        finally:
            kafka_node.cluster.signal_node(0, signal.SIGCONT)
    assert took < PATIENCE_SECONDS / 3, "it waited for more than a moment"
    assert "ended" not in consumer.output and "Traceback" not in consumer.output, consumer.output
