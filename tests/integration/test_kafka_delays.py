"""Delayed messages in Kafka: none twice, none early, none lost, whoever releases them and whatever happens to it."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from notify.errors import Unavailable
from notify.kafka.calls import leave
from notify.kafka.cluster import Cluster
from notify.kafka.undelivered import TOPIC as REFUSED
from notify.movers.sinks.delays import release, releaser
from notify.movers.sinks.delays.delayed_record import delayed_headers
from notify.movers.sinks.delays.releaser import Releaser
from notify.movers.sinks.delays.releaser import releasing as delays_released
from notify.movers.sinks.delays.topics import make_wheels
from notify.movers.sinks.delays.wheels import SECOND_US, WHEELS, Wheels, wheels_of
from notify.runtime.clock import wall_clock
from notify.testing import forked
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.delayed import Interrupted, interrupt_producers, send_at, send_delayed, signal_self, texts_of
from tests.support.kafka import KafkaNode, Wrapped, committed
from tests.support.kafka_consumers import is_assigned

pytest.importorskip("confluent_kafka")

from confluent_kafka import TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

SHAPE = (
    ("seconds", SECOND_US, 16), ("minutes", 8 * SECOND_US, 8), ("hours", 40 * SECOND_US, 8),
    ("days", 240 * SECOND_US, 8),
)  # fmt: skip
LATE_US = 3 * SECOND_US


class Clock:
    """A time that a test moves, in microseconds."""

    def __init__(self) -> None:
        self.now_us = 1_795_000_000 * SECOND_US

    def __call__(self) -> int:
        return self.now_us


class Sender:
    """Puts delayed messages into small wheels, by a clock."""

    def __init__(self, cluster: Cluster, wheels: Wheels, clock: Clock, topic: str) -> None:
        self._wheels, self._clock, self._topic = wheels, clock, topic
        make_wheels(cluster, wheels)
        self._producer = cluster.producer({"transactional.id": f"sender-{topic}"})
        self._producer.init_transactions(PATIENCE_SECONDS)

    def begin(self, body: str, due_us: int) -> str:
        """Send a message in a transaction that stays open; the topic of the wheel that takes it."""
        self._producer.begin_transaction()
        place = self._wheels.place(due_us, self._clock())
        assert place is not None
        headers = delayed_headers([("h", b"v")], due_us, self._topic)
        self._producer.produce(place.topic, body.encode(), b"k", place.partition, headers=headers)
        self._producer.flush(PATIENCE_SECONDS)
        return place.topic

    def commit(self) -> None:
        self._producer.commit_transaction(PATIENCE_SECONDS)

    def send(self, body: str, due_us: int) -> str:
        topic = self.begin(body, due_us)
        self.commit()
        return topic


@contextmanager
def releasing(url: str, *arguments: Any) -> Iterator[Releaser]:
    """A releaser in a thread, stopped afterwards."""
    releaser = Releaser(Cluster.of(url), *arguments)
    thread = threading.Thread(target=releaser.run, daemon=True)
    thread.start()
    try:
        yield releaser
    finally:
        releaser.stop()
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "the releaser did not stop"


# --- once ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_restarted_release_releases_none_again(kafka_node: KafkaNode, unique: str) -> None:
    """It began to release before it had read that messages were released: all of them came twice."""
    names = [f"{n:04}" for n in range(1500)]
    send_delayed(kafka_node.url, unique, names, delay=0.5)
    with releasing(kafka_node.url) as releaser:
        eventually(lambda: releaser.total.released >= 500, "the release of some")
    with releasing(kafka_node.url) as releaser:
        texts_of(kafka_node.url, unique, 1500)
    send_delayed(kafka_node.url, unique, ["last"], delay=0.5)
    with releasing(kafka_node.url) as releaser:
        eventually(lambda: releaser.total.released, "the release of the last")
    assert Counter(texts_of(kafka_node.url, unique, 1501)) == Counter([*names, "last"])


def interrupted_release(url: str, method: str, number: int) -> None:
    """In a process of its own: release, and send this process a signal before a call of the producer's.

    The brokers wait less long for it than for others. The transaction of one that is frozen is open when it wakes.
    """
    release.SESSION_SECONDS = 3
    if number == signal.SIGKILL:
        release.TRANSACTION_SECONDS = 3
    interrupt_producers(method, signal_self(number))
    with delays_released(url):
        signal.pause()


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("commit_transaction", signal.SIGKILL),
        ("commit_transaction", signal.SIGSTOP),
        pytest.param("send_offsets_to_transaction", signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_another_goes_on_for_a_releaser_that_is_killed_or_frozen(
    kafka_node: KafkaNode, unique: str, method: str, number: signal.Signals
) -> None:
    """A frozen one wakes when all partitions are the other's, while its own transaction is still open."""
    names = [f"{n:03}" for n in range(200)]
    send_delayed(kafka_node.url, unique, names, delay=0.1)
    process = forked.context().Process(target=interrupted_release, args=(kafka_node.url, method, number), daemon=True)
    process.start()

    def is_interrupted() -> bool:
        if number == signal.SIGKILL:
            return not process.is_alive()
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    admin = Cluster.of(kafka_node.url).admin()

    def owners() -> list[int]:
        group = admin.describe_consumer_groups([release.GROUP])[release.GROUP].result(PATIENCE_SECONDS)
        return [len(member.assignment.topic_partitions) for member in group.members]

    try:
        eventually(is_interrupted, "the releaser to be interrupted")
        with releasing(kafka_node.url):
            if number == signal.SIGSTOP:
                everything = sum(wheel.slots for wheel in WHEELS.wheels)
                eventually(lambda: owners() == [everything], "the other to get all partitions")
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)
            texts_of(kafka_node.url, unique, 200)
            send_delayed(kafka_node.url, unique, ["last"], delay=0.1)
            texts_of(kafka_node.url, unique, 201)
    finally:
        process.kill()
        process.join(PATIENCE_SECONDS)
    assert Counter(texts_of(kafka_node.url, unique, 201)) == Counter([*names, "last"])


class Hanging(Wrapped):
    """A consumer whose end never comes, as Kafka's client hangs now and then; its heartbeats continue."""

    def close(self) -> None:
        threading.Event().wait()


@pytest.mark.long
def test_a_releaser_that_is_fenced_and_whose_client_hangs_goes_on(
    kafka_node: KafkaNode, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread hung with the client: delayed messages stood still until another process came."""
    monkeypatch.setattr(releaser, "AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(release, "SESSION_SECONDS", 3)
    monkeypatch.setattr(release, "STEP_SECONDS", 3)  # the client that hangs holds its slots for so long
    monkeypatch.setattr(release, "leave", partial(leave, seconds=0.1))
    consumer, producer = Cluster.consumer, Cluster.producer
    members: list[Any] = []

    def hanging(self: Cluster, own: Mapping[str, Any]) -> Any:
        made = consumer(self, own)
        if own["group.id"] != release.GROUP or members:
            return made
        members.append(made)
        return Hanging(made)

    def fenced(self: Cluster, own: Mapping[str, Any]) -> Any:
        made = producer(self, own)
        if not str(own.get("transactional.id")).startswith("notify-delays-") or members:
            return made
        return Interrupted(made, "commit_transaction", lambda: producer(self, own).init_transactions(PATIENCE_SECONDS))

    monkeypatch.setattr(Cluster, "consumer", hanging)
    monkeypatch.setattr(Cluster, "producer", fenced)
    names = [f"{n:03}" for n in range(200)]
    send_delayed(kafka_node.url, unique, names, delay=0.1)
    with delays_released(kafka_node.url):
        assert sorted(texts_of(kafka_node.url, unique, 200)) == names
    assert members, "the first one hung"


def waiting_release(url: str) -> None:
    """In a process of its own, to be frozen: release."""
    release.SESSION_SECONDS = 3
    with delays_released(url):
        signal.pause()


@pytest.mark.long
def test_slots_that_waited_while_their_releaser_was_frozen_are_read(kafka_node: KafkaNode, unique: str) -> None:
    """They came back paused: the messages in them stood still until another releaser came."""
    admin = Cluster.of(kafka_node.url).admin()

    def members() -> int:
        group = admin.describe_consumer_groups([release.GROUP])[release.GROUP].result(PATIENCE_SECONDS)
        return len(group.members)

    process = forked.context().Process(target=waiting_release, args=(kafka_node.url,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        eventually(lambda: is_assigned(kafka_node.url, release.GROUP), "the releaser to have the slots")
        send_delayed(kafka_node.url, unique, [f"later {n}" for n in range(3)], delay=8)
        send_delayed(kafka_node.url, unique, ["soon"], delay=0.1)
        assert texts_of(kafka_node.url, unique, 1) == ["soon"]
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: not members(), "the releaser to have lost the slots")
        os.kill(process.pid, signal.SIGCONT)
        assert len(texts_of(kafka_node.url, unique, 4)) == 4
    finally:
        process.kill()
        process.join(PATIENCE_SECONDS)


@pytest.mark.long
def test_a_releaser_ends_while_its_broker_stands_still(
    kafka_node: KafkaNode, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "leave", partial(leave, seconds=0.5))
    send_delayed(kafka_node.url, unique, ["first"], delay=0.1)
    try:
        with releasing(kafka_node.url) as releaser:
            eventually(lambda: releaser.total.released, "the first message")
            kafka_node.cluster.signal_node(0, signal.SIGSTOP)
    finally:
        kafka_node.cluster.signal_node(0, signal.SIGCONT)
    send_delayed(kafka_node.url, unique, ["second"], delay=0.1)
    with releasing(kafka_node.url):
        assert texts_of(kafka_node.url, unique, 2) == ["first", "second"]


@pytest.mark.long
def test_several_releasers_share_the_slots_while_others_come_and_go(kafka_node: KafkaNode, unique: str) -> None:
    names = [f"{part} {n:03}" for part in range(4) for n in range(250)]
    with releasing(kafka_node.url) as first:
        send_delayed(kafka_node.url, unique, names[:250], delay=0.2)
        send_delayed(kafka_node.url, unique, names[250:500], delay=2)
        with releasing(kafka_node.url) as second, releasing(kafka_node.url) as third:
            send_delayed(kafka_node.url, unique, names[500:750], delay=3)
            texts_of(kafka_node.url, unique, 500)
        send_delayed(kafka_node.url, unique, names[750:], delay=0.1)
        texts_of(kafka_node.url, unique, 1000)
    assert Counter(texts_of(kafka_node.url, unique, 1000)) == Counter(names)
    assert first.total.released + second.total.released + third.total.released == 1000


@pytest.mark.long
def test_slots_that_wait_go_to_another_releaser_and_come_back(kafka_node: KafkaNode, unique: str) -> None:
    """A partition that is paused when it leaves a releaser is read again when it comes back."""
    clock, cluster = Clock(), Cluster.of(kafka_node.url)
    wheels = wheels_of(SHAPE, unique, LATE_US)
    sender = Sender(cluster, wheels, clock, unique)
    for seconds in range(1, 11):
        assert sender.send(f"{seconds}", clock.now_us + seconds * SECOND_US) == f"{unique}.seconds"
    with releasing(kafka_node.url, wheels, clock) as first:
        sender.send("now", clock.now_us + 1)
        clock.now_us += 1
        eventually(lambda: first.total.released == 1, "it to read the slots")
        with releasing(kafka_node.url, wheels, clock):
            eventually(lambda: is_assigned(kafka_node.url, release.GROUP, 2), "both to have slots")
        eventually(lambda: is_assigned(kafka_node.url, release.GROUP, 1), "the first to have all of them again")
        clock.now_us += 11 * SECOND_US
        eventually(lambda: first.total.released == 11, "all to be released")


@pytest.mark.long
def test_a_wheel_that_is_made_anew_is_read_from_its_first_record(
    kafka_node: KafkaNode, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many records as before, the releaser continued at its old offsets: what lay before them never came."""
    monkeypatch.setattr(release, "TOPIC_LOOK_SECONDS", 0.1)
    clock, cluster = Clock(), Cluster.of(kafka_node.url)
    wheels = wheels_of(SHAPE, unique, LATE_US)
    old, new = [f"old {n}" for n in range(5)], [f"new {n}" for n in range(7)]
    releaser = Releaser(cluster, wheels, clock)
    noticed: list[str] = []

    def run() -> None:
        while not releaser.wait(0.1):  # as in a bridge, which waits longer
            try:
                releaser.run()
            except Unavailable as error:
                noticed.append(str(error))

    due_us = clock.now_us + SECOND_US
    sender = Sender(cluster, wheels, clock, unique)
    wheel = {sender.send(text, due_us) for text in old}.pop()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        clock.now_us += 2 * SECOND_US
        eventually(lambda: releaser.total.released == 5, "the first messages")
        admin = cluster.admin()
        admin.delete_topics([wheel])[wheel].result(PATIENCE_SECONDS)
        eventually(lambda: wheel not in admin.list_topics().topics, "the topic to go")
        turn_us = SHAPE[0][1] * SHAPE[0][2]
        clock.now_us += turn_us - 2 * SECOND_US
        sender = Sender(cluster, wheels, clock, unique)  # makes the topic; the slot is the same in each turn
        # Records that it moved before it noticed would count as read, and those before them would not come.
        eventually(lambda: any("deleted and recreated" in text for text in noticed), "the releaser to notice it")
        for text in new:
            sender.send(text, due_us + turn_us)
        clock.now_us += 2 * SECOND_US
        assert Counter(texts_of(kafka_node.url, unique, 12)) == Counter([*old, *new])
    finally:
        releaser.stop()
        thread.join(PATIENCE_SECONDS)


# --- in time ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_message_moves_from_days_to_seconds_and_comes_when_it_is_due(kafka_node: KafkaNode, unique: str) -> None:
    clock, cluster = Clock(), Cluster.of(kafka_node.url)
    wheels = wheels_of(SHAPE, unique, LATE_US)
    sender = Sender(cluster, wheels, clock, unique)
    due_us = clock.now_us + 1500 * SECOND_US
    assert sender.send("far", due_us) == f"{unique}.days"
    with releasing(kafka_node.url, wheels, clock) as releaser:
        for number, wheel in enumerate(reversed(wheels.wheels[1:])):
            clock.now_us = wheels.moves_us(wheel.topic, due_us) - 1
            assert sender.send(f"before {number}", clock.now_us + 1) == f"{unique}.seconds"
            clock.now_us += 1
            eventually(lambda number=number: releaser.total.moved == number + 1, f"it to leave {wheel.topic}")  # type: ignore[misc]
            eventually(lambda number=number: releaser.total.released == number + 1, "the message before")  # type: ignore[misc]
        clock.now_us = due_us - SECOND_US
        sender.send("just before", clock.now_us + 1)
        clock.now_us = due_us - 1
        eventually(lambda: releaser.total.released == 4, "the one a second before")
        clock.now_us = due_us
        eventually(lambda: releaser.total.released == 5, "both to be released")
    records = committed(kafka_node.url, unique, 5)
    assert [r.value().decode() for r in records] == ["before 0", "before 1", "before 2", "just before", "far"]
    assert [(r.key(), r.headers()) for r in records] == [(b"k", [("h", b"v")])] * 5


@pytest.mark.long
def test_a_delayed_message_committed_late_is_released_immediately(kafka_node: KafkaNode, unique: str) -> None:
    """Its slot has been read by then, and its time is over."""
    clock, cluster = Clock(), Cluster.of(kafka_node.url)
    wheels = wheels_of(SHAPE, unique, LATE_US)
    slow, quick = (Sender(cluster, wheels, clock, unique + name) for name in ("", ".quick"))
    slow.begin("late", clock.now_us + SECOND_US)
    with releasing(kafka_node.url, wheels, clock) as releaser:
        clock.now_us += LATE_US
        quick.send("quick", clock.now_us + 1)
        clock.now_us += 1
        eventually(lambda: releaser.total.released == 1, "the quick one")
        quick.send("of the slot's next turn", clock.now_us - LATE_US + 13 * SECOND_US)
        slow.commit()
        eventually(lambda: releaser.total.released == 2, "the late one")
    assert texts_of(kafka_node.url, unique, 1) == ["late"]


@pytest.mark.long
def test_a_record_frozen_before_its_slot_is_placed_again(
    kafka_node: KafkaNode, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came behind records of its slot's next turn, and waited for that: more than an hour in a slot of minutes."""
    clock = Clock()
    clock.now_us = wall_clock()  # on the node of other tests, whose slots are read by this one's time
    frozen_us, next_us = (clock.now_us + seconds * SECOND_US for seconds in (5, 5 + 128))
    monkeypatch.setattr("notify.movers.sinks.kafka.wall_clock", clock)

    def freeze() -> None:
        clock.now_us += 100 * SECOND_US
        end()
        send_at(kafka_node.url, unique, "next turn", next_us)

    end = interrupt_producers("begin_transaction", freeze, after=1)  # the first one claims the source
    with pytest.raises(Unavailable, match="too long on the way to their slots"):
        send_at(kafka_node.url, unique, "frozen", frozen_us)
    send_at(kafka_node.url, unique, "frozen", frozen_us)
    with releasing(kafka_node.url, WHEELS, clock):
        assert texts_of(kafka_node.url, unique, 1) == ["frozen"]
        clock.now_us += 60 * SECOND_US
        assert sorted(texts_of(kafka_node.url, unique, 2)) == ["frozen", "next turn"]


# --- bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_full_slot_is_streamed_in_batches(
    kafka_node: KafkaNode, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has a bound by count and by bytes; a slot's messages are deleted when they have moved on."""
    batches: list[tuple[int, int]] = []
    move = release.Release._move

    def noted(self: release.Release) -> bool:
        batches.append((len(self._batch), sum(each.delayed.size for each in self._batch)))
        return move(self)

    monkeypatch.setattr(release.Release, "_move", noted)
    monkeypatch.setattr(release, "CLEAN_SECONDS", 0.0)
    monkeypatch.setattr(release, "BATCH_RECORDS", 200)
    monkeypatch.setattr(release, "BATCH_BYTES", 200_000)
    reader = Cluster.of(kafka_node.url).consumer({"group.id": unique})
    wheel = WHEELS.wheels[0]

    def kept() -> int:
        slots = [TopicPartition(wheel.topic, n) for n in range(wheel.slots)]
        return sum(high - low for low, high in (reader.get_watermark_offsets(slot, timeout=10) for slot in slots))

    make_wheels(Cluster.of(kafka_node.url), WHEELS)
    before = kept()
    send_delayed(kafka_node.url, unique, [f"{n:04}" + "x" * 2000 for n in range(1000)], delay=0.2)
    send_delayed(kafka_node.url, unique, [f"{n:04}" for n in range(1000, 1600)], delay=0.2)
    with releasing(kafka_node.url) as releaser:
        eventually(lambda: releaser.total.released == 1600, "the release of all")
        eventually(lambda: kept() < before + 100, "what has moved on to be deleted")
    reader.close()
    texts_of(kafka_node.url, unique, 1600)
    assert max(count for count, _ in batches) <= release.BATCH_RECORDS
    assert max(size for _, size in batches) <= release.BATCH_BYTES + 3000


@pytest.mark.long
def test_a_message_refused_by_its_topic_delays_no_other(kafka_node: KafkaNode, unique: str) -> None:
    """The topic's bound was lowered after the message had been sent."""
    large = os.urandom(2000).hex()
    send_delayed(kafka_node.url, unique, [*"abcd", large, *"efgh"], delay=0.1)
    admin = Cluster.of(kafka_node.url).admin()
    lowered = ConfigResource(
        ConfigResource.Type.TOPIC,
        unique,
        incremental_configs=[ConfigEntry("max.message.bytes", "1000", incremental_operation=AlterConfigOpType.SET)],
    )
    admin.incremental_alter_configs([lowered])[lowered].result(PATIENCE_SECONDS)
    with releasing(kafka_node.url) as releaser:
        assert sorted(texts_of(kafka_node.url, unique, 8)) == list("abcdefgh")
        eventually(lambda: releaser.total.refused == 1, "the large one to be put aside")
    refused = {r.headers()[-2][1]: r for r in committed(kafka_node.url, REFUSED, 1)}  # others' tests may add theirs
    record = refused[unique.encode()]
    headers = dict(record.headers())
    assert record.value().decode() == large and headers["notify-topic"] == unique.encode()
    assert b"too large" in headers["notify-reason"].lower()


@pytest.mark.long
def test_an_invalid_delayed_record_delays_no_other(kafka_node: KafkaNode, unique: str) -> None:
    """Somebody else's record in a wheel is left out, and logged."""
    clock, cluster = Clock(), Cluster.of(kafka_node.url)
    wheels = wheels_of(SHAPE, unique, LATE_US)
    sender = Sender(cluster, wheels, clock, unique)
    place = wheels.place(clock.now_us + 1, clock.now_us)
    assert place is not None
    other = cluster.producer({})
    for headers in ([], [("notify-due", b"soon"), ("notify-topic", unique.encode())]):
        other.produce(place.topic, b"x", partition=place.partition, headers=headers)
    other.flush(PATIENCE_SECONDS)
    sender.send("good", clock.now_us + 1)
    clock.now_us += 1
    with releasing(kafka_node.url, wheels, clock):
        assert texts_of(kafka_node.url, unique, 1) == ["good"]
