"""Error codes of Kafka's client, by what they mean."""

from __future__ import annotations

from confluent_kafka import KafkaError

AWAY = frozenset((KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE))
"""The brokers do not answer."""
FENCED = frozenset((KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH))
"""Another producer has begun with this one's transactional id."""
GONE = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION))
"""The brokers know no such topic or partition: it was deleted, or made a moment ago."""
