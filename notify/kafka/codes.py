"""Error codes of Kafka's client, grouped by their meaning."""

from __future__ import annotations

from confluent_kafka import KafkaError

AWAY = frozenset((KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE))
"""The brokers do not answer."""
FENCED = frozenset((KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH))
"""Another producer with the same transactional id has begun."""
GONE = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION))
"""The brokers do not know the topic or partition: it was deleted, or made a moment ago."""
TOO_LARGE = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE))
"""A topic refuses a record of this size."""
NEVER_STORED = GONE | TOO_LARGE | {
    KafkaError.TOPIC_EXCEPTION, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.INVALID_RECORD,
}  # fmt: skip
"""A topic refuses a record permanently, so that certainly no broker has stored it."""
