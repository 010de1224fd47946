"""Signs of life: a worker gives one now and then from its event loop, and its parent counts how long there was none.

The parent counts by its own turns, and of each turn no more than the wait between two signs. Where it did not run
itself (a machine that was suspended or is overloaded, all processes stopped by a debugger), its workers could not show
anything either, and that time is held against none of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

MOST_SECONDS = 1.0
"""The time between two signs of life at most."""
IN_TIMEOUT = 5
"""So many signs of life at least fit into the time after which a worker is killed."""
SILENT_SECONDS = 5.0
"""A worker that gave none for so long, or for half of that time, is asked nothing until it gives one."""


def beat_seconds(timeout_seconds: float) -> float:
    """The time between two signs of life of a worker that is killed after so long without one."""
    return min(MOST_SECONDS, timeout_seconds / IN_TIMEOUT)


def give(sign: Callable[[], None], seconds: float) -> None:
    """Call `sign` on the running event loop every so many seconds, for as long as the loop runs."""
    loop = asyncio.get_running_loop()

    def again() -> None:
        sign()
        loop.call_later(seconds, again)

    loop.call_later(seconds, again)


class Silence:
    """How long each worker has given no sign of life, in time in which the parent would have noticed one."""

    def __init__(self, workers: int, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds by a clock that nobody sets."""
        self.beat_seconds = beat_seconds(timeout_seconds)
        """The parent has to look so often at least."""
        self._silent_seconds = min(SILENT_SECONDS, timeout_seconds / 2)
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._looked_at = clock()
        self._seconds = [0.0] * workers
        self._heard: set[int] = set()
        """Those that gave a sign of life since the last look."""

    def look(self) -> None:
        """Count the time since the last look. What the workers have said by now has to be read before."""
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, self.beat_seconds), now
        for number in range(len(self._seconds)):
            self._seconds[number] = 0.0 if number in self._heard else self._seconds[number] + passed
        self._heard.clear()

    def heard(self, number: int) -> None:
        """Begin anew with a worker at the next look: it has given a sign of life, or could not give one."""
        self._heard.add(number)

    def is_silent(self, number: int) -> bool:
        """Whether a worker is to be left alone until it gives a sign."""
        return self._seconds[number] >= self._silent_seconds

    def is_over_long(self, number: int) -> bool:
        """Whether a worker is to be killed."""
        return self._seconds[number] >= self._timeout_seconds


def waits_for_disk(pid: int) -> bool:
    """Whether a process is in the kernel where no signal reaches it, as one that waits for a disk is (Linux)."""
    try:
        return state_in(Path(f"/proc/{pid}/stat").read_text()) == "D"
    except OSError:
        return False


def state_in(stat: str) -> str:
    """The letter of a process's state in the text of its `/proc/…/stat`, whose name may hold anything."""
    return stat.rpartition(")")[2].split()[0]
