"""Handlers of batches and typed handlers, wherever the queue is: on a queue server, or in Kafka."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import (
    AsyncConsumer,
    Consumer,
    DeadLetter,
    Inbox,
    Message,
    ReceivedMessage,
)
from notify.client.tables.definitions import notify_inbox
from notify.protocol import ids
from notify.protocol.limits import Mode
from notify.protocol.message import encode_body
from notify.protocol.wire import BridgedTransaction, PackedMessage
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.dying import POINTS_OF_BATCHES, consume_and_die
from tests.support.groups import running, taken_by
from tests.support.http import admin, ask
from tests.support.queues import LONG_OVER_KAFKA, Queue
from tests.support.shop import Order, items, make_async_engine


@dataclasses.dataclass
class Placed:
    item: str
    price: int


def letters(queue: Queue, group: str) -> dict[str, tuple[str, str]]:
    """Why each dead letter of a group is one, and after how many attempts, by its body."""
    status, answer = ask(queue.admin_url, "GET", f"/v1/admin/groups/{group}/dead-letters")
    headers = {m.get("body"): m["headers"] for m in answer["messages"]} if status == 200 else {}
    return {body: (h["notify-dead-letter-reason"], h["notify-dead-letter-attempts"]) for body, h in headers.items()}


def texts(messages: list[ReceivedMessage]) -> list[str]:
    return [message.text for message in messages]


def send(queue: Queue, topic: str, *texts: str) -> list[str]:
    """Send messages whose key is the first letter of their text; their ids."""
    return queue.sender.send(*(Message(topic, text, key=text[0]) for text in texts))


# --- batches ------------------------------------------------------------------------------------------------------


def test_a_handler_gets_lists(queue: Queue, unique: str) -> None:
    queue.make_topic(unique)
    sent = [str(n) for n in range(100, 130)]
    send(queue, unique, *sent)
    calls: list[list[str]] = []
    consumer = Consumer(queue.url, group=unique, concurrency=1)
    consumer.subscribe(unique, start="earliest", batch=8)(lambda messages: calls.append(texts(messages)))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert [text for call in calls for text in call] == sent, "in the order of their queue"
    assert max(map(len, calls)) == 8 and consumer.handled == len(sent)


@pytest.mark.parametrize("kind", [Consumer, pytest.param(AsyncConsumer, marks=pytest.mark.long)])
def test_a_poison_message_fails_alone(
    queue: Queue, unique: str, kind: type[Consumer] | type[AsyncConsumer], sqlite_engine: sa.Engine
) -> None:
    """Its batch is split; the others take effect once, and none of them counts an attempt."""
    queue.make_topic(unique)
    sent = ["a", "b", "fails", "c", "never", "d", "once more", "e"]
    send(queue, unique, *sent)
    calls: list[list[tuple[str, int]]] = []

    def handle(messages: list[ReceivedMessage], session: Session) -> None:
        session.add_all([Order(item=m.text) for m in messages])
        session.flush()
        calls.append([(m.text, m.attempt) for m in messages])
        for message in messages:
            if message.text == "fails" or (message.text == "once more" and message.attempt == 1):
                raise ValueError(message.text)
            if message.text == "never":
                raise DeadLetter("cannot be")

    inbox = Inbox(sqlite_engine if kind is Consumer else make_async_engine(sqlite_engine.url))
    consumer = kind(queue.url, group=unique, inbox=inbox)
    consumer.subscribe(unique, start="earliest", batch=8, max_attempts=2, retry_min=0.1)(taken_by(consumer, handle))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert sorted(items(sqlite_engine)) == ["a", "b", "c", "d", "e", "once more"]
    dead = eventually(lambda: len(letters(queue, unique)) == 2 and letters(queue, unique), "both dead letters")
    assert dead["never"] == ("cannot be", "1")
    reason, attempts = dead["fails"]
    assert reason.startswith("ValueError: fails (at ") and "handle" in reason and attempts == "2", reason
    assert max(map(len, calls)) > 1
    again = [call for call in calls if any(attempt > 1 for _, attempt in call)]
    assert sorted(again) == [[("fails", 2)], [("once more", 2)]], "only what failed alone comes again, and alone"


@pytest.mark.long
def test_in_order_a_failure_in_a_batch_holds_up_its_key_and_no_other(queue: Queue, unique: str) -> None:
    queue.make_topic(unique)
    send(queue, unique, "x0", "x1", "x2", "y0", "y1", "z0", "z1")
    done: list[str] = []
    failed: list[tuple[str, int]] = []
    others = threading.Event()
    consumer = Consumer(queue.url, group=unique)

    @consumer.subscribe(unique, mode="ordered", start="earliest", batch=10, retry_min=0.1, retry_max=0.1)
    def handle(messages: list[ReceivedMessage]) -> None:
        assert len({m.key for m in messages}) == len(messages), "of each key one at a time"
        poison = next((m for m in messages if m.text in ("x1", "z0")), None)
        if poison is not None:
            if len(messages) == 1:
                failed.append((poison.text, poison.attempt))
            if poison.text == "z0":
                raise DeadLetter("never")
            if not (others.is_set() and poison.attempt >= 3):
                raise ValueError("again")
        done.extend(texts(messages))
        if "y1" in done:
            others.set()

    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "everything to be settled")
    by_key = {key: [text for text in done if text[0] == key] for key in "xyz"}
    assert by_key == {"x": ["x0", "x1", "x2"], "y": ["y0", "y1"], "z": ["z1"]}
    assert [attempt for text, attempt in failed if text == "x1"][:3] == [1, 2, 3]
    assert done.index("y1") < done.index("x2"), "another key waits for nobody"


def test_a_duplicate_within_a_batch_takes_effect_once(queue: Queue, unique: str, sqlite_engine: sa.Engine) -> None:
    """A queue server knows ids; Kafka has the message twice, and the inbox takes it once."""
    queue.make_topic(unique)
    body, headers = encode_body(Message(unique, "twice"))
    packed = [PackedMessage(unique, body=body, headers=headers)]
    transaction = BridgedTransaction(ids.to_text(ids.new_id()), "senders", packed)
    queue.sender.again(transaction, transaction)
    send(queue, unique, "a", "b")
    queue.sender.again(transaction)
    consumer = Consumer(queue.url, group=unique, inbox=Inbox(sqlite_engine))

    @consumer.subscribe(unique, start="earliest", batch=10)
    def handle(messages: list[ReceivedMessage], session: Session) -> None:
        session.add_all([Order(item=m.text) for m in messages])

    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert sorted(items(sqlite_engine)) == ["a", "b", "twice"]


@pytest.mark.parametrize("mode", ["exclusive", pytest.param("failover", marks=pytest.mark.long), "broadcast"])
def test_every_mode_has_batches(queue: Queue, unique: str, mode: Mode) -> None:
    queue.make_topic(unique, 2)
    seen: Counter[str] = Counter()
    consumer = Consumer(queue.url, group=unique, instance="i")
    group = f"{unique}@i" if mode == "broadcast" else unique

    start = None if mode == "broadcast" else "earliest"

    @consumer.subscribe(unique, mode=mode, start=start, batch=5, retry_min=0.1)
    def handle(messages: list[ReceivedMessage]) -> None:
        if any(m.text == "5" and m.attempt == 1 for m in messages):
            raise ValueError("again")
        seen.update(texts(messages))

    with running(consumer):
        eventually(lambda: queue.is_consumed(group), "the consumer")
        send(queue, unique, *(str(n) for n in range(9)))
        eventually(lambda: sum(seen.values()) >= 9, "all messages")
        eventually(lambda: queue.is_settled(group), "them to be settled")
    assert seen == Counter(str(n) for n in range(9)) and consumer.failed == 1


@LONG_OVER_KAFKA
def test_a_reset_gives_batches_again(queue: Queue, unique: str, sqlite_engine: sa.Engine) -> None:
    """With an inbox they take no effect again; on a queue server a reset may say that they do."""
    queue.make_topic(unique)
    send(queue, unique, "a", "b", "c")
    consumer = Consumer(queue.url, group=unique, inbox=Inbox(sqlite_engine))

    @consumer.subscribe(unique, start="earliest", batch=10)
    def handle(messages: list[ReceivedMessage], session: Session) -> None:
        session.add_all([Order(item=m.text) for m in messages])

    def reset(**fields: Any) -> None:
        admin(queue.admin_url, "POST", f"groups/{unique}/reset", {"topic": unique, "to": "earliest", **fields})

    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "everything to be settled")
        reset()
        eventually(lambda: consumer.handled == 6, "everything again")
        assert sorted(items(sqlite_engine)) == ["a", "b", "c"]
        if not queue.is_kafka:
            reset(replay_effects=True)
            eventually(lambda: sorted(items(sqlite_engine)) == ["a", "a", "b", "b", "c", "c"], "the effects again")


# --- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS_OF_BATCHES)
def test_a_process_killed_in_a_batch_loses_and_doubles_nothing(
    queue: Queue, unique: str, point: str, sqlite_engine: sa.Engine
) -> None:
    queue.make_topic(unique)
    sent = [f"{n:02}" for n in range(20)]
    send(queue, unique, *sent)
    assert consume_and_die(queue.url, unique, str(sqlite_engine.url), point, 10) == -signal.SIGKILL
    before = items(sqlite_engine)
    assert before or point != "after the commit"
    consumer = Consumer(queue.url, group=unique, inbox=Inbox(sqlite_engine), lease=1)
    handled: list[str] = []

    @consumer.subscribe(unique, start="earliest", batch=10)
    def handle(messages: list[ReceivedMessage], session: Session) -> None:
        session.add_all([Order(item=m.text) for m in messages])
        handled.extend(texts(messages))

    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "everything to be settled")
    assert sorted(items(sqlite_engine)) == sent and sorted(before + handled) == sent
    with sqlite_engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(notify_inbox)) == len(sent)
    assert letters(queue, unique) == {}


@LONG_OVER_KAFKA
def test_stopping_finishes_the_batch_under_way(queue: Queue, unique: str) -> None:
    queue.make_topic(unique)
    sent = [str(n) for n in range(100, 120)]
    send(queue, unique, *sent)
    consumer = Consumer(queue.url, group=unique, concurrency=1)
    has_begun, may_end = threading.Event(), threading.Event()
    begun: list[str] = []

    @consumer.subscribe(unique, start="earliest", batch=4)
    def handle(messages: list[ReceivedMessage]) -> None:
        begun.extend(texts(messages))
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)

    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
        consumer.stop()
        may_end.set()
    seen: list[str] = []
    other = Consumer(queue.url, group=unique)
    other.subscribe(unique, batch=10)(lambda messages: seen.extend(texts(messages)))
    with running(other):
        eventually(lambda: queue.is_settled(unique), "the rest to be handled")
    assert consumer.handled == len(begun) and sorted(begun + seen) == sent


def test_a_handler_that_exits_gives_its_batch_back(queue: Queue, unique: str) -> None:
    """No attempt counts: it was handled in halves first, although the process was to end."""
    queue.make_topic(unique)
    sent = ["a", "exits", "b", "c"]
    send(queue, unique, *sent)
    consumer = Consumer(queue.url, group=unique, concurrency=1)
    done: list[str] = []

    @consumer.subscribe(unique, start="earliest", batch=4)
    def handle(messages: list[ReceivedMessage]) -> None:
        if len(messages) > 1 or len(done) == len(sent) - 1:
            raise SystemExit(3)
        done.extend(texts(messages))

    with pytest.raises(SystemExit):
        consumer.run(signals=False)
    again: list[tuple[str, int]] = []
    other = Consumer(queue.url, group=unique)
    other.subscribe(unique, batch=4)(lambda messages: again.extend((m.text, m.attempt) for m in messages))
    with running(other):
        eventually(lambda: queue.is_settled(unique), "the rest to be handled")
    rest = sorted(set(sent) - set(done))
    attempt = 1 if len(rest) > 1 else 2  # they came one by one, and one that is alone has failed
    assert sorted(again) == [(text, attempt) for text in rest]


def test_an_instance_that_comes_gets_what_waits_for_a_batch_elsewhere(queue: Queue, unique: str) -> None:
    """Over Kafka partitions go to it, while a batch is under way here: only that one may be handled twice."""
    queue.make_topic(unique, 2)
    size, sent = 5, [f"{n:02}" for n in range(40)]
    send_to_both = [Message(unique, text, key=str(n)) for n, text in enumerate(sent)]
    seen: Counter[str] = Counter()
    has_begun, may_end = threading.Event(), threading.Event()
    first = Consumer(queue.url, group=unique, concurrency=1, lease=3, batch=len(sent))
    second = Consumer(queue.url, group=unique, lease=3)

    @first.subscribe(unique, start="earliest", batch=size)
    def handle(messages: list[ReceivedMessage]) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        seen.update(texts(messages))

    second.subscribe(unique, start="earliest", batch=size)(lambda messages: seen.update(texts(messages)))
    queue.sender.send(*send_to_both)
    _run_second_beside(queue, unique, first, second, has_begun, may_end)
    assert sorted(seen) == sent and sum(seen.values()) - len(sent) <= size


@LONG_OVER_KAFKA
def test_an_instance_that_comes_gets_what_waits_for_single_handling_beside_batches(queue: Queue, unique: str) -> None:
    """A consumer that has a handler of batches, too, holds more messages than its threads handle."""
    queue.make_topic(unique, 2)
    queue.make_topic(f"{unique}-b", 1)
    sent = [f"{n:02}" for n in range(40)]
    seen: Counter[str] = Counter()
    has_begun, may_end = threading.Event(), threading.Event()
    first = Consumer(queue.url, group=unique, concurrency=1, lease=3, batch=len(sent))
    second = Consumer(queue.url, group=unique, lease=3)

    @first.subscribe(unique, start="earliest")
    def handle(message: ReceivedMessage) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        seen[message.text] += 1

    second.subscribe(unique, start="earliest")(lambda message: seen.update([message.text]))
    for consumer in (first, second):
        consumer.subscribe(f"{unique}-b", start="earliest", batch=10)(lambda messages: None)
    queue.sender.send(*(Message(unique, text, key=str(n)) for n, text in enumerate(sent)))
    _run_second_beside(queue, unique, first, second, has_begun, may_end)
    assert sorted(seen) == sent and sum(seen.values()) - len(sent) <= 1


def _run_second_beside(
    queue: Queue, unique: str, first: Consumer, second: Consumer, has_begun: threading.Event, may_end: threading.Event
) -> None:
    """Start `second` while `first` handles, and let `first` continue once both consume; until everything is settled."""
    with running(first):
        assert has_begun.wait(PATIENCE_SECONDS)
        with running(second):
            eventually(lambda: queue.is_consumed(unique, 2), "both instances")
            if queue.is_kafka:
                eventually(lambda: second.handled, "a partition to go to the second")
            may_end.set()
            eventually(lambda: queue.is_settled(unique), "everything to be settled")


# --- typed --------------------------------------------------------------------------------------------------------


def test_a_body_that_does_not_fit_is_a_dead_letter_at_once(queue: Queue, unique: str) -> None:
    """Whatever its batch does; the others of the batch are handled together."""
    queue.make_topic(unique)
    seen: list[list[Placed]] = []
    consumer = Consumer(queue.url, group=unique)

    @consumer.subscribe(unique, start="earliest", batch=10)
    def handle(placed: list[Placed]) -> None:
        seen.append(placed)

    queue.sender.send(
        Message(unique, Placed("book", 5)), Message(unique, "broken {"), Message(unique, Placed("pen", 1)),
        Message(unique, {"item": "map", "price": "much"}), Message(unique, {"item": "ink", "price": 2, "more": True}),
    )  # fmt: skip
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert sorted(p.item for call in seen for p in call) == ["book", "ink", "pen"]
    assert (consumer.handled, consumer.failed) == (3, 2)
    dead = eventually(lambda: len(letters(queue, unique)) == 2 and letters(queue, unique), "both dead letters")
    assert {attempts for _, attempts in dead.values()} == {"1"}
    assert all(reason.startswith("the body does not fit Placed: ") for reason, _ in dead.values())
    assert "price" in dead['{"item":"map","price":"much"}'][0]


def test_a_typed_handler_of_single_messages(queue: Queue, unique: str, sqlite_engine: sa.Engine) -> None:
    consumer = Consumer(queue.url, group=unique, inbox=Inbox(sqlite_engine))

    @consumer.subscribe(unique, start="earliest")
    def handle(placed: Placed, session: Session) -> None:
        session.add(Order(item=placed.item))

    queue.sender.send(Message(unique, Placed("book", 5)), Message(unique, {"item": "map"}))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "both to be settled")
    assert items(sqlite_engine) == ["book"]
    dead = eventually(lambda: letters(queue, unique), "the dead letter")
    ((reason, attempts),) = dead.values()
    assert attempts == "1" and "missing required field `price`" in reason
