"""Renewals: renews the leases of messages while their handlers run, and logs why that came too late."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger("notify.consumer")

SHARE = 3
"""A lease is renewed after this part of its time, so that a request may fail, or take long."""
TELL_SECONDS = 60.0
"""A blocked event loop is logged at most once in this time."""


class Renewals:
    """The renewals of one session. Belongs to one event loop."""

    def __init__(self, lease: float, renew: Callable[[str], None]) -> None:
        """`lease`: the seconds that a lease lasts; `renew` asks the server to renew the lease of a receipt."""
        self._lease = lease
        self._renew = renew
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._told_at = float("-inf")

    def begin(self, receipt: str) -> None:
        """Renew a lease from now on, until `end`."""
        self._timers[receipt] = asyncio.get_running_loop().call_later(self._lease / SHARE, self._renew_now, receipt)

    def end(self, receipt: str) -> None:
        """The handler of this message has ended: do not renew its lease any more."""
        timer = self._timers.pop(receipt)
        timer.cancel()
        self._look(timer)

    def close(self) -> None:
        """Renew no lease any more."""
        for timer in self._timers.values():
            timer.cancel()

    def _renew_now(self, receipt: str) -> None:
        self._look(self._timers[receipt])
        self._renew(receipt)
        self.begin(receipt)

    def _look(self, timer: asyncio.TimerHandle) -> None:
        """Log that a renewal is so late that the lease has expired: this loop did not run in the meantime."""
        now = asyncio.get_running_loop().time()
        late = now - timer.when()
        if late > self._lease * (1 - 1 / SHARE) and now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            log.warning(
                "the event loop stood still for more than %.1f s, so that leases (of %g s) were not renewed: messages "
                "come again, also those whose handlers have returned. A handler blocks the loop, or the process was "
                "stopped: await what takes time, or use Consumer, which runs handlers in threads",
                late, self._lease,
            )  # fmt: skip
