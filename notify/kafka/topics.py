"""Topics of messages: made explicitly, never by a broker for the sake of a record, and the largest record of each.

A topic that is made here takes every legal message, also where the brokers' default is smaller.
"""

from __future__ import annotations

import time

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

from notify.errors import InvalidRequest
from notify.kafka.answers import answered
from notify.kafka.brokers import CALL_SECONDS, make_topics
from notify.kafka.cluster import Cluster
from notify.kafka.groups import OWN_TOPICS
from notify.kafka.records import Headers
from notify.limits import LIMITS, check_name

LOOK_SECONDS = 60.0
"""How old the size of a topic's largest record may be; one that is too large has it looked up anew."""
RECORD_BYTES, HEADER_BYTES = 128, 16
"""The most that a record has besides its key, value and headers, alone in its batch; and a header besides its texts."""
LARGEST_RECORD = LIMITS.message_bytes + LIMITS.key_bytes + LIMITS.headers_bytes + (16 << 10)
"""A legal message with Notify's headers."""
UNKNOWN = 1 << 30
"""The largest record of a topic whose configuration this user may not see: the broker itself refuses larger ones."""


class Topics:
    """The topics that one publisher writes to."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._largest: dict[str, tuple[int, float]] = {}
        """The bytes of the largest record of a topic, and when that was looked up."""

    def largest(self, name: str, *, anew: bool = False) -> int:
        """The bytes of the largest record that a topic takes; the topic is made if it is missing.

        Raises InvalidRequest for a name that no message's topic has, and for a topic that the brokers refuse to make,
        Unavailable where they do not answer.
        """
        known = self._largest.get(name)
        if known is not None and not anew and time.monotonic() - known[1] < LOOK_SECONDS:
            return known[0]
        check_name("topic", name)
        if name.startswith(OWN_TOPICS):
            raise InvalidRequest(f"topic {name!r} is one of Notify's own in Kafka: give it another name", "own_topic")
        make_topics(self._cluster, [name], largest=LARGEST_RECORD)
        size = self._look(name)
        self._largest[name] = size, time.monotonic()
        return size

    def _look(self, name: str) -> int:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        admin = self._cluster.admin()  # its calls end with it
        try:
            config = answered(admin.describe_configs([resource], request_timeout=CALL_SECONDS)[resource], CALL_SECONDS)
        except KafkaException:
            return UNKNOWN
        return int(config["max.message.bytes"].value)


def record_bytes(key: bytes | None, value: bytes, headers: Headers) -> int:
    """The most bytes that a record takes, alone in its batch and uncompressed."""
    size = RECORD_BYTES + len(key or b"") + len(value)
    for name, text in headers:
        size += HEADER_BYTES + len(name) + len(text or b"")
    return size
