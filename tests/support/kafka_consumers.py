"""Consumers over a real Kafka: producing plain records, where a group is, and a consumer in a process to be killed."""

from __future__ import annotations

import atexit
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from notify.errors import Unavailable
from notify.kafka.admin_process import AdminProcess
from notify.kafka.cluster import Cluster
from notify.kafka.group_questions import progress_of
from notify.kafka.progress import Progress
from notify.testing import forked
from notify.testing.forked import Forked
from tests.support.clock import PATIENCE_SECONDS, eventually

CALL_SECONDS = 30.0
SESSION_SECONDS = 3


@lru_cache(1)
def admin_of(url: str) -> Any:
    """One admin client for all questions: an answer never comes once its client is gone."""
    return Cluster.of(url).admin()


@lru_cache(1)
def asker_of(url: str) -> AdminProcess:
    """One process for all questions about groups."""
    asker = AdminProcess(Cluster.of(url))
    atexit.register(asker.close)
    return asker


def make_topic(url: str, topic: str, partitions: int = 1) -> None:
    """Make a topic, and wait until the brokers know it."""
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

    admin = admin_of(url)
    for made in admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=-1)]).values():
        made.result(CALL_SECONDS)
    # All topics of a node of many tests would be thousands of partitions.
    eventually(lambda: admin.list_topics(topic, timeout=CALL_SECONDS).topics[topic].error is None, f"topic {topic}")


def produce(url: str, topic: str, texts: list[str], **options: Any) -> None:
    """Produce a record for each text; its key is its first letter unless `options` (of `produce`) say another."""
    producer = Cluster.of(url).producer({"linger.ms": 5})
    for text in texts:
        producer.produce(topic, text.encode(), **{"key": text[0].encode(), **options})
    assert producer.flush(CALL_SECONDS) == 0


@lru_cache(4)
def onlooker(url: str, group: str) -> Any:
    """A client that may ask for a group's offsets, and is no member of it."""
    return Cluster.of(url).consumer({"group.id": group})


def produce_in_transaction(url: str, topic: str, texts: list[str]) -> None:
    """Produce as a bridge does: behind the records stands the transaction's own."""
    producer = Cluster.of(url).producer({"transactional.id": topic})
    producer.init_transactions(CALL_SECONDS)
    producer.begin_transaction()
    for text in texts:
        producer.produce(topic, text.encode(), key=text[0].encode())
    producer.commit_transaction(CALL_SECONDS)


def lag(url: str, group: str) -> int:
    """A group's lag as Kafka's own tools count it, in the topics that it has offsets in."""
    from confluent_kafka import TopicPartition

    consumer = onlooker(url, group)
    known = progress(url, group)
    ends = {place: consumer.get_watermark_offsets(TopicPartition(*place), CALL_SECONDS)[1] for place in known}
    return sum(ends[place] - known[place].offset for place in known)


def progress(url: str, group: str) -> dict[tuple[str, int], Progress]:
    """Where a group is, by topic and partition, with what it has done behind that.

    The group's coordinator alone is asked: a node of many tests has thousands of partitions. Another process asks it,
    because Kafka's client ends its process where the coordinator of the first group of all is only being made.
    """
    from confluent_kafka import KafkaException

    try:
        known = asker_of(url).ask(partial(progress_of, groups=[group]))
    except Unavailable:
        return {}
    except KafkaException as raised:
        if _is_being_made(raised):
            return {}
        raise
    return {(place.topic, place.partition): at for place, at in known.get(group, {}).items()}


def _is_being_made(raised: Exception) -> bool:
    """Whether the coordinator of the first group of all does not answer yet."""
    from confluent_kafka import KafkaError

    return raised.args[0].code() in (
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError._TIMED_OUT,
    )


def is_assigned(url: str, group: str, instances: int = 1) -> bool:
    """Whether so many instances have partitions of a group."""
    from confluent_kafka import KafkaException

    try:
        described = admin_of(url).describe_consumer_groups([group])[group].result(CALL_SECONDS)
    except (KafkaException, TimeoutError):  # the coordinator of the first group of all is only being made
        return False
    holding = [m for m in described.members if m.assignment and m.assignment.topic_partitions]
    return described.state.name == "STABLE" and len(holding) == instances == len(described.members)


class Worker:
    """A consumer in a process of its own: it notes each call of its handler as a line of a file."""

    def __init__(self, process: Forked, notes: Path) -> None:
        self.process = process
        self._notes = notes

    def seen(self) -> list[tuple[str, int]]:
        """The text and the attempt of each call so far."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        return [tuple(json.loads(line)) for line in lines]  # type: ignore[misc]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)


@contextmanager
def worker(url: str, group: str, topic: str, notes: Path, options: Mapping[str, Any]) -> Iterator[Worker]:
    """Run a consumer: a text that begins with `slow` never ends, `bad` fails, `kill` ends it all."""
    process = forked.context().Process(target=_consume, args=(url, group, topic, notes, dict(options)), daemon=True)
    process.start()
    child = Forked(process, io.StringIO(), ())
    try:
        yield Worker(child, notes)
    finally:
        child.kill()
        child.wait(PATIENCE_SECONDS)


def _consume(url: str, group: str, topic: str, notes: Path, options: dict[str, Any]) -> None:
    """The worker's process."""
    import threading

    from notify.client import Consumer
    from notify.client.kafka import feed, ownership

    feed.SESSION_SECONDS = ownership.SESSION_SECONDS = SESSION_SECONDS  # killed, it holds its partitions for so long
    consumer = Consumer(url, group=group, instance=options.pop("instance", None))

    @consumer.subscribe(topic, **options)
    def handle(message: Any) -> None:
        with notes.open("a") as noted:
            noted.write(json.dumps([message.text, message.attempt]) + "\n")
        if message.text.startswith("slow"):
            threading.Event().wait()
        if message.text.startswith("kill"):
            os._exit(9)
        if message.text.startswith("bad"):
            raise RuntimeError("bad")

    consumer.run()
