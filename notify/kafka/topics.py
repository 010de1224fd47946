"""Topics of messages: makes them explicitly, so that brokers never make them by default; knows their largest record.

A topic that is made here accepts every legal message, even if the brokers' default is smaller.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

from notify.errors import InvalidRequest
from notify.kafka.brokers import CALL_SECONDS, make_topics
from notify.kafka.calls import answered
from notify.kafka.cluster import Cluster
from notify.kafka.groups import OWN_TOPICS
from notify.kafka.records import Headers
from notify.protocol.limits import LIMITS, check_name, digits
from notify.runtime.program_log import program_log

log = program_log("notify.kafka")

LOOK_SECONDS = 60.0
"""How long the size of a topic's largest record is cached; it is read again for a record that is too large."""
RECORD_BYTES, HEADER_BYTES = 128, 16
"""The most bytes of a record alone in its batch without its key, value and headers; and of a header without its
texts."""
LARGEST_RECORD = LIMITS.message_bytes + LIMITS.key_bytes + LIMITS.headers_bytes + (16 << 10)
"""The size of the largest legal message with Notify's headers."""
UNKNOWN = 1 << 30
"""The assumed size if this user may not see a topic's configuration: the broker itself refuses larger records."""


class Topics:
    """The topics that one publisher writes to, with their largest records."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._largest: dict[str, tuple[int, float]] = {}
        """The size of the largest record of each topic, and when it was read."""
        self._compacted: set[str] = set()
        """Those that Kafka compacts."""

    def largest(self, name: str, *, refresh: bool = False) -> int:
        """The size, in bytes, of the largest record that a topic accepts; the topic is made if it is missing.

        Raises InvalidRequest for an illegal name, and if the brokers refuse to make the topic; Unavailable if they do
        not answer. `refresh`: read the size again.
        """
        cached = self._largest.get(name)
        if cached is not None and not refresh and time.monotonic() - cached[1] < LOOK_SECONDS:
            return cached[0]
        check_name("topic", name)
        if name.startswith(OWN_TOPICS):
            raise InvalidRequest(f"topic {name!r} is one of Notify's own in Kafka: give it another name", "own_topic")
        make_topics(self._cluster, [name], largest=LARGEST_RECORD)
        size = self._look(name)
        self._largest[name] = size, time.monotonic()
        return size

    def _look(self, name: str) -> int:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        admin = self._cluster.admin()  # kept in a variable, because its calls end with it
        try:
            config = answered(admin.describe_configs([resource], request_timeout=CALL_SECONDS)[resource], CALL_SECONDS)
        except KafkaException:
            return UNKNOWN
        policy = config.get("cleanup.policy")
        is_compacted = policy is not None and "compact" in str(policy.value)
        if is_compacted and name not in self._compacted:
            log.warning(
                "Kafka compacts topic %r: of a key's messages it deletes all but the last, perhaps before a group has "
                "handled them, and it refuses those without a key; set its cleanup.policy to delete", name,
            )  # fmt: skip
        (self._compacted.add if is_compacted else self._compacted.discard)(name)
        return whole(config, "max.message.bytes") or UNKNOWN


def whole(config: Mapping[str, Any], name: str) -> int | None:
    """A whole number of a topic's settings, -1 included; None if the brokers tell none."""
    entry = config.get(name)
    text = str(entry.value) if entry is not None else ""
    return -1 if text == "-1" else digits(text)


def record_bytes(key: bytes | None, value: bytes, headers: Headers) -> int:
    """The largest possible size of a record, in bytes, alone in its batch and uncompressed."""
    size = RECORD_BYTES + len(key or b"") + len(value)
    for name, text in headers:
        size += HEADER_BYTES + len(name) + len(text or b"")
    return size
