"""Renewals: renews the leases of messages that wait for their handlers or are with them, by one timer, and logs why
that came too late."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger("notify.consumer")

SHARE = 3
"""A lease is renewed after this part of its time, so that a request may fail, or take long."""
TOGETHER = 6
"""Leases that are due within this part of their time are renewed together, in one request."""
TELL_SECONDS = 60.0
"""A blocked event loop is logged at most once in this time."""
Held = TypeVar("Held", bound=Hashable)


class Renewals(Generic[Held]):
    """The renewals of one session. Belongs to one event loop."""

    def __init__(self, lease: float, renew: Callable[[Held], None]) -> None:
        """`lease`: the seconds that a lease lasts; `renew` asks the server to renew a lease that is held."""
        self._lease = lease
        self._renew = renew
        self._loop = asyncio.get_running_loop()
        self._due: OrderedDict[Held, float] = OrderedDict()
        """When each lease is renewed next. They all last equally long, so that the first one comes first."""
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")

    def begin(self, held: Held) -> None:
        """Renew a lease from now on, until `end`."""
        self._due[held] = self._loop.time() + self._lease / SHARE
        if self._timer is None:
            self._wait()

    def look(self, held: Held) -> None:
        """A handler has returned: log if the renewal of its lease is so late that the lease has expired, because this
        loop did not run in the meantime."""
        due = self._due.get(held)
        now = self._loop.time()
        if due is None or now - due <= self._lease * (1 - 1 / SHARE) or now - self._told_at < TELL_SECONDS:
            return
        self._told_at = now
        log.warning(
            "the event loop stood still for more than %.1f s, so that leases (of %g s) were not renewed: messages "
            "come again, also those whose handlers have returned. A handler blocks the loop, or the process was "
            "stopped: await what takes time, or use Consumer, which runs handlers in threads",
            now - due, self._lease,
        )  # fmt: skip

    def end(self, held: Held) -> None:
        """No message of this lease is open any more: do not renew it."""
        self._due.pop(held, None)

    def close(self) -> None:
        """Renew no lease any more."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_at(next(iter(self._due.values())), self._renew_due)

    def _renew_due(self) -> None:
        self._timer = None
        now = self._loop.time()
        for held, due in list(self._due.items()):
            if due > now + self._lease / TOGETHER:
                break
            self.look(held)
            self._renew(held)
            del self._due[held]  # it is the last one now
            self._due[held] = now + self._lease / SHARE
        if self._due:
            self._wait()
