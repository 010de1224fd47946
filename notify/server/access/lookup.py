"""Looking once more before someone is refused: what another server made a moment ago is recorded, and not known here.

What a look reads is its caller's; here is how often it is done for strangers, for how long, and what it did not find.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from notify import faults
from notify.errors import Unavailable

LOOKS_A_SECOND = 20
"""At most, for all who wait together."""
WAIT_SECONDS = 2.0
"""How long one waits for a look: less than the SDK waits for its half, so that it tries again in time."""
UNKNOWN = 10_000
"""Ids that are remembered because nothing was found for them."""
UNKNOWN_SECONDS = 1.0
"""For so long."""

_AWAY = "who asks cannot be looked up now: the server's database does not answer; try again"


class Lookup:
    """Looks at the records, shared by all who wait for one: one at a time, and LOOKS_A_SECOND at most.

    So any number of strangers costs the database what one costs, and keeps out nobody whose token is good.
    """

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        """`look` follows what the records have. It may be cancelled; whatever it raises, they cannot be read."""
        self._look = look
        self._one_at_a_time = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        """The number of the look that ended last."""
        self._failure: Exception | None = None
        """Why that look failed; None if it did not."""
        self._not_before = 0.0
        """When the next may begin, by the loop's clock."""

    async def look(self) -> None:
        """Return when a look has ended that began after this call: an earlier one may have missed what is sought.

        Raises Unavailable where the records cannot be read, or not within WAIT_SECONDS.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                failure = await self._after(self._begun)
        except TimeoutError:
            raise Unavailable(_AWAY) from None
        if failure is not None:
            raise Unavailable(_AWAY) from failure

    async def _after(self, begun: int) -> Exception | None:
        """Why the first look after number `begun` failed; None if it did not."""
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
    """Ids, or digests of tokens, that were looked up or verified a moment ago and belong to nobody.

    Belongs to one event loop.
    """

    def __init__(self, seconds: float = UNKNOWN_SECONDS) -> None:
        self._seconds = seconds
        self._until: OrderedDict[str | bytes, float] = OrderedDict()

    def add(self, shown: str | bytes) -> None:
        """Remember one for so long at most; where there are too many, the oldest is forgotten."""
        while len(self._until) >= UNKNOWN:
            self._until.popitem(last=False)
        self._until[shown] = asyncio.get_running_loop().time() + self._seconds

    def __contains__(self, shown: str | bytes) -> bool:
        until = self._until.get(shown)
        if until is None:
            return False
        if asyncio.get_running_loop().time() < until:
            return True
        del self._until[shown]
        return False
