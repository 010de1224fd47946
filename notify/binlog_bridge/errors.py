"""The errors of a bridge. Those of the first group last until an operator acts, and name the remedy.

Unfit           a candidate for the source cannot be read as it is set up
Purged          the source does not have what follows the position
Unreadable      continuing would leave messages out
Superseded      another bridge has taken over the source

Damaged         an event is damaged, perhaps only in the network
SameServerId    another reader has this bridge's identity, perhaps its own last connection
TargetAway      the target does not answer, or accepts nothing for now

Warnings logs those that pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from notify.errors import InvalidRequest, StorageFailed, Unavailable

log = logging.getLogger("notify.binlog_bridge")

WARN_SECONDS = 60.0


class Unfit(InvalidRequest):
    """A candidate cannot be read until an operator changes something there. Another candidate may be readable."""


def refuse(stops: Iterable[object]) -> None:
    """Raises Unfit with all these findings, if there are any."""
    if shown := [f"- {finding}" for finding in stops]:
        raise Unfit("this source cannot be bridged without gaps:\n" + "\n".join(shown))


class Purged(StorageFailed):
    """The source does not have the events that follow the position. Nothing may be skipped silently."""

    code = "purged_position"


class Unreadable(StorageFailed):
    """The log cannot be read on without leaving messages out: the bridge stops."""

    code = "unreadable_log"


class Superseded(StorageFailed):
    """Another bridge has taken over this source."""

    code = "superseded"


class Damaged(Unavailable):
    """An event is damaged, in the network or in the source's file."""

    code = "damaged_event"


class SameServerId(Unavailable):
    """Another connection reads with this bridge's server id; for a moment it may be the bridge's own last one."""

    code = "same_server_id"


class TargetAway(Unavailable):
    """The target does not answer, or accepts nothing for now: another candidate for the source would not help."""


class Warnings:
    """Logs repeated events: each kind at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def say(self, what: str, detail: object) -> None:
        """`what`: the failure and its remedy."""
        now = self._clock()
        if now - self._logged_at.get(what, -WARN_SECONDS) >= WARN_SECONDS:
            self._logged_at[what] = now
            log.warning("%s: %s", what, str(detail)[:300])
