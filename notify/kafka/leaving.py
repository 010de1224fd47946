"""Leaving a consumer group within a bound.

Kafka's client may hang where it is closed within a rebalance, and its thread with it. A member that hangs goes on with
heartbeats, so that its partitions stand still until its `max.poll.interval.ms` is over.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

log = logging.getLogger("notify.kafka")

LEAVE_SECONDS = 15.0
"""For a broker that stands still nobody waits longer: the group notices by itself that the member is gone."""


def leave(group: str, end: Callable[[], object], seconds: float = LEAVE_SECONDS) -> bool:
    """Call what ends a member's clients, in a thread of its own. Whether it has ended within so many seconds.

    If not, the clients are left to themselves: nothing else may use them any more. Raises what `end` raises.
    """
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(end())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="notify-kafka-leaves", daemon=True).start()
    if not concurrent.futures.wait([done], seconds).done:
        log.warning("Kafka's client does not leave group %s within %g s, and is left to itself", group, seconds)
        return False
    done.result()
    return True
