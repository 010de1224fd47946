"""The names of dead-letter topics and retry topics, and the ids under which dead letters are sent again."""

from __future__ import annotations

from notify.protocol import ids

RETRY_PREFIX = "retry/"
DEAD_LETTER_PREFIX = "dead-letter."
"""This prefix and a group's name form the name of the group's dead-letter topic."""
_DROPPED = "dropped/"


def dead_letter_topic(group: str) -> str:
    """The topic of a group's dead letters. Instances of a broadcast (`group@instance`) share their group's topic."""
    return DEAD_LETTER_PREFIX + group.partition("@")[0]


def retry_topic(group: str, topic: str) -> str:
    """The topic of the messages of `topic` that the group receives again. Users cannot make a topic of this name."""
    return f"{retry_prefix(group)}{topic}"


def retry_prefix(group: str) -> str:
    """The prefix of the names of a group's retry topics. No other group has it, because group names have no slash."""
    return f"{RETRY_PREFIX}{group}/"


def dropped_topic(group: str) -> str:
    """The topic that records which dead letters of a group an administrator dropped; nobody subscribes to it."""
    return f"{retry_prefix(group)}{_DROPPED}"


def is_dropped_topic(name: str) -> bool:
    """Whether a name is that of `dropped_topic` for some group."""
    return name.startswith(RETRY_PREFIX) and name.endswith(f"/{_DROPPED}")


def redriven_id(topic: str, transaction_id: bytes, offset: int) -> bytes:
    """The transaction id under which a dead letter is sent again, or recorded as dropped.

    The id is a UUID of version 7 that follows from the place of the dead letter, so that only one of the two happens,
    and only once.

    `topic` is the group's dead-letter topic: dead letters of one transaction may have the same offset in two groups.
    """
    return ids.derived(transaction_id, offset.to_bytes(8) + topic.encode())
