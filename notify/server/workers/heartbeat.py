"""Heartbeats: each worker sends one regularly from its event loop, and its parent counts the time without one.

The parent adds at most the time between two heartbeats for each turn of its own loop. If the parent itself did not run
(the machine was suspended or overloaded, a debugger stopped all processes), its workers could not send heartbeats
either, and that time does not count.

Before a worker is ready it sends none, since its recovery has the event loop: the processor time
that it uses shows its progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

MOST_SECONDS = 1.0
"""The longest time between two heartbeats."""
IN_TIMEOUT = 5
"""At least this many heartbeats fit into the time after which a worker is killed."""
SILENT_SECONDS = 5.0
"""A worker without a heartbeat for this long, or for half of its timeout, is sent no requests until its next one."""


def beat_seconds(timeout_seconds: float) -> float:
    """The time between two heartbeats of a worker that is killed after `timeout_seconds` without one."""
    return min(MOST_SECONDS, timeout_seconds / IN_TIMEOUT)


def give(beat: Callable[[], None], seconds: float) -> None:
    """Call `beat` on the running event loop every `seconds`, as long as the loop runs."""
    loop = asyncio.get_running_loop()

    def again() -> None:
        beat()
        loop.call_later(seconds, again)

    loop.call_later(seconds, again)


class Silence:
    """How long each worker has sent no heartbeat while its parent was running, and would have noticed one."""

    def __init__(self, workers: int, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: a monotonic clock, in seconds."""
        self.beat_seconds = beat_seconds(timeout_seconds)
        """The parent has to call `look` at least this often."""
        self._silent_seconds = min(SILENT_SECONDS, timeout_seconds / 2)
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._looked_at = clock()
        self._seconds = [0.0] * workers
        self._heard: set[int] = set()
        """Workers that sent a heartbeat since the last look."""

    def look(self) -> None:
        """Count the time since the last look. Read what the workers have sent before you call it."""
        now = self._clock()
        passed_seconds, self._looked_at = min(now - self._looked_at, self.beat_seconds), now
        for number in range(len(self._seconds)):
            self._seconds[number] = 0.0 if number in self._heard else self._seconds[number] + passed_seconds
        self._heard.clear()

    def heard(self, number: int) -> None:
        """Count a worker from 0 at the next look: it has sent a heartbeat, or cannot be blamed for sending none."""
        self._heard.add(number)

    def is_silent(self, number: int) -> bool:
        """Whether a worker should get no requests until its next heartbeat."""
        return self._seconds[number] >= self._silent_seconds

    def is_over_long(self, number: int) -> bool:
        """Whether a worker should be killed."""
        return self._seconds[number] >= self._timeout_seconds


def waits_for_disk(pid: int) -> bool:
    """Whether a process waits for a disk inside the kernel, where no signal reaches it (Linux)."""
    try:
        return state_in(Path(f"/proc/{pid}/stat").read_text()) == "D"
    except OSError:
        return False


def used_ticks(pid: int) -> int | None:
    """The processor time that a process has used, in clock ticks; None where it is not known (not Linux)."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return None
    return int(user) + int(system)


def state_in(stat: str) -> str:
    """The letter of a process's state in the text of its `/proc/…/stat`; the name in it may have any characters."""
    return stat.rpartition(")")[2].split()[0]
