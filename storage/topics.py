"""A topic and its policies: its number of queues, its retention, and how far its groups may lag behind."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from notify.errors import InvalidRequest


class Flush(enum.IntEnum):
    """Where a half or a message is when the server answers. In each case the next sync writes it to the disk."""

    MEMORY = 0  # in the server's memory: lost if the server's process dies
    ASYNC = 1  # handed to the operating system: lost if the machine loses power
    SYNC = 2  # on the disk


class Backlog(enum.IntEnum):
    """The policy for messages to a topic whose slowest group lags as far behind as the topic allows."""

    REFUSE = 0  # 429: the producer sends it again later
    HOLD = 1  # the request waits for a moment, then 429
    DROP_OLDEST = 2  # the oldest messages are dropped, settled or not


@dataclass(slots=True)
class Topic:
    name: str
    queues: int = 1
    retention_us: int = 0  # 0: the storage's default
    flush: Flush = Flush.SYNC
    retention_bytes: int = 0  # payload bytes to keep; 0: no bound
    ttl_us: int = 0  # 0: messages do not expire
    backlog: int = 0  # how many messages the slowest group may lag behind; 0: no bound
    backlog_policy: Backlog = Backlog.REFUSE
    grown: tuple[tuple[int, ...], ...] = ()
    """Set by the storage. For each time that the number of queues grew: the next offset of each queue at that time. A
    key may belong to another queue from these offsets on."""
    number: int = field(default=0, compare=False)
    """Set by the storage. A topic that is deleted and made again gets a higher number."""


MOST_GROWN = 64
"""How often a topic may grow while messages from before its first growth are retained."""


def with_growth(
    topic: str, grown: tuple[tuple[int, ...], ...], ends: tuple[int, ...], starts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """`grown` with another growth, at the next offsets `ends`.

    Growths before the first retained message of every queue (`starts`) are left out. Raises InvalidRequest if the topic
    would then have grown more than MOST_GROWN times.
    """
    retained = [growth for growth in grown if any(start < end for start, end in zip(starts, growth, strict=False))]
    if len(retained) >= MOST_GROWN:
        raise InvalidRequest(
            f"topic {topic!r} grew {MOST_GROWN} times while its first messages are retained, and the order of its keys "
            "needs each growth: give the topic more queues in one step, or wait until retention has dropped them",
            "too_many_growths",
        )
    # Empty queues count too: a half may be stored whose key now belongs to another queue.
    return (*retained, ends)
