"""Waiting in tests: for an event, with a bound that a slow and loaded machine does not reach.

A test that is about time itself runs on a clock that it moves: `InMemoryServer.advance`, or the `now_us` that stores
and deliveries take. What has to be real time (a lease that runs out in a server process) is waited for here, and the
test asserts what happened and in which order, never how long it took.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long a test waits for what must come. Reaching it is a failure; passing tests end long before."""

_LOOK_SECONDS = 0.02


def eventually(check: Callable[[], T], waiting_for: str = "", seconds: float = PATIENCE_SECONDS) -> T:
    """The first true answer of `check`. Fails with `waiting_for` and the last answer after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, _complaint(waiting_for, answer, seconds)
        time.sleep(_LOOK_SECONDS)  # the pause between two looks at an event, not a guess of when it comes
    return answer


async def eventually_async(check: Callable[[], T], waiting_for: str = "", seconds: float = PATIENCE_SECONDS) -> T:
    """As `eventually`, while the loop's other tasks go on. `check` must not block."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, _complaint(waiting_for, answer, seconds)
        await asyncio.sleep(_LOOK_SECONDS)  # the pause between two looks
    return answer


def _complaint(waiting_for: str, answer: object, seconds: float) -> str:
    return f"waited {seconds:g} s for {waiting_for or 'a true answer'}; the last answer was {answer!r}"
