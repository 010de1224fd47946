"""A worker as its parent knows it, and what the worker has of its parent: the ends of the pipes and sockets between."""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter, deque


@dataclasses.dataclass(slots=True)
class Worker:
    """A worker as its parent knows it."""

    number: int
    bound: socket.socket | None
    """The socket of its port; None if the parent hands it connections."""
    pid: int = 0
    """0 while it does not run."""
    reports: int = -1
    """The end of a pipe from which the parent reads the worker's reports."""
    line: int = -1
    """The end of a pipe in which the parent writes which workers do not serve; it is closed when the parent ends."""
    channel: socket.socket | None = None
    """The socket over which the parent hands it connections."""
    unfinished: bytes = b""
    """The beginning of a line that was read from `reports`."""
    is_ready: bool = False
    is_silent: bool = False
    """It is ready, but has sent no heartbeat for a while."""
    kill_at: float = 0.0
    """When to kill it because it hangs, by the monotonic clock; 0 if it is not known to hang."""
    failure: str = ""
    """Why it cannot serve, as it reported, or why it is killed."""
    start_at: float = 0.0
    """When to start it, by the monotonic clock."""
    used_ticks: int | None = None
    """The processor time that it had used when it was looked at last, until it is ready."""
    deaths: deque[float] = dataclasses.field(default_factory=deque)
    """When it died, within the last minute."""
    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    """How often it was started again, by the cause: DIED or HUNG."""
    last_end: str = ""
    """Why it was last started again."""

    @property
    def serves(self) -> bool:
        """Whether it is handed connections."""
        return self.is_ready and not (self.is_silent or self.kill_at)


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """A worker's ends of the pipes and sockets to its parent."""

    worker: Worker
    tell: int
    """The pipe in which it reports that it is ready, or why it cannot serve."""
    hear: int
    """The pipe from which it reads which workers do not serve; it is closed when the parent ends."""
    channel: socket.socket | None
    """The socket over which the parent hands it connections."""
