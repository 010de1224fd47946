"""A message's fate once its handler is called, wherever the queue is: on a queue server, or in Kafka."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
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
from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.message import encode_body
from notify.protocol.wire import BridgedTransaction, PackedMessage
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import run, running
from tests.support.http import ask
from tests.support.odd_failures import fail_oddly
from tests.support.queues import LONG_OVER_KAFKA, Queue
from tests.support.shop import Order, items


def letters(queue: Queue, group: str) -> list[dict[str, Any]]:
    """A group's dead letters, as the server shows them."""
    status, answer = ask(queue.admin_url, "GET", f"/v1/admin/groups/{group}/dead-letters")
    return list(answer["messages"]) if status == 200 else []


def reasons(queue: Queue, group: str) -> dict[str, str]:
    """Why each dead letter is one, by its body."""
    return {m["body"]: m["headers"]["notify-dead-letter-reason"] for m in letters(queue, group)}


def test_a_message_arrives_as_it_was_sent(queue: Queue, unique: str) -> None:
    queue.make_topic(unique)
    seen: list[ReceivedMessage] = []
    consumer = Consumer(queue.url, group=unique)
    consumer.subscribe(unique, start="earliest")(seen.append)
    headers = {"h": "ü", "notify-id": "the sender's own", "content-type": "application/json"}
    names = queue.sender.send(
        Message(unique, {"n": 1}, key="k", tag="t", headers=headers),
        Message(unique, b"\xff\x00"),
        Message(unique, b"", key=""),
        Message(unique, b"x" * (1 << 20)),
    )
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "the messages to be settled")
    first, second, third, large = sorted(seen, key=lambda m: m.offset)
    assert [m.id for m in (first, second, third, large)] == names
    assert (first.key, first.tag, dict(first.headers), first.json()) == ("k", "t", headers, {"n": 1})
    assert (second.key, second.tag, second.headers, second.body) == (None, None, {}, b"\xff\x00")
    assert (third.key, third.body, len(large.body)) == ("", b"", 1 << 20)
    assert {(m.topic, m.queue, m.attempt, m.replay) for m in seen} == {(unique, 0, 1, 0)}
    assert all(m.committed_at.endswith("Z") for m in seen)


def test_return_is_ack_raise_is_retry_dead_letter_is_dead(queue: Queue, unique: str) -> None:
    seen: list[tuple[str, int]] = []
    ids_seen: dict[str, set[str]] = {}
    consumer = Consumer(queue.url, group=unique)

    @consumer.subscribe(unique, start="earliest", max_attempts=3, retry_min=0.1)
    def handle(message: ReceivedMessage) -> None:
        seen.append((message.text, message.attempt))
        ids_seen.setdefault(message.text, set()).add(message.id)
        if message.text == "once more" and message.attempt == 1:
            raise ValueError("not yet")
        if message.text == "poison":
            raise DeadLetter("cannot be")
        if message.text == "never":
            raise ValueError("never")

    queue.sender.send(*(Message(unique, body, headers={"h": "v"}) for body in ("good", "once more", "poison", "never")))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all messages to be settled")
    assert sorted(seen) == [
        ("good", 1), ("never", 1), ("never", 2), ("never", 3), ("once more", 1), ("once more", 2), ("poison", 1),
    ]  # fmt: skip
    assert {len(names) for names in ids_seen.values()} == {1}, "an inbox knows a message by its id"
    assert (consumer.handled, consumer.failed) == (2, 5)
    dead = eventually(lambda: len(letters(queue, unique)) == 2 and letters(queue, unique), "both dead letters")
    assert {m["body"]: m["headers"]["notify-dead-letter-attempts"] for m in dead} == {"poison": "1", "never": "3"}
    why = reasons(queue, unique)
    assert why["poison"] == "cannot be" and why["never"].startswith(f"ValueError: never (at {__name__}.")
    assert {(m["headers"]["notify-dead-letter-topic"], m["headers"]["h"]) for m in dead} == {(unique, "v")}


@LONG_OVER_KAFKA
def test_the_wait_doubles_up_to_its_bound(queue: Queue, unique: str) -> None:
    """No wait is shorter than the group says; how much longer it is, a loaded machine says."""
    began: list[float] = []
    consumer = Consumer(queue.url, group=unique)

    @consumer.subscribe(unique, start="earliest", max_attempts=4, retry_min=0.2, retry_max=0.4)
    def handle(message: ReceivedMessage) -> None:
        began.append(time.monotonic())
        raise ValueError("never")

    queue.sender.send(Message(unique, "x"))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "the message to be a dead letter")
    waits = [after - before for before, after in zip(began, began[1:], strict=False)]
    assert len(waits) == 3 and all(wait > least for wait, least in zip(waits, (0.15, 0.3, 0.3), strict=True)), waits


@pytest.mark.long
@pytest.mark.parametrize("with_inbox", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_handler_that_returns_its_work_undone_has_not_handled_the_message(
    queue: Queue, unique: str, with_inbox: bool, sqlite_engine: sa.Engine
) -> None:
    """A plain function that returns a coroutine, as a lambda may, fails."""
    done: list[str] = []

    async def work(message: ReceivedMessage, session: Any = None) -> None:
        done.append(message.text)

    consumer = Consumer(queue.url, group=unique, inbox=Inbox(sqlite_engine) if with_inbox else None)
    consumer.subscribe(unique, start="earliest", max_attempts=2, retry_min=0.01)(lambda *given: work(*given))
    queue.sender.send(Message(unique, "an order"))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "the message to be settled")
    dead = eventually(lambda: reasons(queue, unique), "the dead letter")
    assert list(dead) == ["an order"] and "which was never awaited" in dead["an order"]
    assert not done


@pytest.mark.long
def test_a_body_that_its_handler_cannot_decode_is_a_dead_letter_at_once(queue: Queue, unique: str) -> None:
    consumer = Consumer(queue.url, group=unique)
    read: list[Any] = []

    @consumer.subscribe(unique, start="earliest")
    def handle(message: ReceivedMessage) -> None:
        read.append(message.json() if message.tag == "json" else message.text)

    bodies = (b"\xff{", {"n": 1})
    queue.sender.send(*(Message(unique, body, tag=tag) for tag in ("json", "text") for body in bodies))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
        dead = eventually(lambda: len(letters(queue, unique)) == 2 and letters(queue, unique), "the dead letters")
    assert sorted(map(str, read)) == ['{"n":1}', "{'n': 1}"]
    assert {letter["body_base64"] for letter in dead} == {"/3s="}
    headers = [letter["headers"] for letter in dead]
    assert {h["notify-dead-letter-attempts"] for h in headers} == {"1"}
    assert sorted(h["notify-dead-letter-reason"][:20] for h in headers) == [
        "the body is not JSON",
        "the body is not text",
    ]


@LONG_OVER_KAFKA
def test_an_error_that_is_no_text_fails_no_ack_beside_it(
    queue: Queue, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler's error with a lone surrogate, as `os.fsdecode` makes it, fails no other message."""
    caplog.set_level(logging.CRITICAL, "notify.consumer")  # a pytest worker can report only UTF-8
    names = [*"abcdefgh"]
    consumer = Consumer(queue.url, group=unique, concurrency=len(names))
    together = threading.Barrier(len(names))

    @consumer.subscribe(unique, start="earliest", max_attempts=1)
    def handle(message: ReceivedMessage) -> None:
        together.wait(PATIENCE_SECONDS)
        fail_oddly(message.text)

    queue.make_topic(unique)
    queue.sender.send(*(Message(unique, name) for name in names))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all to be settled")
    assert (consumer.handled, consumer.failed) == (4, 4)
    dead = eventually(lambda: len(reasons(queue, unique)) == 4 and reasons(queue, unique), "the dead letters")
    assert dead["a"].startswith("ValueError: no file \\udcff\\0 here (at ") and dead["b"] == "never \\udcff"
    assert dead["c"].startswith("Mute: (the text of the error is unavailable: RuntimeError)") and len(dead["d"]) <= 500


@LONG_OVER_KAFKA
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_a_handler_that_exits_ends_its_consumer(
    queue: Queue, unique: str, kind: type[Consumer] | type[AsyncConsumer]
) -> None:
    """Handled messages are settled first, and another consumer gets its message."""
    queue.make_topic(unique)
    queue.sender.send(Message(unique, "exits"), Message(unique, "goes on"))
    consumer = kind(queue.url, group=unique, concurrency=2)
    both, handled = threading.Barrier(2), []

    def handle(message: ReceivedMessage) -> None:
        both.wait(PATIENCE_SECONDS)
        if message.text == "exits":
            raise SystemExit(3)
        handled.append(message.text)

    async def handle_in_thread(message: ReceivedMessage) -> None:
        await asyncio.to_thread(handle, message)

    subscription: Any = consumer.subscribe(unique, start="earliest", retry_min=0.01)
    subscription(handle if kind is Consumer else handle_in_thread)
    with pytest.raises(SystemExit) as left:
        run(consumer)
    assert (left.value.code, consumer.failed, consumer.handled, handled) == (3, 1, 1, ["goes on"])
    again: list[tuple[str, int]] = []
    other = Consumer(queue.url, group=unique)
    other.subscribe(unique, retry_min=0.01)(lambda message: again.append((message.text, message.attempt)))
    with running(other):
        eventually(lambda: queue.is_settled(unique), "the message to be handled")
    assert again == [("exits", 2)]


@LONG_OVER_KAFKA
def test_a_handler_in_which_something_is_cancelled_has_failed(queue: Queue, unique: str) -> None:
    """An inner task that somebody cancelled raises CancelledError into the handler: the message came back only when
    its lease was over, if at all."""
    attempts: list[int] = []
    consumer = AsyncConsumer(queue.url, group=unique, lease=600)

    @consumer.subscribe(unique, start="earliest", retry_min=0.1, retry_max=0.1)
    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        if len(attempts) == 1:
            inner = asyncio.ensure_future(asyncio.Event().wait())
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner

    queue.make_topic(unique)
    queue.sender.send(Message(unique, "a"))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "the message to be settled")
    assert attempts == [1, 2]


@pytest.mark.long
@LONG_OVER_KAFKA
def test_a_slow_handler_keeps_its_message(queue: Queue, unique: str) -> None:
    """Longer than its lease, beside a second instance that is idle. A stall of a loaded machine is shorter."""
    attempts: list[int] = []
    has_begun, may_end = threading.Event(), threading.Event()
    lease = 3.0
    consumers = [Consumer(queue.url, group=unique, lease=lease) for _ in range(2)]

    def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)

    for consumer in consumers:
        consumer.subscribe(unique, start="earliest")(handle)
    queue.make_topic(unique)
    with running(*consumers):
        eventually(lambda: queue.is_consumed(unique, 2), "both instances")
        queue.sender.send(Message(unique, "slow"))
        assert has_begun.wait(PATIENCE_SECONDS)
        over = time.monotonic() + 1.5 * lease
        eventually(lambda: time.monotonic() > over, "its first lease to be over")
        may_end.set()
        eventually(lambda: queue.is_settled(unique), "the message to be settled")
    assert attempts == [1]


def test_stopping_finishes_what_is_under_way(queue: Queue, unique: str) -> None:
    consumer = Consumer(queue.url, group=unique, concurrency=1)
    has_begun, may_end = threading.Event(), threading.Event()
    begun: list[str] = []

    @consumer.subscribe(unique, start="earliest")
    def handle(message: ReceivedMessage) -> None:
        begun.append(message.text)
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)

    queue.sender.send(Message(unique, "under way"), Message(unique, "waits"))
    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
        consumer.stop()
        may_end.set()
    # A second one may have begun in that very moment; what has begun is finished and settled.
    seen: list[str] = []
    other = Consumer(queue.url, group=unique)
    other.subscribe(unique)(lambda message: seen.append(message.text))
    with running(other):
        eventually(lambda: queue.is_settled(unique), "the rest to be handled")
    assert consumer.handled == len(begun) and sorted(begun + seen) == ["under way", "waits"]


@LONG_OVER_KAFKA
def test_messages_that_outlast_the_drain_are_redelivered(queue: Queue, unique: str) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    consumer = Consumer(queue.url, group=unique, lease=1, drain=0)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: ReceivedMessage) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)

    queue.sender.send(Message(unique, "too slow"))
    with running(consumer):
        assert has_begun.wait(PATIENCE_SECONDS)
    seen: list[str] = []
    other = Consumer(queue.url, group=unique)
    other.subscribe(unique)(lambda message: seen.append(message.text))
    with running(other):
        eventually(lambda: queue.is_settled(unique), "the message again")
    may_end.set()
    assert seen == ["too slow"]


@pytest.mark.long
def test_at_most_so_many_handlers_run_at_once(queue: Queue, unique: str) -> None:
    queue.make_topic(unique, 2)
    at_once, most = 0, 0
    lock, three = threading.Lock(), threading.Barrier(3)
    consumer = Consumer(queue.url, group=unique, concurrency=3)

    @consumer.subscribe(unique, start="earliest")
    def handle(message: ReceivedMessage) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        three.wait(PATIENCE_SECONDS)
        with lock:
            at_once -= 1

    queue.sender.send(*(Message(unique, str(n), key=str(n)) for n in range(12)))
    with running(consumer):
        eventually(lambda: consumer.handled == 12, "all messages")
    assert most == 3


# --- the inbox ------------------------------------------------------------------------------------------------


def test_with_an_inbox_each_message_has_one_effect(queue: Queue, unique: str, sqlite_engine: sa.Engine) -> None:
    """An attempt that fails after its effect leaves none, and a message that is published again has no second one."""
    transaction = BridgedTransaction(ids.to_text(ids.new_id()), "senders", [_packed(Message(unique, "twice"))])
    queue.sender.again(transaction)
    queue.sender.again(transaction)
    queue.sender.send(*(Message(unique, str(n)) for n in range(4)))
    consumer = Consumer(queue.url, group=unique, inbox=Inbox(sqlite_engine), concurrency=4)
    attempts: list[tuple[str, int]] = []

    @consumer.subscribe(unique, start="earliest", retry_min=0.1)
    def handle(message: ReceivedMessage, session: Session) -> None:
        attempts.append((message.text, message.attempt))
        session.add(Order(item=message.text))
        if message.text == "3" and message.attempt == 1:
            raise ValueError("first time fails after its effect")

    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "the effects")
    assert sorted(items(sqlite_engine)) == ["0", "1", "2", "3", "twice"]
    assert ("3", 2) in attempts


def _packed(message: Message) -> PackedMessage:
    body, headers = encode_body(message)
    return PackedMessage(message.topic, body=body, headers=headers)


def test_expired_messages_are_skipped(queue: Queue, unique: str) -> None:
    queue.sender.send(Message(unique, "late", ttl=0.1), Message(unique, "in time", ttl=3600))
    expired = time.monotonic() + 0.3
    eventually(lambda: time.monotonic() > expired, "the first to expire")
    seen: list[str] = []
    consumer = Consumer(queue.url, group=unique)
    consumer.subscribe(unique, start="earliest")(lambda message: seen.append(message.text))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "both to be done")
    assert seen == ["in time"]


# --- which messages -------------------------------------------------------------------------------------------


@LONG_OVER_KAFKA
def test_tags_and_filters_choose_and_the_rest_is_done(queue: Queue, unique: str) -> None:
    """The handler's own name for a topic comes before a pattern."""
    other = f"{unique}.by-tag"
    tagged: list[str] = []
    filtered: list[str] = []
    consumer = Consumer(queue.url, group=unique)
    consumer.subscribe(other, start="earliest", tags=["vip", "x"])(lambda m: tagged.append(m.text))
    wanted = 'headers.region == "eu" && key == "k" && tag != "no"'
    consumer.subscribe(f"{unique}.*", start="earliest", filter=wanted)(lambda m: filtered.append(m.text))
    sent = [Message(other, str(n), tag="vip" if n % 4 == 0 else "plain" if n % 2 else None) for n in range(20)]
    topic = f"{unique}.by-filter"
    for n, (region, key, tag) in enumerate((("eu", "k", None), ("us", "k", None), ("eu", "l", "a"), ("eu", "k", "no"))):
        sent.append(Message(topic, str(n), key=key, tag=tag, headers={"region": region}))
    queue.sender.send(*sent, Message(topic, "no headers", key="k"))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all messages to be settled or passed over")
        assert (sorted(map(int, tagged)), filtered) == ([0, 4, 8, 12, 16], ["0"])
        queue.sender.send(Message(f"{unique}.later", "first", key="k", tag="a", headers={"region": "eu"}))
        eventually(lambda: filtered == ["0", "first"], "a topic made later, from its first message on")


def test_a_filter_that_cannot_be_is_refused(queue: Queue, unique: str) -> None:
    consumer = Consumer(queue.url, group=unique)
    consumer.subscribe(unique, filter="headers.region ==")(lambda message: None)
    with pytest.raises(InvalidRequest, match="filter"):
        consumer.run(signals=False)
