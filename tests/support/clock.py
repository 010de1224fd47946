"""Waits for events in tests, with a bound that a slow and loaded machine does not reach.

A test about time itself runs on a clock that it moves: `InMemoryServer.advance`, or the `now_us` that stores and
deliveries take. A test that needs real time (a lease that expires in a server process) waits here, and asserts events
and their order, never durations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 120.0
"""The longest wait for an event. Reaching it is a failure; passing tests wait far less."""

_LOOK_SECONDS = 0.02
_SHARE = 2
"""The pause after a look is so many times as long as the look: tests beside it need the processor, too."""
_MOST_SECONDS = 0.5


def eventually(check: Callable[[], T], waiting_for: str = "", seconds: float = PATIENCE_SECONDS) -> T:
    """The first true answer of `check`. Fails with `waiting_for` and the last answer after so many seconds."""
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    while not (answer := check()):
        ended = time.monotonic()
        assert ended < deadline, _complaint(waiting_for, answer, seconds)
        # The pause between two polls of an event, not a guess of when it comes.
        time.sleep(min(max(_LOOK_SECONDS, _SHARE * (ended - began)), _MOST_SECONDS))
        began = time.monotonic()
    return answer


async def eventually_async(check: Callable[[], T], waiting_for: str = "", seconds: float = PATIENCE_SECONDS) -> T:
    """As `eventually`, while the loop's other tasks continue. `check` must not block."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, _complaint(waiting_for, answer, seconds)
        await asyncio.sleep(_LOOK_SECONDS)  # the pause between two polls
    return answer


def _complaint(waiting_for: str, answer: object, seconds: float) -> str:
    return f"waited {seconds:g} s for {waiting_for or 'a true answer'}; the last answer was {answer!r}"
