"""Delayed messages that their topics refused permanently when they were due: a list that an operator decides about.

| topic | content |
|---|---|
| `notify-delayed.refused` | the messages, each with the brokers' reason; they are never removed |
| `notify-undelivered` | the decisions: key = offset in the other topic, value = Decision as JSON; compacted |

A decision contains the id of its message: if the first topic is deleted and made again, other messages get the same
offsets. A message that is sent after all is written in one transaction with the decision, so that it is sent once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message

from notify.errors import InvalidRequest
from notify.kafka import records
from notify.kafka.brokers import CALL_SECONDS, translated
from notify.kafka.cluster import Cluster
from notify.kafka.records import Headers
from notify.kafka.rights import of_decider
from notify.kafka.table import PARTITION, KafkaTable, every
from notify.kafka.topics import Topics
from notify.kafka.transactional import TransactionalProducer, flush
from notify.protocol.limits import digits

TOPIC = f"{records.DELAYED}.refused"
SOURCE = "notify-delayed"
"""The name of this list among the sources of bridges and relays."""
WAITING, SENT, DROPPED = "WAITING", "SENT", "DROPPED"
STATES = (WAITING, SENT, DROPPED)
CODE = "refused"
_TRANSACTIONAL_ID = "notify-undelivered"
_TRANSACTION_MILLISECONDS = 10_000


class Decision(msgspec.Struct, frozen=True):
    """An operator's decision about the message with this id and time of refusal."""

    state: str
    reason: str
    id: str = ""
    refused_us: int = 0

    def is_of(self, message: Undelivered) -> bool:
        """Whether it is about this message, which is at the offset of the decided one."""
        return (self.id, self.refused_us) == (message.id, message.refused_us)


DECISIONS: KafkaTable[int, Decision] = KafkaTable.of_json("notify-undelivered", Decision, key_of=digits)
"""The decisions by the offset of their messages in the other topic."""


@dataclass(frozen=True, slots=True)
class Undelivered:
    """One message of the list. `headers`: the headers with which it is sent to its topic."""

    offset: int
    id: str
    topic: str
    detail: str
    refused_us: int
    key: bytes | None
    value: bytes
    headers: Headers

    @classmethod
    def of(cls, offset: int, at_us: int, key: bytes | None, value: bytes, headers: Headers) -> Undelivered:
        """The message of a record that was refused at `at_us` (microseconds since 1970)."""
        message_headers = [each for each in headers if each[0] not in (records.DUE, records.TARGET, records.REASON)]
        return cls(
            offset,
            records.header(headers, records.ID) or f"{TOPIC}@{offset}",
            records.header(headers, records.TARGET) or "",
            records.header(headers, records.REASON) or "",
            at_us,
            key,
            value,
            message_headers,
        )


class Decisions:
    """All decisions, by the offset of their messages."""

    def __init__(self, by_offset: Mapping[int, Decision]) -> None:
        self._by_offset = by_offset

    def of(self, message: Undelivered) -> Decision | None:
        """The decision about a message; None while it waits."""
        decision = self._by_offset.get(message.offset)
        return decision if decision is not None and decision.is_of(message) else None


class UndeliveredList:
    """The list of one cluster. Its calls block."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def decisions(self) -> Decisions:
        """All decisions. Raises Unavailable."""
        return Decisions(DECISIONS.rows(self._cluster))

    def read(self) -> Iterator[Undelivered]:
        """All refused messages, the oldest first. Raises Unavailable."""
        for record in every(self._cluster, TOPIC):
            at_us = record.timestamp()[1] * 1000
            headers = records.listed(record)
            yield Undelivered.of(record.offset() or 0, at_us, record.key(), record.value() or b"", headers)

    def retry(self, ids: Collection[str] | None, reason: str) -> list[dict[str, Any]]:
        """Send waiting messages to their topics: those with these ids, or (None) all; the result for each.

        Raises Unavailable.
        """
        return self._decide(ids, Decision(SENT, reason))

    def drop(self, ids: Collection[str] | None, reason: str) -> list[dict[str, Any]]:
        """Drop waiting messages, which are then never sent; ids, result and errors as in `retry`."""
        return self._decide(ids, Decision(DROPPED, reason))

    def _decide(self, ids: Collection[str] | None, decision: Decision) -> list[dict[str, Any]]:
        DECISIONS.make(self._cluster)
        items: list[dict[str, Any]] = []
        try:
            producer = self._producer()  # from here on no other process can commit a decision
            earlier = self.decisions()
            topics = Topics(self._cluster)
            for message in self.read():
                if producer.is_spent:
                    producer = self._producer()
                    earlier = self.decisions()  # another process may have decided before it was fenced
                if earlier.of(message) is None and (ids is None or message.id in ids):
                    items.append({"id": message.id, "topic": message.topic} | _carried_out(
                        producer, topics, message, decision))  # fmt: skip
        except KafkaException as raised:
            raise translated(raised.args[0], self._cluster, of_decider()) from raised
        return items

    def _producer(self) -> TransactionalProducer:
        """A producer, which fences all earlier producers of decisions."""
        settings = {"transactional.id": _TRANSACTIONAL_ID, "transaction.timeout.ms": _TRANSACTION_MILLISECONDS}
        producer = self._cluster.transactional_producer(settings)
        producer.init_transactions(CALL_SECONDS)
        return producer


def _carried_out(
    producer: TransactionalProducer, topics: Topics, message: Undelivered, decision: Decision
) -> dict[str, Any]:
    """Carry out a decision in its own transaction, so that a message that is refused again delays no other."""
    errors: list[KafkaError] = []

    def answered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            errors.append(error)

    try:
        if decision.state == SENT:
            topics.largest(message.topic)  # makes the topic if it is missing
    except InvalidRequest as refused:
        return {"status": refused.status, "detail": str(refused)}
    producer.begin_transaction()
    try:
        if decision.state == SENT:
            producer.produce(message.topic, message.value, message.key, headers=message.headers, on_delivery=answered)
            flush(producer, lambda: errors, CALL_SECONDS)
        decided = msgspec.structs.replace(decision, id=message.id, refused_us=message.refused_us)
        key, value = DECISIONS.record(message.offset, decided)
        producer.produce(DECISIONS.topic, value, key, PARTITION)
        flush(producer, lambda: errors, CALL_SECONDS)
        if not errors:
            producer.commit_transaction(CALL_SECONDS)
            return {"status": 200}
    except KafkaException as raised:
        errors.append(raised.args[0])
    producer.abort_transaction(CALL_SECONDS)
    return {"status": 422, "detail": f"Kafka: {errors[0].str()}"}
