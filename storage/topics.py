"""A topic and its policies: how many queues it has, what it keeps, and how far its groups may be behind."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from notify.errors import InvalidRequest


class Flush(enum.IntEnum):
    """Where a half or a message is when it is answered. All of them go to the disk with the next sync."""

    MEMORY = 0  # in the server's memory: lost with its process
    ASYNC = 1  # handed to the operating system: lost with the machine's power
    SYNC = 2  # on the disk


class Backlog(enum.IntEnum):
    """The policy for a message to a topic whose slowest group is as far behind as the topic allows."""

    REFUSE = 0  # 429, to be sent again later
    HOLD = 1  # the producer waits for a moment, then 429
    DROP_OLDEST = 2  # the oldest go, settled or not


@dataclass(slots=True)
class Topic:
    name: str
    queues: int = 1
    retention_us: int = 0  # 0: the storage's default
    flush: Flush = Flush.SYNC
    retention_bytes: int = 0  # payload bytes to keep; 0: no bound
    ttl_us: int = 0  # 0: messages do not expire
    backlog: int = 0  # messages that the slowest group may be behind; 0: no bound
    backlog_policy: Backlog = Backlog.REFUSE
    grown: tuple[tuple[int, ...], ...] = ()
    """Kept by the storage. Each time the number of queues grew: the next offset of each queue that there was. A key
    may belong to another queue since."""
    number: int = field(default=0, compare=False)
    """Given by the storage. A topic that is deleted and made again has a higher one."""


MOST_GROWN = 64
"""How often a topic may grow while messages from before its first growth are retained."""


def with_growth(
    topic: str, grown: tuple[tuple[int, ...], ...], ends: tuple[int, ...], starts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """`grown` with one more growth, at these next offsets; those before everything that is retained are forgotten.

    Raises InvalidRequest where a topic would grow for more than the MOST_GROWNth time.
    """
    kept = [at for at in grown if any(start < end for start, end in zip(starts, at, strict=False))]
    if len(kept) >= MOST_GROWN:
        raise InvalidRequest(
            f"topic {topic!r} grew {MOST_GROWN} times while its first messages are retained, and each growth is kept "
            "for the order of its keys: give it more queues at once, or wait until retention has dropped them",
            "too_many_growths",
        )
    # Also where nothing is in its queues yet: a half may be stored already, whose key belongs to another queue now.
    return (*kept, ends)
