"""A service on Kafka, made record by record: each fact of it can be planted, and an audit must say what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import TopicPartition

from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_inbox
from notify.kafka import records
from notify.kafka.brokers import make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.groups import dead_letter_topic, retry_topic
from notify.kafka.progress import Progress
from notify.kafka.redriven import REDRIVEN, Spot
from notify.kafka.subscriptions import Place
from notify.protocol import ids
from notify.storage.sql.rows import moment_of
from tests.support.clock import PATIENCE_SECONDS
from tests.support.kafka import commit_offsets
from tests.support.shop import make_engine
from tools.bench.made_run import transaction_id

PRODUCERS = "orders"


@dataclass(frozen=True)
class Sent:
    """A message of a committed transaction, and the place of its record."""

    id: str
    place: Place
    offset: int
    at_us: int

    @property
    def message_id(self) -> str:
        return f"{self.id}.0"


class World:
    """Records, offsets and rows. Times are in microseconds since 1970."""

    def __init__(self, cluster: Cluster, database_url: str) -> None:
        self._cluster = cluster
        self._engine = make_engine(database_url)
        create_tables(self._engine)
        self._producer = cluster.producer({"acks": "all"})
        self._made = 0
        self._topics: set[str] = set()

    def send(self, topic: str, partition: int, at_us: int, **options: Any) -> Sent:
        """Commit a transaction with one message, and publish it; see `commit` and `publish`."""
        place = Place(topic, partition)
        name = self.commit(topic, at_us)
        return Sent(name, place, self.publish(place, name, at_us, **options), at_us)

    def commit(self, topic: str, at_us: int) -> str:
        """Write a transaction's local row; the transaction's id."""
        self._made += 1
        name = ids.to_text(transaction_id(self._made, at_us))
        row = {
            "transaction_id": name, "message_no": 0, "producer_group": PRODUCERS, "mode": "outbox",
            "state": "COMMITTED", "shards": "", "topic": topic, "relayed": 1, "created_at": moment_of(at_us),
        }  # fmt: skip
        with self._engine.begin() as connection:
            connection.execute(half_message.insert().values(row))
        return name

    def publish(self, place: Place, name: str, at_us: int, *, key: str | None = None, **headers: Any) -> int:
        """Publish a transaction's message as a batch of its own; the record's offset. `headers`: without `notify-`."""
        of_message = [(records.ID, f"{name}.0"), (records.GROUP, PRODUCERS)]
        of_message += [(f"{records.OWN}{header}", str(value)) for header, value in headers.items()]
        return self._write(place, key, f"body of {name}".encode(), of_message, at_us)

    def fail(self, group: str, sent: Sent, attempt: int, at_us: int) -> int:
        """Move a message to the group's retry topic, before this attempt; the record's offset there."""
        return self.publish(Place(retry_topic(group), 0), sent.id, at_us, attempt=attempt, topic=sent.place.topic)

    def bury(self, group: str, sent: Sent, at_us: int, reason: str = "never") -> None:
        """Move a message to the group's dead letters."""
        place = Place(dead_letter_topic(group), 0)
        self.publish(place, sent.id, at_us, attempt=1, topic=sent.place.topic, reason=reason)

    def note_redriven(self, group: str, spot: Spot, letter_id: str) -> None:
        """Note that a dead letter was sent again."""
        key, value = REDRIVEN.record((group, spot), letter_id)
        self._write(Place(REDRIVEN.topic, 0), key, value, [], time.time_ns() // 1000)

    def stand(self, source: str, at_us: int, value: bytes) -> None:
        """Write a position record of a bridge."""
        self._write(Place(f"notify-bridge-positions.{source}", 0), source, value, [], at_us)

    def _write(self, place: Place, key: str | bytes | None, value: bytes, headers: Any, at_us: int) -> int:
        if place.topic not in self._topics:
            make_topics(self._cluster, [place.topic])
            self._topics.add(place.topic)
        written: list[Any] = []
        self._producer.produce(
            place.topic, value, key, place.partition, headers=headers, timestamp=at_us // 1000,
            on_delivery=lambda error, record: written.append(error or record.offset()),
        )  # fmt: skip
        self._producer.flush(PATIENCE_SECONDS)
        assert isinstance(written[0], int), written
        return written[0]

    def take_effect(self, group: str, several: Sequence[Sent], at_us: int) -> None:
        """Write the group's inbox rows for messages, a second after each other."""
        with self._engine.begin() as connection:
            for number, sent in enumerate(several):
                row = {"consumer_group": group, "message_id": sent.message_id}
                moment = moment_of(at_us + number * 1_000_000)
                connection.execute(notify_inbox.insert().values(row | {"created_at": moment}))

    def lose_effects(self, group: str) -> None:
        """Delete the group's inbox rows."""
        with self._engine.begin() as connection:
            connection.execute(notify_inbox.delete().where(notify_inbox.c.consumer_group == group))

    def progress(self, group: str, progress: Mapping[Place, Progress]) -> None:
        """Commit a group's progress."""
        consumer = self._cluster.consumer({"group.id": group})
        offsets = [TopicPartition(*place, p.offset, metadata=p.metadata()) for place, p in progress.items()]
        commit_offsets(consumer, *offsets)
        consumer.close()

    def delete_before(self, offsets: Mapping[Place, int]) -> None:
        """Delete the records before these offsets, as retention does."""
        admin = self._cluster.admin()
        asked = admin.delete_records([TopicPartition(*place, offset) for place, offset in offsets.items()])
        for deleted in asked.values():
            deleted.result(PATIENCE_SECONDS)

    def close(self) -> None:
        self._engine.dispose()
