"""The SDK's consumer over topics that are cut, recreated, extended, too small or gone: nothing is passed by."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer, DeadLetter
from notify.client.handling.hand import Hand
from notify.client.kafka import loop
from notify.client.threads.handler_threads import HandlerThreads
from notify.errors import InvalidRequest
from notify.kafka.cluster import Cluster
from notify.kafka.subscriptions import SUBSCRIPTIONS, Place
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.compacted import CompactedTopics
from notify.testing import forked
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.kafka import Wrapped, commit_offsets, committed
from tests.support.kafka_consumers import CALL_SECONDS, admin_of, make_topic, produce, produce_in_transaction
from tools.kafka_cluster import KafkaCluster

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic  # type: ignore[attr-defined]

from notify.client.kafka import control as client_control
from notify.client.kafka import settling, starting
from notify.client.kafka.feed import Feed
from notify.client.kafka.loop import KafkaLoop
from notify.client.kafka.membership import Membership
from notify.client.kafka.ownership import Ownership
from notify.client.kafka.partitions import Partitions
from notify.client.kafka.plan import Plan
from notify.client.kafka.topics import Topics
from notify.kafka import control
from notify.kafka.control import Control
from notify.kafka.groups import dead_letter_topic, retry_topic
from notify.kafka.progress import Progress
from tests.support.kafka_consumers import (
    is_assigned,
    onlooker,
    progress,
)

pytestmark = pytest.mark.filterwarnings("error")


def consumer_of(url: str, name: str, seen: list[str], **options: Any) -> Consumer:
    """A consumer of the topic and group of this name, that notes each text."""
    consumer = Consumer(url, group=name)
    consumer.subscribe(name, **options)(lambda message: seen.append(message.text))
    return consumer


def make_with(url: str, topic: str, partitions: int, **config: str) -> None:
    """Make a topic with settings, whose names have dots for underscores."""
    settings = {name.replace("_", "."): value for name, value in config.items()}
    made = admin_of(url).create_topics([NewTopic(topic, partitions, -1, config=settings)])[topic]
    made.result(CALL_SECONDS)


@pytest.mark.long
def test_the_first_messages_of_a_new_partition_are_handled(kafka_url: str, unique: str) -> None:
    """A group that began with the latest message skipped those that came before it had the partition."""
    make_topic(kafka_url, unique)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):
        eventually(lambda: is_assigned(kafka_url, unique), "the partition")
        admin_of(kafka_url).create_partitions([NewPartitions(unique, 2)])[unique].result(CALL_SECONDS)
        eventually(lambda: len(admin_of(kafka_url).list_topics().topics[unique].partitions) == 2, "a new partition")
        produce(kafka_url, unique, ["a", "b"], partition=1)
        eventually(lambda: seen == ["a", "b"], "both messages")


@pytest.mark.long
def test_a_group_beyond_the_end_begins_anew(kafka_url: str, unique: str) -> None:
    """As after an unclean election: the group was where nothing is any more, and passed what came until it was."""
    make_topic(kafka_url, unique)
    commit_offsets(onlooker(kafka_url, unique), TopicPartition(unique, 0, 100))
    produce(kafka_url, unique, ["a", "b"])
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):
        produce(kafka_url, unique, ["c"])
        eventually(lambda: seen == ["a", "b", "c"], "every message")


@pytest.mark.long
def test_a_letter_that_no_topic_takes_loses_its_body_and_holds_up_nobody(kafka_url: str, unique: str) -> None:
    """Every commit of the consumer failed, for good."""
    make_topic(kafka_url, unique)
    make_with(kafka_url, dead_letter_topic(unique), 1, max_message_bytes="2000")
    consumer = Consumer(kafka_url, group=unique)
    seen = []

    @consumer.subscribe(unique, start="earliest")
    def handle(message: Any) -> None:
        seen.append(message.text[:5])
        if message.text.startswith("large"):
            raise DeadLetter("no use")

    with running(consumer):
        produce(kafka_url, unique, ["large" + "x" * 5000, "small"])
        eventually(lambda: progress(kafka_url, unique).get((unique, 0)) is not None, "the group's position")
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 2, "both messages to be done")
    (letter,) = committed(kafka_url, dead_letter_topic(unique), 1)
    assert letter.value() is None
    headers = dict(letter.headers())
    assert headers["notify-topic"] == unique.encode()
    assert f"{unique}/0@0".encode() in headers["notify-reason"]


def test_a_retry_topic_with_too_few_partitions_is_refused(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    make_with(kafka_url, retry_topic(unique), 3)
    with pytest.raises(InvalidRequest, match=f"--alter --topic {retry_topic(unique)} --partitions 16"):
        consumer_of(kafka_url, unique, []).run()


def test_a_topic_that_keeps_retries_for_too_short_a_time_is_told(
    kafka_url: str, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_topic(kafka_url, unique)
    make_with(kafka_url, retry_topic(unique), 16, retention_ms="60000", cleanup_policy="delete")
    make_with(kafka_url, dead_letter_topic(unique), 1, retention_ms="-1")
    with running(consumer_of(kafka_url, unique, [])):
        eventually(lambda: is_assigned(kafka_url, unique), "the partition")
    assert f"topic {retry_topic(unique)} has retention.ms=60000" in caplog.text
    assert caplog.text.count("still needs") == 1


@pytest.mark.long
def test_a_topic_of_dead_letters_that_was_deleted_is_made_again(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    consumer = Consumer(kafka_url, group=unique)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: Any) -> None:
        raise DeadLetter("no use")

    letters = dead_letter_topic(unique)
    with running(consumer):
        eventually(lambda: is_assigned(kafka_url, unique), "the partition")
        admin_of(kafka_url).delete_topics([letters])[letters].result(CALL_SECONDS)
        eventually(lambda: letters not in admin_of(kafka_url).list_topics().topics, "the topic to go")
        produce(kafka_url, unique, ["a"])
        eventually(lambda: len(committed(kafka_url, letters, 1)) == 1, "the dead letter")


@pytest.mark.long
def test_many_messages_leave_in_several_transactions(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "MOST_LEAVING", 10)
    make_topic(kafka_url, unique)
    consumer = Consumer(kafka_url, group=unique, concurrency=8)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: Any) -> None:
        raise DeadLetter("no use")

    texts = [f"{n}" for n in range(95)]
    produce(kafka_url, unique, texts)
    with running(consumer):
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the group's position")
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 95, "everything to be done")
    letters = committed(kafka_url, dead_letter_topic(unique), 95)
    assert Counter(letter.value().decode() for letter in letters) == Counter(texts)


@pytest.mark.long
def test_a_commit_whose_answer_is_late_writes_nothing_twice(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client says that it does not know the outcome yet; the next transaction wrote the dead letter once more."""
    late: list[KafkaError] = []

    class Late(Wrapped):
        """A producer whose commits do not wait for the answer, until one of them is late."""

        def commit_transaction(self, seconds: float) -> None:
            if late:
                self._client.commit_transaction(seconds)
                return
            self._client.flush(seconds)
            try:
                self._client.commit_transaction(0.0001)
            except KafkaException as raised:
                late.append(raised.args[0])
                raise

    made = Cluster.producer
    monkeypatch.setattr(
        Cluster, "producer", lambda self, own: Late(made(self, own)) if "transactional.id" in own else made(self, own)
    )
    make_topic(kafka_url, unique)
    consumer = Consumer(kafka_url, group=unique)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: Any) -> None:
        raise DeadLetter("no use")

    sent: list[str] = []

    def answer_is_late() -> bool:
        """Send another message, and wait until it is done. A commit may be answered in time nevertheless."""
        sent.append(f"{len(sent)}")
        produce(kafka_url, unique, sent[-1:])
        eventually(lambda: done_at(kafka_url, unique, (unique, 0), len(sent)), "everything to be done")
        return bool(late)

    with running(consumer):
        eventually(answer_is_late, "a commit whose answer is late")
    assert late[0].retriable()
    letters = committed(kafka_url, dead_letter_topic(unique), len(sent))
    assert Counter(letter.value().decode() for letter in letters) == Counter(sent)


@pytest.mark.long
def test_a_commit_that_fails_after_the_group_was_claimed_anew_leaves_the_new_claim(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker stood still: the owner lost the group and has it again, and only then its old transaction is refused."""
    caplog.set_level("INFO", "notify.consumer")
    made: list[Any] = []
    is_slow, is_lost, goes_on = threading.Event(), threading.Event(), threading.Event()

    class Slow(Wrapped):
        """A producer; the first one's commit waits."""

        def __init__(self, producer: Any) -> None:
            super().__init__(producer)
            made.append(self)

        def commit_transaction(self, seconds: float) -> None:
            if self is made[0] and is_slow.is_set():
                is_lost.set()
                assert goes_on.wait(PATIENCE_SECONDS)
            self._client.commit_transaction(seconds)

    producer, poll = Cluster.producer, Ownership._poll
    monkeypatch.setattr(
        Cluster, "producer",
        lambda self, own: Slow(producer(self, own)) if "transactional.id" in own else producer(self, own),
    )  # fmt: skip
    monkeypatch.setattr(Ownership, "_poll", lambda self: poll(self) and not is_lost.is_set())
    make_topic(kafka_url, unique)
    consumer = Consumer(kafka_url, group=unique)
    seen: list[str] = []

    @consumer.subscribe(unique, mode="failover", start="earliest")
    def handle(message: Any) -> None:
        seen.append(message.text)

    with running(consumer):
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the group's beginning")
        is_slow.set()
        produce(kafka_url, unique, ["a"])
        assert is_lost.wait(PATIENCE_SECONDS)
        eventually(lambda: "no longer owns" in caplog.text, "the owner to give up")
        is_lost.clear()
        eventually(lambda: caplog.text.count("this instance owns") == 2, "the group to be claimed again")
        goes_on.set()
        produce(kafka_url, unique, ["b"])
        eventually(lambda: progress(kafka_url, unique)[unique, 0].offset == 2, "everything to be done")
    assert len(made) == 2
    assert seen == ["a", "a", "b"]


def done_at(url: str, group: str, place: tuple[str, int], offset: int) -> bool:
    """Whether a group has committed so much of a partition."""
    known = progress(url, group).get(place)
    return known is not None and known.offset >= offset


@pytest.mark.long
@pytest.mark.parametrize("mode", ["shared", pytest.param("exclusive", marks=pytest.mark.long)])
def test_a_partition_without_a_leader_keeps_nobody_from_beginning(
    kafka_url: str, unique: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group did not start, nor take a message of the others."""
    leaderless = {(unique, 1)}

    class Lacking(Wrapped):
        """A client for administration as it answers where a partition has no leader."""

        def list_topics(self, **options: Any) -> Any:
            metadata = self._client.list_topics(**options)
            for topic, n in list(leaderless):
                metadata.topics[topic].partitions[n].leader = -1
            return metadata

        def list_offsets(self, asked: dict[TopicPartition, Any], **options: Any) -> Any:
            led = {p: spec for p, spec in asked.items() if (p.topic, p.partition) not in leaderless}
            answers = self._client.list_offsets(led, **options) if led else {}
            for p in asked.keys() - led.keys():
                answers[p] = Future()
                answers[p].set_exception(KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE)))
            return answers

    make_topic(kafka_url, unique, 2)
    produce(kafka_url, unique, ["old"], partition=1)
    made = Cluster.admin
    monkeypatch.setattr(Cluster, "admin", lambda self, *own: Lacking(made(self, *own)))
    monkeypatch.setattr(starting, "LEADER_SECONDS", 0.5)
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen, mode=mode)):
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the group to begin")
        produce(kafka_url, unique, ["a"], partition=0)
        eventually(lambda: seen == ["a"], "the message of the other partition")
        produce(kafka_url, unique, ["b"], partition=1)
        leaderless.clear()
        eventually(lambda: seen == ["a", "b"], "the message that came first, once there is a leader")
        eventually(lambda: done_at(kafka_url, unique, (unique, 1), 2), "its commit")
    assert seen == ["a", "b"]


@pytest.mark.long
def test_an_owner_keeps_what_it_did_in_other_topics_when_one_is_deleted(kafka_url: str, unique: str) -> None:
    """All of its commits were refused for as long as the topic was missing."""
    here, gone = f"{unique}.here", f"{unique}.gone"
    make_topic(kafka_url, here)
    make_topic(kafka_url, gone)
    consumer = Consumer(kafka_url, group=unique)

    @consumer.subscribe(f"{unique}.*", mode="exclusive", start="earliest")
    def handle(message: Any) -> None:
        if message.topic == gone:  # done, and not committed yet
            admin = admin_of(kafka_url)
            admin.delete_topics([gone])[gone].result(CALL_SECONDS)
            eventually(lambda: gone not in admin.list_topics().topics, "the topic to go")

    with running(consumer):
        produce(kafka_url, gone, ["a"])
        eventually(lambda: gone not in admin_of(kafka_url).list_topics().topics, "the topic to go")
        produce(kafka_url, here, ["b"])
        eventually(lambda: done_at(kafka_url, unique, (here, 0), 1), "the commit of the other topic")


class Forgetful:
    """A consumer's client that is told of fewer topics now and then, as by a broker that has just started."""

    def __init__(self, client: Any, topic: str, times: int) -> None:
        self._client = client
        self._topic = topic
        self.times = times
        self.listed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def list_topics(self, *names: str, **options: Any) -> Any:
        metadata = self._client.list_topics(*names, **options)
        if not names:
            self.listed += 1
        if not names and self.times:
            self.times -= 1
            del metadata.topics[self._topic]
        return metadata


@pytest.mark.long
def test_a_topic_that_is_missing_once_is_not_given_up(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The group left the topic, came back to it, and had it made again."""
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    clients: list[Forgetful] = []
    subscribed: list[list[str]] = []
    made, subscribe = Topics.__init__, Membership._subscribe

    def forgetful(self: Topics, plan: Any, client: Any, cluster: Any) -> None:
        clients.append(Forgetful(client, unique, 0))
        made(self, plan, clients[0], cluster)

    def noted(self: Membership, topics: list[str]) -> None:
        subscribed.append(topics)
        subscribe(self, topics)

    monkeypatch.setattr(Topics, "__init__", forgetful)
    monkeypatch.setattr(Membership, "_subscribe", noted)
    make_topic(kafka_url, unique)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):
        eventually(lambda: is_assigned(kafka_url, unique), "the partition")
        clients[0].times, listed = 1, clients[0].listed
        eventually(lambda: clients[0].listed > listed + 2, "some looks at the topics")
        produce(kafka_url, unique, ["a"])
        eventually(lambda: seen == ["a"], "the message")
    assert len(subscribed) == 1
    assert "are gone" not in caplog.text


@pytest.mark.long
def test_a_topic_that_is_missing_at_the_first_look_begins_where_it_is_to(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one that was made later, whose messages are all new."""
    made = Topics.__init__
    monkeypatch.setattr(
        Topics, "__init__", lambda self, plan, client, cluster: made(self, plan, Forgetful(client, unique, 1), cluster)
    )
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["old"])
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen, start="latest")):
        eventually(lambda: (unique, 0) in progress(kafka_url, unique), "the group's position")
        produce(kafka_url, unique, ["new"])
        eventually(lambda: "new" in seen, "the new message")
    assert seen == ["new"]


@pytest.mark.long
def test_an_order_in_a_control_topic_that_was_made_anew_is_heard(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer kept reading at the offset where the former topic had ended."""
    orders = f"notify-control.{unique}"
    monkeypatch.setattr(control, "TOPIC", orders)
    monkeypatch.setattr(client_control, "TOPIC", orders)
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    make_topic(kafka_url, unique)
    make_topic(kafka_url, orders)
    resumed, paused = Control().encoded().decode(), Control(paused=True).encoded().decode()
    produce(kafka_url, orders, [resumed], key=unique.encode())
    held: list[bool] = []
    obey = KafkaLoop._obey

    def noted(self: KafkaLoop) -> None:
        obey(self)
        held.append(self._handling.is_held)

    monkeypatch.setattr(KafkaLoop, "_obey", noted)
    with running(consumer_of(kafka_url, unique, [])):
        eventually(lambda: is_assigned(kafka_url, unique), "the partition")
        admin = admin_of(kafka_url)
        admin.delete_topics([orders])[orders].result(CALL_SECONDS)
        eventually(lambda: orders not in admin.list_topics().topics, "the topic to go")
        eventually(lambda: orders in admin.list_topics().topics, "the topic to be made again")
        produce(kafka_url, orders, [paused], key=unique.encode())
        eventually(lambda: held[-1], "the group to be paused")


@pytest.mark.long
@pytest.mark.parametrize("left", [0, 5])
def test_records_deleted_before_a_group_handled_them_are_logged(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    """As by retention. A group continued behind it without a word, at its start and later, and if none are left."""
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    monkeypatch.setattr(loop, "WINDOW_RECORDS", 1)
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"a{n}" for n in range(10)])
    commit_offsets(onlooker(kafka_url, unique), TopicPartition(unique, 0, 2))
    delete_before(kafka_url, unique, 5)
    seen: list[str] = []
    go_on = threading.Event()

    def handle(message: Any) -> None:
        seen.append(message.text)
        go_on.wait(PATIENCE_SECONDS)

    consumer = Consumer(kafka_url, group=unique, batch=1, concurrency=1)
    consumer.subscribe(unique)(handle)
    try:
        with running(consumer):
            eventually(lambda: seen == ["a5"], "the first message that is left")
            assert f"up to 3 messages of topic {unique}" in caplog.text
            # More than the client fetches ahead while nothing is wanted of it.
            produce(kafka_url, unique, [f"b{n}" + "x" * 300_000 for n in range(80)])
            delete_before(kafka_url, unique, 90 - left)
            go_on.set()
            eventually(lambda: caplog.text.count("were deleted before") > 1, "the second error")
    finally:
        go_on.set()


def delete_before(url: str, topic: str, offset: int) -> None:
    for deleted in admin_of(url).delete_records([TopicPartition(topic, 0, offset)]).values():
        deleted.result(CALL_SECONDS)


def test_a_look_at_topics_within_a_callback_leaves_the_next_callback_alive(kafka_url: str, unique: str) -> None:
    """Asked by the client that calls back, the list took the client's state from the next callback of the same poll,
    which aborted the process."""
    make_topic(kafka_url, unique)
    process = forked.context().Process(target=_look_within_a_callback, args=(kafka_url, unique), daemon=True)
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0


def _look_within_a_callback(url: str, topic: str) -> None:
    """A process in whose polls many callbacks follow the one that has to leave out partitions that are gone."""
    statistics: list[str] = []
    client = Cluster.consumer

    def talkative(cluster: Cluster, own: Any) -> Any:
        return client(cluster, {**own, "statistics.interval.ms": 1, "stats_cb": statistics.append})

    Cluster.consumer = talkative  # type: ignore[method-assign]

    async def run() -> None:
        cluster, partitions, threads = Cluster.of(url), Partitions(1000), HandlerThreads(1, "test")
        consumer = consumer_of(url, topic, [])
        hand = Hand(lambda: None, consumer._count, 4, 32)
        plan = Plan(
            url, topic, "i", consumer._handlers, hand, consumer._cancel, lambda: False, 4, 32, 30.0, 30.0
        )  # fmt: skip
        feed = Feed(cluster, topic, "i", partitions)
        settled = settling.Settling(plan, cluster, feed, partitions, threads)
        window = partitions.open((f"{topic}.gone", 0), Progress(0, left=True), in_order=False)
        found: list[bool] = []

        def assigned(client: Any, given: list[Any]) -> None:
            found.append(feed.thread.wait_for(settled._leave_out({(f"{topic}.gone", 0): window})))
            client.incremental_assign(given)
            statistics.clear()

        await feed.call(lambda: feed.consumer.subscribe([topic], on_assign=assigned))
        while not (found and statistics):
            await feed.poll(10, 1.0)
        assert found == [True]
        await feed.close()
        threads.shutdown()

    asyncio.run(run())


# --- deleted and recreated, with fewer records or with as many ----------------------------------------------------


NEW = ["a", "b", "c", "d", "e", "f", "g"]


def make_anew(url: str, topic: str, texts: list[str]) -> None:
    admin = admin_of(url)
    admin.delete_topics([topic])[topic].result(CALL_SECONDS)
    eventually(lambda: topic not in admin.list_topics().topics, "the topic to go")
    make_topic(url, topic)
    produce(url, topic, texts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("shared", 3),
        pytest.param("shared", 5, marks=pytest.mark.long),
        pytest.param("exclusive", 7, marks=pytest.mark.long),
    ],
)
def test_a_consumer_reads_it_from_its_first_record(
    kafka_url: str, unique: str, monkeypatch: pytest.MonkeyPatch, mode: str, count: int
) -> None:
    """Where there were as many records as before, it continued at its old offset, and passed what lay before."""
    monkeypatch.setattr(loop, "TOPICS_SECONDS", 0.2)
    make_topic(kafka_url, unique)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen, mode=mode, start="earliest")):
        produce(kafka_url, unique, [f"old {n}" for n in range(5)])
        eventually(lambda: len(seen) == 5, "the first messages")
        make_anew(kafka_url, unique, NEW[:count])
        # It may have begun at the old offset, before it saw that.
        eventually(lambda: set(seen[5:]) == set(NEW[:count]), "the new messages")


@pytest.mark.long
def test_a_consumer_that_was_away_reads_it_from_its_first_record(kafka_url: str, unique: str) -> None:
    """Its note of where it was in the former topic counted, as for a group whose offsets Kafka has forgotten."""
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, [f"old {n}" for n in range(5)])
    with running(consumer_of(kafka_url, unique, [])):  # from the latest on
        noted = (unique, Place(unique, 0))
        eventually(lambda: noted in SUBSCRIPTIONS.rows(Cluster.of(kafka_url)), "the note")
    make_anew(kafka_url, unique, NEW)
    seen: list[str] = []
    with running(consumer_of(kafka_url, unique, seen)):
        eventually(lambda: seen, "a message")
        eventually(lambda: seen == NEW, "all of them")
    assert SUBSCRIPTIONS.rows(Cluster.of(kafka_url))[noted].start == 0, "an audit expects them, too"


def test_a_server_reads_one_of_its_own_from_its_first_record(kafka_url: str, unique: str) -> None:
    make_topic(kafka_url, unique)
    produce(kafka_url, unique, ["old 1", "old 2"])
    forgotten: list[str] = []
    topics = CompactedTopics(Brokers(Cluster.of(kafka_url)), forgotten.append)

    def news() -> list[bytes | None]:
        return [record.value for record in topics.news([unique])]

    assert news() == [b"old 1", b"old 2"]
    make_anew(kafka_url, unique, ["a", "b"])
    taken: list[bytes | None] = []
    eventually(lambda: taken.extend(news()) or len(taken) == 2, "the new records")
    topics.close()
    assert (taken, forgotten) == ([b"a", b"b"], [unique])


# --- cut, as by an unclean election, and written again ------------------------------------------------------------


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[KafkaCluster]:
    """A node that a test may stop."""
    cluster = KafkaCluster(tmp_path)
    try:
        cluster.start(5 * PATIENCE_SECONDS)
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.long
def test_a_consumer_that_was_away_notices_that_records_were_replaced(
    own_node: KafkaCluster, tmp_path: Path, unique: str
) -> None:
    """The topic was longer than before when the consumer returned: it passed what lay before its offset."""
    url, records, shorter = own_node.url, own_node.data_directory(0) / f"{unique}-0", tmp_path / "shorter"
    make_topic(url, unique)
    produce(url, unique, [f"old {n}" for n in range(5)])
    with stopped(own_node):
        shutil.copytree(records, shorter)
    eventually(lambda: is_written(url, unique, [f"lost {n}" for n in range(5)]), "records with a marker behind them")
    seen: list[str] = []
    with running(consumer_of(url, unique, seen, start="earliest")):
        eventually(lambda: is_committed(url, unique, 11), "everything to be done")
    with stopped(own_node):
        shutil.rmtree(records)
        shutil.copytree(shorter, records)
    new = [f"new {n}" for n in range(10)]
    produce(url, unique, new)
    seen.clear()
    with running(consumer_of(url, unique, seen)):
        eventually(lambda: set(seen) >= set(new), "the new messages")


def is_committed(url: str, group: str, offset: int) -> bool:
    """Whether a group has committed this offset; False while a node that has just started loads what it knows."""
    try:
        (committed_at,) = onlooker(url, group).committed([TopicPartition(group, 0)], timeout=CALL_SECONDS)
    except KafkaException:
        return False
    return committed_at.offset == offset


def is_written(url: str, topic: str, texts: list[str]) -> bool:
    """Write in a transaction; False while a node that has just started loads what it knows of transactions."""
    try:
        produce_in_transaction(url, topic, texts)
    except KafkaException as raised:
        if raised.args[0].code() != KafkaError.COORDINATOR_LOAD_IN_PROGRESS:
            raise
        return False
    return True


@contextmanager
def stopped(cluster: KafkaCluster) -> Iterator[None]:
    """Stop a node in an orderly way, so that all it has is in its files, and start it again."""
    cluster.signal_node(0, signal.SIGTERM)
    eventually(lambda: not cluster.is_running(0), "the node to stop")
    yield
    cluster.start_node(0)
    cluster.wait_for_node(0)
