"""Reads the records again before an unknown caller is refused: another server may just have made the credential.

The caller passes the function that reads the records. This module bounds how often it is called for unknown callers
and how long they wait, and remembers the ids for which it found nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from notify.errors import Unavailable
from notify.runtime import faults

LOOKS_A_SECOND = 20
"""The most looks in a second, for all waiting requests together."""
WAIT_SECONDS = 2.0
"""How long a request waits for a look: less than the SDK waits for storing a half, so that it tries again in time."""
UNKNOWN = 10_000
"""The most ids that are remembered as unknown."""
UNKNOWN_SECONDS = 1.0
"""How long an id is remembered as unknown."""

_AWAY = "the credential cannot be looked up now, because the server's database does not answer; try again"


class Lookup:
    """Reads the records on behalf of all waiting requests: one look at a time, at most LOOKS_A_SECOND.

    So any number of unknown callers costs the database no more than one does, and valid tokens are still accepted.
    """

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        """`look` reads the records. It may be cancelled; any exception means that the records cannot be read."""
        self._look = look
        self._one_at_a_time = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        """The number of the look that ended last."""
        self._failure: Exception | None = None
        """Why the last look failed; None if it succeeded."""
        self._not_before = 0.0
        """When the next look may begin, by the loop's clock."""

    async def look(self) -> None:
        """Return when a look has ended that began after this call: an earlier one may have missed a new credential.

        Raises Unavailable if the records cannot be read within WAIT_SECONDS.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                failure = await self._after(self._begun)
        except TimeoutError:
            raise Unavailable(_AWAY) from None
        if failure is not None:
            raise Unavailable(_AWAY) from failure

    async def _after(self, begun: int) -> Exception | None:
        """Why the first look after number `begun` failed; None if it succeeded."""
        async with self._one_at_a_time:
            if self._ended <= begun:
                clock = asyncio.get_running_loop().time
                await asyncio.sleep(self._not_before - clock())
                self._not_before = clock() + 1 / LOOKS_A_SECOND
                self._begun += 1
                try:
                    await self._look()
                except Exception as error:
                    self._failure = error
                    if not isinstance(error, faults.PASSING):
                        faults.unexpected("records_not_read", error)
                else:
                    self._failure = None
                self._ended = self._begun
            return self._failure


class Unknown:
    """Ids, or digests of tokens, that were looked up or verified a moment ago in vain. For use on one event loop."""

    def __init__(self, seconds: float = UNKNOWN_SECONDS) -> None:
        self._seconds = seconds
        self._until: OrderedDict[str | bytes, float] = OrderedDict()

    def add(self, key: str | bytes) -> None:
        """Remember an id or digest for `seconds`; if there are more than UNKNOWN, the oldest is forgotten."""
        while len(self._until) >= UNKNOWN:
            self._until.popitem(last=False)
        self._until[key] = asyncio.get_running_loop().time() + self._seconds

    def __contains__(self, key: str | bytes) -> bool:
        until = self._until.get(key)
        if until is None:
            return False
        if asyncio.get_running_loop().time() < until:
            return True
        del self._until[key]
        return False
