"""A consumer group's names in Kafka: its topics, its Kafka group, and the partition of its retry topic for each wait.

| name | content |
|---|---|
| Kafka group `{group}`, broadcast: `{group}@{instance}` | the positions, and records done after them (progress.py) |
| topic `retry.{group}` | messages that failed in mode `shared`, until they are due |
| topic `dead-letter.{group}` | messages whose attempts are used up, or whose handler said so |
| topic `notify-owner.{group}` | nothing: the owner of its one partition owns the group's topics (exclusive, failover) |
| topic `notify-control` | an operator's requests to groups: pauses and resets (control.py) |
"""

from __future__ import annotations

import math

RETRY_PARTITIONS = 16
"""The partitions of a retry topic, one for each doubling of the wait: so records are nearly ordered by due time."""
FIRST_WAIT_SECONDS = 0.1
"""The longest wait in the first partition, in seconds; the last has all waits from about half an hour on."""
RETRY, DEAD_LETTER, OWNER = "retry.", "dead-letter.", "notify-owner."
OWN_TOPICS = (RETRY, DEAD_LETTER, "notify-")
"""The prefixes of Notify's own topics; a pattern does not match these topics."""


def kafka_group(group: str, broadcast_to: str | None = None) -> str:
    """The Kafka group of a consumer group; in a broadcast each instance has its own Kafka group."""
    return group if broadcast_to is None else f"{group}@{broadcast_to}"


def consumer_group(kafka_group: str) -> str:
    """The consumer group of a Kafka group; its dead letters, retries and controls use this name."""
    return kafka_group.partition("@")[0]


def retry_topic(group: str) -> str:
    return RETRY + group


def dead_letter_topic(group: str) -> str:
    return DEAD_LETTER + group


def transactional_id(kafka_group: str, instance: str = "") -> str:
    """The transactional id of an instance of a Kafka group, or of the group's owner, which fences the previous owner.

    Names have no slash, and no other part of Notify uses this prefix, so that ids of different users never collide.
    """
    return f"notify-group.{kafka_group}/{instance}" if instance else f"notify-group.{kafka_group}"


def owner_topic(group: str) -> str:
    return OWNER + group


def retry_partition(wait_seconds: float) -> int:
    """The partition of a retry topic for a wait; a message that is due immediately is in the first partition."""
    if wait_seconds <= FIRST_WAIT_SECONDS:
        return 0
    return min(math.ceil(math.log2(wait_seconds / FIRST_WAIT_SECONDS)), RETRY_PARTITIONS - 1)
