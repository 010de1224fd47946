"""Leaving a consumer group within a bound.

Kafka's client may hang where it is closed within a rebalance, and its thread with it. A member that hangs goes on with
heartbeats, so that its partitions stand still until its `max.poll.interval.ms` is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from notify.kafka.bounded import Hangs, within

log = logging.getLogger("notify.kafka")

LEAVE_SECONDS = 15.0
"""For a broker that stands still nobody waits longer: the group notices by itself that the member is gone."""


def leave(group: str, end: Callable[[], object], seconds: float = LEAVE_SECONDS) -> bool:
    """Call what ends a member's clients, in a thread of its own. Whether it has ended within so many seconds.

    If not, the clients are left to themselves: nothing else may use them any more. Raises what `end` raises.
    """
    try:
        within(seconds, end)
    except Hangs:
        log.warning("Kafka's client does not leave group %s within %g s, and is left to itself", group, seconds)
        return False
    return True
