"""Differences between the two queues, a queue server and Kafka: what Kafka cannot do is refused with a sentence.

docs/kafka.md has the table.
"""

from __future__ import annotations

import itertools
import ssl
import threading
from typing import Any

import pytest

from notify.client import Consumer, Message, Reader, ReceivedMessage, TransactionProducer
from notify.errors import Conflict, InvalidRequest
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction, PackedMessage
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import running
from tests.support.http import REASON, ask
from tests.support.queues import LONG_OVER_KAFKA, Queue


def noting(queue: Queue, group: str, topic: str, seen: list[str], mode: str) -> Consumer:
    """A consumer that notes the texts of its messages."""
    consumer = Consumer(queue.url, group=group)
    consumer.subscribe(topic, mode=mode, start="earliest")(lambda message: seen.append(message.text))
    return consumer


MIXES = list(itertools.combinations(("shared", "ordered", "broadcast", "exclusive", "failover"), 2))


@pytest.mark.parametrize(("one", "other"), MIXES)
def test_modes_of_one_group(queue: Queue, unique: str, one: str, other: str) -> None:
    """A queue server has a mode for each topic; over Kafka a group shares its partitions in one way."""
    consumer = Consumer(queue.url, group=unique, instance="i")
    consumer.subscribe(unique, mode=one)(lambda message: None)
    consumer.subscribe(f"{unique}-2", mode=other)(lambda message: None)
    if queue.is_kafka and (one, other) != ("shared", "ordered"):
        sentence = "not both" if (one, other) == ("exclusive", "failover") else "one way to share its partitions"
        with pytest.raises(InvalidRequest, match=sentence):
            consumer.run(signals=False)
        return
    with running(consumer):
        group = f"{unique}@i" if one == "broadcast" else unique
        eventually(lambda: queue.is_consumed(group), "the consumer to receive")


@LONG_OVER_KAFKA
def test_another_mode_beside_a_running_consumer(queue: Queue, unique: str) -> None:
    """A queue server refuses it. Over Kafka instances may be shared and ordered at once: each keeps to its own."""
    queue.make_topic(unique, 2)
    seen: list[str] = []
    first, second = (noting(queue, unique, unique, seen, mode) for mode in ("shared", "ordered"))
    with running(first):
        eventually(lambda: queue.is_consumed(unique), "the first instance")
        if not queue.is_kafka:
            with pytest.raises(Conflict) as refused:
                second.run(signals=False)
            assert refused.value.code == "mode_in_use"
            return
        with running(second):
            eventually(lambda: queue.is_consumed(unique, 2), "the second instance")
            queue.sender.send(*(Message(unique, text, key=text) for text in "abcdefgh"))
            eventually(lambda: queue.is_settled(unique), "everything to be settled")
    assert sorted(seen) == [*"abcdefgh"]


@pytest.mark.long
def test_instances_share_a_queue_or_have_partitions_each(queue: Queue, unique: str) -> None:
    """Over Kafka a partition is one instance's: more instances than partitions are idle."""
    queue.make_topic(unique)
    both = threading.Barrier(2)
    seen: dict[str, list[str]] = {"a": [], "b": []}

    def instance(name: str) -> Consumer:
        consumer = Consumer(queue.url, group=unique, instance=name, concurrency=1, batch=1)

        @consumer.subscribe(unique, start="earliest")
        def handle(message: ReceivedMessage) -> None:
            if not queue.is_kafka:
                both.wait(PATIENCE_SECONDS)
            seen[name].append(message.text)

        return consumer

    with running(instance("a"), instance("b")):
        eventually(lambda: queue.is_consumed(unique, 2), "both instances")
        queue.sender.send(*(Message(unique, text, key=text) for text in "abcdefgh"))
        eventually(lambda: queue.is_settled(unique), "everything to be settled")
    shares = sorted(map(len, seen.values()))
    assert shares == ([0, 8] if queue.is_kafka else [4, 4])


@LONG_OVER_KAFKA
def test_without_an_inbox_only_a_queue_server_knows_ids(queue: Queue, unique: str) -> None:
    transaction = BridgedTransaction(ids.to_text(ids.new_id()), "senders", [PackedMessage(unique, body=b"twice")])
    queue.sender.again(transaction)
    queue.sender.again(transaction)
    seen: list[str] = []
    consumer = Consumer(queue.url, group=unique)
    consumer.subscribe(unique, start="earliest")(lambda message: seen.append(message.id))
    with running(consumer):
        eventually(lambda: queue.is_settled(unique), "all messages to be settled")
    assert seen == [f"{transaction.id}.0"] * (2 if queue.is_kafka else 1)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/messages", {"messages": []}),
        ("POST", "/v1/groups/{name}/receive", {"instance": "i"}),
        ("GET", "/v1/topics/{name}/queues/0/messages?offset=0&max=1", None),
        ("PUT", "/v1/admin/topics/{name}", {"queues": 2}),
        ("POST", "/v1/admin/topics/{name}/purge", {"before": 0, "dry_run": True}),
        ("PUT", "/v1/admin/groups/{name}/subscriptions/{name}", {"mode": "shared"}),
        ("DELETE", "/v1/admin/groups/{name}/subscriptions/{name}", {}),
        ("GET", "/v1/admin/groups/{name}/priorities", None),
        ("PUT", "/v1/admin/groups/{name}/priorities", {"classes": [{"name": "all", "weight": 1, "topics": ["*"]}]}),
        ("GET", "/v1/admin/messages?topic={name}&key=k", None),
    ],
)
def test_a_server_over_kafka_refuses_what_it_cannot_do(
    queue: Queue, unique: str, method: str, path: str, body: dict[str, Any] | None
) -> None:
    """With a sentence. A queue server has an answer of its own to each."""
    sent = body if body is None or "admin" not in path else {"reason": REASON} | body
    status, answer = ask(queue.admin_url, method, path.format(name=unique), sent)
    is_refused = status == 421 and any(text in answer["detail"] for text in ("queues are Kafka's", "groups of Kafka"))
    assert is_refused == queue.is_kafka, (status, answer)


def test_producers_and_readers_need_a_server() -> None:
    for make in (
        lambda url: Reader(url).read("t"),
        lambda url: TransactionProducer(url, group="g").publish(Message("t", "x")),
    ):
        with pytest.raises(InvalidRequest, match="only consumers, bridges and relays reach Kafka"):
            make("kafka://127.0.0.1:9")


def test_a_consumer_over_kafka_says_what_it_does_not_take() -> None:
    for unused in ({"token": "t"}, {"tls": ssl.create_default_context()}):
        consumer = Consumer("kafka://127.0.0.1:9", group="g", **unused)  # type: ignore[arg-type]
        consumer.subscribe("t")(lambda message: None)
        with pytest.raises(InvalidRequest, match="NOTIFY_KAFKA_SETTINGS"):
            consumer.run(signals=False)
