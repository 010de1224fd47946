"""Says to what supervises this process that it is ready, makes progress, and stops.

systemd is told over the socket that `Type=notify` and `WatchdogSec=` give the process (sd_notify(3)); a probe of
Kubernetes looks at the age of the file that NOTIFY_ALIVE_FILE names. Without either, nothing is done. The protocol is
one datagram of text: a library for it would be longer than this.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SOCKET, FILE = "NOTIFY_SOCKET", "NOTIFY_ALIVE_FILE"
STUCK_SECONDS = 600.0
"""A step of work that takes longer than this hangs: steps wait for answers, and each wait has a shorter bound."""
BEAT_SECONDS = 5.0
"""The longest time between two signs of life."""


def tell(state: str) -> None:
    """Tell systemd a state (READY=1, STOPPING=1, WATCHDOG=1). An unreachable manager is not an error."""
    address = os.environ.get(SOCKET, "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.setblocking(False)
        sending.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def every_seconds() -> float:
    """How often to give a sign of life: at least twice in the time that systemd allows between two of them."""
    allowed = int(os.environ.get("WATCHDOG_USEC") or 0) / 1e6
    return min(BEAT_SECONDS, allowed / 2) if allowed else BEAT_SECONDS


def sign() -> None:
    """Give a sign of life: to systemd, and by the time of a file."""
    tell("WATCHDOG=1")
    if name := os.environ.get(FILE):
        with contextlib.suppress(OSError):  # the probe sees it
            Path(name).touch(mode=0o600)


class Progress:
    """Whether one part of a process moves on: a step of its work, or a wait that may last."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._working_since: float | None = None

    def works(self) -> None:
        """A step of work begins, or has come further."""
        self._working_since = self._now()

    def rests(self) -> None:
        """The step is over: what follows is a wait that may last, or the end."""
        self._working_since = None

    def is_stuck(self) -> bool:
        return self._working_since is not None and self._now() - self._working_since > STUCK_SECONDS


async def beat(*parts: Progress) -> None:
    """Give signs of life until cancelled, unless a part is stuck; first say that the process is ready."""
    tell("READY=1")
    while True:
        if not any(part.is_stuck() for part in parts):
            sign()
        await asyncio.sleep(every_seconds())


async def during(work: Coroutine[object, object, T], *parts: Progress) -> T:
    """Do some work, and give signs of life meanwhile."""
    beating = asyncio.create_task(beat(*parts), name="alive")
    try:
        return await work
    finally:
        beating.cancel()
        tell("STOPPING=1")
