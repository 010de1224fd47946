"""Names that a storage gives: topics of dead letters and of retries, and the ids under which letters are sent again."""

from __future__ import annotations

from notify import ids

RETRY_PREFIX = "retry/"
DEAD_LETTER_PREFIX = "dead-letter."
"""The topic of this name and a group's holds the group's dead letters."""


def dead_letter_topic(group: str) -> str:
    """The topic of a group's dead letters; the instances of a broadcast (`group@instance`) share their group's."""
    return DEAD_LETTER_PREFIX + group.partition("@")[0]


def retry_topic(group: str, topic: str) -> str:
    """The topic of what a group gets again; no user's topic has such a name."""
    return f"{retry_prefix(group)}{topic}"


def retry_prefix(group: str) -> str:
    """How the names of a group's retry topics begin; no other group's begin so, since no name has a slash."""
    return f"{RETRY_PREFIX}{group}/"


def dropped_topic(group: str) -> str:
    """The topic of the notes of letters that a group's administrators dropped; nobody subscribes to it."""
    return f"{retry_prefix(group)}dropped/"


def redriven_id(topic: str, transaction_id: bytes, offset: int) -> bytes:
    """The transaction id under which a dead letter is sent again, or noted as dropped: so one of the two happens, once.

    It is a UUID of version 7, fixed by the letter's place.

    `topic` is the group's dead-letter topic: letters of one transaction may have the same offset in two groups.
    """
    return ids.derived(transaction_id, offset.to_bytes(8) + topic.encode())


def redriven_id_without_topic(transaction_id: bytes, offset: int) -> bytes:
    """The id under which versions up to November 2026 sent a dead letter again, the same in each group."""
    return ids.derived(transaction_id, offset.to_bytes(8))
