"""A consumer group in Kafka, made without a consumer, and a server that shows it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from notify.kafka import groups, records
from notify.kafka.cluster import Cluster
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Place, Subscribed, Subscriptions
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.http import REASON, ask
from tests.support.kafka import commit_offsets


@contextlib.contextmanager
def showing(kafka_url: str, directory: Path) -> Iterator[ServerProcess]:
    """A server that shows and steers the groups of a cluster."""
    server = ServerProcess(directory, flags=["--kafka", kafka_url]).start()
    try:
        yield server
    finally:
        server.stop()


class Group:
    """A group as Notify's consumers leave it in Kafka: topics, records and committed progress."""

    def __init__(self, kafka_url: str, partitions: int = 2) -> None:
        self.name = f"g{uuid.uuid4().hex[:8]}"
        self.topic = f"t{self.name}"
        self.cluster = Cluster.of(kafka_url)
        wanted = {
            self.topic: partitions,
            groups.retry_topic(self.name): groups.RETRY_PARTITIONS,
            groups.dead_letter_topic(self.name): partitions,
        }
        client = self.cluster.admin()
        made = client.create_topics([NewTopic(name, num_partitions=count) for name, count in wanted.items()])
        for done in made.values():
            done.result(30)

    def write(self, to: str, partition: int, count: int, **headers: str) -> None:
        """Write records in a transaction of their own, as bridges and consumers do."""
        producer = self.cluster.producer({"transactional.id": self.name})
        producer.init_transactions(30)
        producer.begin_transaction()
        for number in range(count):
            own: records.Headers = [(records.ID, f"{uuid.uuid4()}.{number}".encode())]
            own += [(f"notify-{name}", value.encode()) for name, value in headers.items()]
            producer.produce(to, f'{{"n": {number}}}'.encode(), b"k", partition=partition, headers=own)
        producer.commit_transaction(30)

    def commit(self, partition: int, progress: Progress, topic: str = "") -> None:
        consumer = self.cluster.consumer({"group.id": self.name})
        at = TopicPartition(topic or self.topic, partition, progress.offset, progress.metadata())
        commit_offsets(consumer, at)
        consumer.close()

    def subscribe(self, subscribed: Subscribed) -> None:
        Subscriptions(self.cluster, self.name).note({Place(self.topic, 0): subscribed}, begins=True)

    def bury(self, partition: int, count: int, reason: str = "ValueError: no") -> None:
        """Write dead letters."""
        letters = groups.dead_letter_topic(self.name)
        self.write(letters, partition, count, topic=self.topic, reason=reason, attempt="16", expires="1")


def look_again(server: ServerProcess) -> None:
    """Let a server show what is there now. A snapshot serves it for a second, and it takes some by itself, such as one
    in the middle of what a test writes; it takes a new one when somebody asks for a group that it does not know."""
    eventually(lambda: ask(server.url, "GET", "/v1/admin/groups/none")[0] == 404, "a new snapshot")


def admin(server: ServerProcess, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    if method == "GET":
        look_again(server)
    sent = body if method == "GET" else {"reason": REASON} | (body or {})
    status, answer = ask(server.url, method, f"/v1/admin/{path}", sent)
    assert status == 200, answer
    return dict(answer)


def committed(group: Group, topic: str, count: int) -> list[Any]:
    """The first records of a topic's partition 0, as a reader of committed records sees them."""
    consumer: Consumer = group.cluster.consumer({"group.id": "reader"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    read: list[Any] = []

    def is_there() -> bool:
        read.extend(record for record in consumer.consume(100, 0.5) if record.error() is None)
        return len(read) >= count

    eventually(is_there, f"{count} records of {topic}")
    consumer.close()
    assert len(read) == count
    return read
