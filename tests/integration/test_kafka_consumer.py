"""The SDK's consumer over a real Kafka: what is done stays done, what failed comes again in its time and order."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from notify.client import Consumer, DeadLetter
from notify.errors import Unavailable
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.kafka import commit_offsets, committed

pytest.importorskip("confluent_kafka")

from confluent_kafka import TopicPartition

from notify.client.kafka.feed import Feed
from notify.kafka import control
from notify.kafka.groups import dead_letter_topic, retry_topic
from notify.kafka.progress import Progress
from notify.protocol.message import DEAD_LETTER_REASON
from notify.server.groups.kafka import snapshot
from tests.support.kafka_consumers import (
    admin_of,
    asker_of,
    is_assigned,
    lag,
    make_topic,
    onlooker,
    produce,
    produce_in_transaction,
    progress,
    worker,
)

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def kafka(kafka_url: str) -> str:
    return kafka_url


class Seen:
    """The messages that handlers were called with, in their order."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def texts(self) -> list[str]:
        return [message.text for message in self.messages]


def at(url: str, group: str) -> Progress:
    """Where a group is in the first partition of the topic of its name; 0 while it has no offset."""
    return progress(url, group).get((group, 0), Progress(0))


def done(url: str, group: str, topic: str, count: int) -> bool:
    """Whether a group has committed so many records of a topic as done, with none open before them."""
    return sum(p.offset for (name, _), p in progress(url, group).items() if name == topic) == count


# --- what is done stays done ----------------------------------------------------------------------------------


def test_killed_on_its_first_message_a_consumer_loses_nothing(kafka: str, unique: str, tmp_path: Path) -> None:
    make_topic(kafka, unique)
    produce(kafka, unique, ["before"])
    with worker(kafka, unique, unique, tmp_path / "first", {}) as first:
        eventually(lambda: (unique, 0) in progress(kafka, unique), "the group's first offset")
        eventually(lambda: is_assigned(kafka, unique), "the partition")
        produce(kafka, unique, ["slow"])
        eventually(lambda: first.seen() == [("slow", 1)], "the first message")
        first.kill()
    seen = Seen()
    consumer = Consumer(kafka, group=unique)
    consumer.subscribe(unique)(seen)
    with running(consumer):
        eventually(lambda: seen.texts == ["slow"], "the message again")


@pytest.mark.long
def test_after_a_kill_only_what_was_not_done_comes_again(kafka: str, unique: str, tmp_path: Path) -> None:
    make_topic(kafka, unique)
    produce(kafka, unique, ["slow", "a", "b", "c"])
    with worker(kafka, unique, unique, tmp_path / "first", {"start": "earliest"}) as first:
        eventually(lambda: len(first.seen()) == 4, "every message")
        eventually(lambda: at(kafka, unique).done == {1, 2, 3}, "the three to be committed as done")
        first.kill()
    seen = Seen()
    consumer = Consumer(kafka, group=unique)
    consumer.subscribe(unique)(seen)
    with running(consumer):
        eventually(lambda: done(kafka, unique, unique, 4), "everything to be done")
    assert seen.texts == ["slow"]


def lag_for_a_server(url: str, group: str) -> int | None:
    """A group's lag as a server shows it; None while its brokers have not answered all that this takes."""
    taken = asker_of(url).ask(partial(snapshot.take, in_part=True))
    known = taken.groups.get(group)
    return known.lag if known is not None and taken.is_whole(known) else None


@pytest.mark.long
def test_nothing_is_left_where_everything_is_done(kafka: str, unique: str) -> None:
    """The records of transactions themselves count as read: in topics of messages, and of retries."""
    make_topic(kafka, unique)
    produce_in_transaction(kafka, unique, ["a", "b"])
    seen = Seen()
    consumer = Consumer(kafka, group=unique)

    @consumer.subscribe(unique, start="earliest", retry_min=0.1, retry_max=0.1)
    def handle(message: Any) -> None:
        seen(message)
        if message.text == "b" and message.attempt == 1:
            raise RuntimeError("again")

    with running(consumer):
        eventually(lambda: sorted(seen.texts) == ["a", "b", "b"], "each message")
        eventually(lambda: lag(kafka, unique) == 0, "no lag for Kafka's own tools")
        eventually(lambda: lag_for_a_server(kafka, unique) == 0, "no lag for a server")
        produce_in_transaction(kafka, unique, ["c"])
        eventually(lambda: lag(kafka, unique) == 0 and "c" in seen.texts, "no lag again")


@pytest.mark.long
def test_attempts_survive_a_kill(kafka: str, unique: str, tmp_path: Path) -> None:
    make_topic(kafka, unique)
    produce(kafka, unique, ["bad"])
    options = {"start": "earliest", "mode": "ordered", "retry_min": 0.1, "retry_max": 0.1, "max_attempts": 1000}
    with worker(kafka, unique, unique, tmp_path / "first", options) as first:
        eventually(lambda: at(kafka, unique).failed.get(0, 0) >= 3, "three attempts to be committed")
        first.kill()
    made = at(kafka, unique).failed[0]
    seen = Seen()
    consumer = Consumer(kafka, group=unique)
    consumer.subscribe(unique, mode="ordered")(seen)
    with running(consumer):
        eventually(lambda: done(kafka, unique, unique, 1), "the message to be done")
    assert [message.attempt for message in seen.messages] == [made + 1]


@pytest.mark.long
def test_a_message_that_kills_its_process_becomes_a_dead_letter(kafka: str, unique: str, tmp_path: Path) -> None:
    """The first death counts for nothing; after it each attempt is noted before it begins. Its neighbour is handled."""
    make_topic(kafka, unique)
    produce(kafka, unique, ["kill", "a"])
    for _ in range(4):
        with worker(kafka, unique, unique, tmp_path / "calls", {"start": "earliest", "max_attempts": 2}) as one:
            eventually(lambda p=one.process: p.poll() is not None or done(kafka, unique, unique, 2), "its end")  # type: ignore[misc]
            if one.process.poll() is None:
                break
    assert [attempt for text, attempt in one.seen() if text == "kill"] == [1, 1, 2]
    assert "a" in [text for text, _ in one.seen()]
    (letter,) = committed(kafka, dead_letter_topic(unique), 1)
    assert dict(letter.headers())["notify-reason"] == b"2 attempts, the last one ended with its process"


@pytest.mark.long
def test_no_commit_of_attempts_waits_for_records(kafka: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process died, a few attempts at a time are committed before they begin: 16 messages a second were
    handled, since each such commit waited in the client's thread for records that were all there."""
    waited: list[float] = []
    poll = Feed.poll

    async def noted(self: Feed, most: int, seconds: float) -> int:
        if self._partitions.has_to_note:
            waited.append(seconds)
        return await poll(self, most, seconds)

    monkeypatch.setattr(Feed, "poll", noted)
    make_topic(kafka, unique)
    died = TopicPartition(unique, 0, 0, Progress(0).metadata())
    commit_offsets(onlooker(kafka, unique), died)
    produce(kafka, unique, [f"{n:03}" for n in range(400)])
    seen = Seen()
    consumer = Consumer(kafka, group=unique, concurrency=8)
    consumer.subscribe(unique)(seen)
    with running(consumer):
        eventually(lambda: done(kafka, unique, unique, 400), "everything to be done")
    assert len(seen.messages) == 400
    assert waited and not any(waited)


@pytest.mark.long
def test_a_slow_handler_holds_up_nobody_else(kafka: str, unique: str) -> None:
    """All room is taken for longer than the consumer waits before it pauses; it stays a member, and continues."""
    make_topic(kafka, unique, 2)
    seen, release = Seen(), threading.Event()
    consumer = Consumer(kafka, group=unique, concurrency=2, batch=2)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: Any) -> None:
        if message.text.startswith("slow"):
            assert release.wait(PATIENCE_SECONDS)
        seen(message)

    produce(kafka, unique, ["slow1", "slow2"], partition=0)
    with running(consumer):
        eventually(lambda: is_assigned(kafka, unique), "the partitions")
        produce(kafka, unique, [f"quick{n}" for n in range(20)], partition=1)
        eventually(lambda: consumer._loop is not None, "the loop")
        release.set()
        eventually(lambda: done(kafka, unique, unique, 22), "everything to be done")
    assert Counter(seen.texts) == Counter(["slow1", "slow2", *(f"quick{n}" for n in range(20))])


# --- rebalances -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_partition_moves_with_what_is_done_and_comes_back(kafka: str, unique: str) -> None:
    """A second instance comes and goes while messages are handled: each is handled once."""
    make_topic(kafka, unique, 4)
    seen = Seen()

    def instance() -> Consumer:
        consumer = Consumer(kafka, group=unique)
        consumer.subscribe(unique, start="earliest")(seen)
        return consumer

    texts = [f"{n % 10} {n}" for n in range(900)]
    with running(instance()):
        produce(kafka, unique, texts[:300])
        eventually(lambda: is_assigned(kafka, unique), "the first instance")
        with running(instance()):
            produce(kafka, unique, texts[300:600])
            eventually(lambda: is_assigned(kafka, unique, 2), "both instances to have partitions")
        produce(kafka, unique, texts[600:])
        eventually(lambda: done(kafka, unique, unique, 900), "everything to be done")
    assert Counter(seen.texts) == Counter(texts)


@pytest.mark.long
def test_a_retry_that_waits_survives_rebalances(kafka: str, unique: str) -> None:
    """Retry partitions whose records are not due leave and come back; an earlier version skipped their records."""
    make_topic(kafka, unique, 2)
    succeed = threading.Event()
    attempts: Counter[str] = Counter()

    def instance() -> Consumer:
        consumer = Consumer(kafka, group=unique)

        @consumer.subscribe(unique, start="earliest", retry_min=1.0, retry_max=1.0, max_attempts=1000)
        def handle(message: Any) -> None:
            attempts[message.text] += 1
            if not succeed.is_set():
                raise RuntimeError("not yet")

        return consumer

    with running(instance()):
        produce(kafka, unique, [f"{n}" for n in range(8)])
        eventually(lambda: len(attempts) == 8, "a first attempt of each")
        for _ in range(2):
            with running(instance()):
                eventually(lambda: is_assigned(kafka, unique, 2), "both instances to have partitions")
            eventually(lambda: is_assigned(kafka, unique), "the first instance to have all")
        succeed.set()
        before = Counter(attempts)
        eventually(lambda: all(attempts[text] > before[text] for text in before), "each to succeed")
        eventually(lambda: done(kafka, unique, unique, 8), "everything to be done")


# --- order, back-off, dead letters ----------------------------------------------------------------------------


@pytest.mark.long
def test_a_dead_letter_frees_its_key(kafka: str, unique: str) -> None:
    make_topic(kafka, unique)
    produce(kafka, unique, ["x0", "x1", "x2"])
    seen, dead = Seen(), Seen()
    consumer = Consumer(kafka, group=unique)

    @consumer.subscribe(unique, mode="ordered", start="earliest", retry_min=0.1, retry_max=0.1, max_attempts=2)
    def handle(message: Any) -> None:
        seen(message)
        if message.text == "x0":
            raise RuntimeError("never works")
        if message.text == "x1":
            raise DeadLetter("never")

    letters = Consumer(kafka, group=f"{unique}-letters")

    @letters.subscribe(dead_letter_topic(unique), start="earliest", retry_min=0.1)
    def read(message: Any) -> None:
        if message.attempt == 1:
            raise RuntimeError("the letter's own reason stays")
        dead(message)

    with running(consumer):
        eventually(lambda: done(kafka, unique, unique, 3), "everything to be done")
        assert seen.texts == ["x0", "x0", "x1", "x2"]
        with running(letters):
            eventually(lambda: sorted(dead.texts) == ["x0", "x1"], "both dead letters")
    why = {
        m.text: (m.headers["notify-dead-letter-attempts"], m.headers[DEAD_LETTER_REASON].partition(" (at ")[0])
        for m in dead.messages
    }
    assert why == {"x0": ("2", "RuntimeError: never works"), "x1": ("1", "never")}


@pytest.mark.long
def test_the_wait_is_the_groups_own(kafka: str, unique: str) -> None:
    """Retries wait in the partition of their wait, however long others of the same topic wait."""
    make_topic(kafka, unique)
    make_topic(kafka, f"{unique}-slow")
    seen = Seen()
    consumer = Consumer(kafka, group=unique)

    def fail_once(message: Any) -> None:
        seen(message)
        if message.attempt == 1:
            raise RuntimeError("again")

    consumer.subscribe(unique, start="earliest", retry_min=0.1, retry_max=0.1)(fail_once)
    consumer.subscribe(f"{unique}-slow", start="earliest", retry_min=3600.0, retry_max=3600.0)(fail_once)
    produce(kafka, f"{unique}-slow", ["slow"])
    with running(consumer):
        eventually(lambda: done(kafka, unique, f"{unique}-slow", 1), "the slow one to wait for an hour")
        produce(kafka, unique, ["quick"])
        eventually(lambda: done(kafka, unique, unique, 1), "the quick one to leave")
        eventually(lambda: seen.texts == ["slow", "quick", "quick"], "the quick one's second attempt")
        waits = {n: p.offset for (topic, n), p in progress(kafka, unique).items() if topic == retry_topic(unique)}
        assert waits[15] == 0, "what waits for an hour is not done"
    assert seen.messages[-1].id == seen.messages[-2].id, "an inbox knows it by its id"


@pytest.mark.long
def test_headers_of_strangers_do_no_harm(kafka: str, unique: str) -> None:
    make_topic(kafka, unique)
    strange = {"notify-expires": "never", "notify-attempt": "x", "notify-topic": "elsewhere", "notify-due": "soon",
               "notify-id": b"\xff"}  # fmt: skip
    produce(kafka, unique, ["strange"], headers=strange, key=b"\xff\xfe")
    seen = Seen()
    consumer = Consumer(kafka, group=unique)
    consumer.subscribe(unique, start="earliest")(seen)
    with running(consumer):
        eventually(lambda: done(kafka, unique, unique, 1), "the message to be done")
    assert [(m.text, m.topic, m.attempt) for m in seen.messages] == [("strange", unique, 1)]


# --- where a group begins, and what it takes ------------------------------------------------------------------


@pytest.mark.long
def test_a_group_begins_at_an_offset_or_an_instant(kafka: str, unique: str) -> None:
    make_topic(kafka, unique)
    produce(kafka, unique, [f"old{n}" for n in range(5)], timestamp=1_000_000)
    produce(kafka, unique, ["new"])
    for number, (start, expected) in enumerate(
        ((3, ["old3", "old4", "new"]), (datetime(2020, 1, 1, tzinfo=UTC), ["new"]), (1000, []))
    ):
        seen = Seen()
        group = f"{unique}-{number}"
        consumer = Consumer(kafka, group=group)
        consumer.subscribe(unique, start=start)(seen)
        with running(consumer):
            eventually(lambda group=group: done(kafka, group, unique, 6), "everything to be done")  # type: ignore[misc]
        assert sorted(seen.texts) == sorted(expected)


# --- one owner ------------------------------------------------------------------------------------------------


def test_a_topic_that_a_consumer_makes_has_the_partitions_asked_for(kafka: str, unique: str) -> None:
    consumer = Consumer(f"{kafka}?notify.partitions=3", group=unique)
    consumer.subscribe(unique)(lambda message: None)
    with running(consumer):
        eventually(lambda: is_assigned(kafka, unique), "the partitions")
    assert len(admin_of(kafka).list_topics(timeout=30).topics[unique].partitions) == 3


@pytest.mark.long
def test_a_frozen_owner_is_fenced_and_another_takes_over(kafka: str, unique: str, tmp_path: Path) -> None:
    make_topic(kafka, unique)
    options = {"mode": "failover", "start": "earliest", "instance": "first"}
    produce(kafka, unique, ["a", "b"])
    with worker(kafka, unique, unique, tmp_path / "first", options) as first:
        eventually(lambda: done(kafka, unique, unique, 2), "the owner to commit")
        first.process.send_signal(signal.SIGSTOP)
        seen = Seen()
        standby = Consumer(kafka, group=unique, instance="second")
        standby.subscribe(unique, mode="failover")(seen)
        with running(standby):
            produce(kafka, unique, ["c"])
            eventually(lambda: done(kafka, unique, unique, 3), "the standby to take over")
            first.process.send_signal(signal.SIGCONT)
            produce(kafka, unique, ["d"])
            eventually(lambda: done(kafka, unique, unique, 4), "the standby to continue")
        assert seen.texts == ["c", "d"]
        produce(kafka, unique, ["e"])
        eventually(lambda: done(kafka, unique, unique, 5), "the former owner to own it again")


@pytest.mark.long
def test_an_owner_opens_each_partition_once(
    kafka: str, unique: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """New partitions are looked for while it takes those that it gained: a window that opens twice loses records."""
    monkeypatch.setattr("notify.client.kafka.loop.TOPICS_SECONDS", 0.001)
    make_topic(kafka, unique, 3)
    produce(kafka, unique, [f"{n}" for n in range(9)])
    consumer = Consumer(kafka, group=unique)
    calls: Counter[tuple[str, int]] = Counter()

    @consumer.subscribe(unique, mode="failover", start="earliest", retry_min=0.1, retry_max=0.1)
    def handle(message: Any) -> None:
        calls[message.text, message.attempt] += 1
        if message.attempt == 1:
            raise RuntimeError("the first attempt fails")

    with running(consumer):
        eventually(lambda: done(kafka, unique, unique, 9), "everything to be done")
    assert calls == {(f"{n}", attempt): 1 for n in range(9) for attempt in (1, 2)}
    assert "could not be looked for" not in caplog.text


# --- orders of operators --------------------------------------------------------------------------------------


def order(url: str, group: str, what: control.Control) -> None:
    produce(url, control.TOPIC, [what.encoded().decode()], key=group.encode())


@pytest.mark.long
def test_pause_resume_and_reset(kafka: str, unique: str) -> None:
    make_topic(kafka, unique, 2)
    produce(kafka, unique, ["a", "b", "c"])
    seen = Seen()

    def instance() -> Consumer:
        consumer = Consumer(kafka, group=unique)
        consumer.subscribe(unique, start="earliest")(seen)
        return consumer

    with running(instance()):
        eventually(lambda: done(kafka, unique, unique, 3), "everything to be done")
        reset = control.Reset("r1", unique, "earliest")
        order(kafka, unique, control.Control(paused=True, resets=(reset,)))
        eventually(lambda: all(p.reset == "r1" for (t, _), p in progress(kafka, unique).items() if t == unique), "r1")
        produce(kafka, unique, ["d"])
    assert seen.texts.count("d") == 0 and len(seen.texts) == 3
    with running(instance()):  # it is paused from its start
        eventually(lambda: is_assigned(kafka, unique), "the partitions")
        order(kafka, unique, control.Control(resets=(reset,)))
        eventually(lambda: done(kafka, unique, unique, 4), "everything to be done again")
    assert Counter(seen.texts) == Counter({"a": 2, "b": 2, "c": 2, "d": 1}), "a reset is carried out once"


@pytest.mark.long
def test_a_reset_is_not_repeated_where_another_tool_commits(kafka: str, unique: str) -> None:
    """kafka-consumer-groups.sh moved the group back, its commit named no reset, and the group went to the end again."""
    make_topic(kafka, unique)
    seen = Seen()

    def instance() -> Consumer:
        consumer = Consumer(kafka, group=unique)
        consumer.subscribe(unique, start="earliest")(seen)
        return consumer

    reset, later = control.Reset("r1", unique, "latest"), control.Reset("r2", unique, "latest")
    with running(instance()):
        produce(kafka, unique, ["a", "b"])
        eventually(lambda: done(kafka, unique, unique, 2), "everything to be done")
        order(kafka, unique, control.Control(resets=(reset,)))
        eventually(lambda: progress(kafka, unique)[unique, 0].reset == "r1", "r1")
    commit_offsets(onlooker(kafka, unique), TopicPartition(unique, 0, 1))
    with running(instance()):
        eventually(lambda: done(kafka, unique, unique, 2), "the second message again")
        eventually(lambda: progress(kafka, unique)[unique, 0].reset == "r1", "its commit to name the reset")
    assert Counter(seen.texts) == Counter({"a": 1, "b": 2})
    order(kafka, unique, control.Control(resets=(later,)))  # this one was not carried out yet
    commit_offsets(onlooker(kafka, unique), TopicPartition(unique, 0, 0))
    with running(instance()):
        eventually(lambda: progress(kafka, unique)[unique, 0].reset == "r2", "r2")
    assert len(seen.texts) == 3


# --- the end, and what cannot be ------------------------------------------------------------------------------


def test_a_broker_that_is_not_there_is_named(unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notify.client.kafka.feed.ANSWER_SECONDS", 1.0)
    consumer = Consumer("kafka://127.0.0.1:9", group=unique)
    consumer.subscribe(unique)(lambda message: None)
    with pytest.raises(Unavailable, match=r"Kafka at 127\.0\.0\.1:9 does not answer"):
        consumer.run(signals=False)
