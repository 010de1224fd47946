"""Leaves a consumer group within a time bound.

Kafka's client, and its thread, may hang if it is closed during a rebalance. A hanging member still sends heartbeats, so
that nobody reads its partitions until its `max.poll.interval.ms` is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from notify.kafka.bounded import Hangs, within

log = logging.getLogger("notify.kafka")

LEAVE_SECONDS = 15.0
"""How long to wait for a broker that does not answer: the group notices by itself that the member is gone."""


def leave(group: str, end: Callable[[], object], seconds: float = LEAVE_SECONDS) -> bool:
    """Call `end`, which closes a member's clients, in a thread; whether it returned within `seconds`.

    If not, the clients are abandoned, and must not be used any more. Raises the errors of `end`.
    """
    try:
        within(seconds, end)
    except Hangs:
        log.warning("Kafka's client does not leave group %s within %g s, and is left to itself", group, seconds)
        return False
    return True
