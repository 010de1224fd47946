"""A consumer group's names in Kafka: its topics, its Kafka group, and the partition of its retry topic for each wait.

| name | holds |
|---|---|
| Kafka group `{group}`, broadcast: `{group}@{instance}` | the positions, with what is done behind them (progress.py) |
| topic `retry.{group}` | messages that failed in mode `shared`, until they are due |
| topic `dead-letter.{group}` | messages whose attempts are used up, or whose handler said so |
| topic `notify-owner.{group}` | nothing: whoever has its one partition owns the group's topics (exclusive, failover) |
| topic `notify-control` | what an operator asks of groups: to pause, to go back (control.py) |
"""

from __future__ import annotations

import math

RETRY_PARTITIONS = 16
"""The partitions of a retry topic, one for each doubling of the wait: the first record of one is nearly due first."""
FIRST_WAIT_SECONDS = 0.1
"""The longest wait in the first of them, in seconds; the last has all waits from about half an hour on."""
OLD_RETRY_SECONDS = (1, 5, 30, 300)
"""Earlier versions had one retry topic for each of these waits. They are read where they are there, never written."""
RETRY, DEAD_LETTER, OWNER = "retry.", "dead-letter.", "notify-owner."
OWN_TOPICS = (RETRY, DEAD_LETTER, "notify-")
"""Topics whose names begin so are no topics of messages: a pattern does not stand for them."""


def kafka_group(group: str, broadcast_to: str | None = None) -> str:
    """The Kafka group whose offsets are a consumer group's; of a broadcast each instance has its own."""
    return group if broadcast_to is None else f"{group}@{broadcast_to}"


def consumer_group(kafka_group: str) -> str:
    """The consumer group whose offsets a Kafka group has; its letters, retries and wishes go by this name."""
    return kafka_group.partition("@")[0]


def retry_topic(group: str) -> str:
    return RETRY + group


def old_retry_topics(group: str) -> list[str]:
    return [f"{RETRY}{group}.{seconds}s" for seconds in OLD_RETRY_SECONDS]


def dead_letter_topic(group: str) -> str:
    return DEAD_LETTER + group


def transactional_id(kafka_group: str, instance: str = "") -> str:
    """The transactional id of an instance of a Kafka group, or that of the group's owner, which fences the last one.

    No name has a slash, and no other part of Notify begins its ids so: nobody fences somebody else.
    """
    return f"notify-group.{kafka_group}/{instance}" if instance else f"notify-group.{kafka_group}"


def owner_topic(group: str) -> str:
    return OWNER + group


def retry_partition(wait_seconds: float) -> int:
    """The partition of a retry topic where a message waits so long. A message that is due at once is in the first."""
    if wait_seconds <= FIRST_WAIT_SECONDS:
        return 0
    return min(math.ceil(math.log2(wait_seconds / FIRST_WAIT_SECONDS)), RETRY_PARTITIONS - 1)
