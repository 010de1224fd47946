"""Reads what Kafka holds at the end of a history, as a client that knows nothing of Notify."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from notify.errors import NotifyError
from tests.history.checker import Record

READ_SECONDS = 600.0
CALL_SECONDS = 20.0


def committed_records(brokers: str, topics: Sequence[str]) -> list[Record]:
    """All committed records of the topics, partition by partition. Raises NotifyError if Kafka does not answer."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "a-plain-reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    deadline = time.monotonic() + READ_SECONDS
    try:
        known = consumer.list_topics(timeout=CALL_SECONDS).topics
        places = [TopicPartition(topic, n, OFFSET_BEGINNING) for topic in topics for n in known[topic].partitions]
        consumer.assign(places)
        records: list[Record] = []
        ended: set[tuple[str, int]] = set()
        while len(ended) < len(places):
            assert time.monotonic() < deadline, (
                f"a reader has {len(records)} records, and {len(ended)} partitions ended"
            )
            for message in consumer.consume(5000, 1.0):
                place = message.topic() or "", message.partition() or 0
                error = message.error()
                if error is None:
                    body = json.loads(message.value() or b"{}")
                    key = (message.key() or b"").decode()
                    records.append(Record(place[0], body["number"], key, place[1], message.offset() or 0))
                    assert key == body["key"], f"{body['number']} has the key {key}"
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(place)
                elif not error.retriable():
                    raise NotifyError(error.str())
    except KafkaException as raised:
        raise NotifyError(raised.args[0].str()) from raised
    finally:
        consumer.close()
    return sorted(records, key=lambda record: (record.topic, record.partition, record.offset))


def open_transactions(brokers: str, topics: Sequence[str]) -> list[str]:
    """A sentence for each partition whose end a reader of committed records cannot see."""
    from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 0})
    try:
        known = admin.list_topics(timeout=CALL_SECONDS).topics
        asked = {
            TopicPartition(topic, n): OffsetSpec.latest()  # type: ignore[no-untyped-call]
            for topic in topics
            if topic in known
            for n in known[topic].partitions
        }
        ends = {}
        for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED):
            answers = admin.list_offsets(asked, isolation_level=level, request_timeout=CALL_SECONDS)
            ends[level] = {(p.topic, p.partition): a.result(CALL_SECONDS).offset for p, a in answers.items()}
    except (KafkaException, TimeoutError) as raised:
        return [f"Kafka does not say where partitions end: {raised}"]
    seen = ends[IsolationLevel.READ_COMMITTED]
    return [
        f"a transaction in partition {n} of {topic} is open: committed records end at {seen[topic, n]}, all at {end}"
        for (topic, n), end in ends[IsolationLevel.READ_UNCOMMITTED].items()
        if seen[topic, n] < end
    ]
