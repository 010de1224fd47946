"""The order to a process that ships a log, and the lines in which it says how it stands (worker.py)."""

from __future__ import annotations

import msgspec


class Order(msgspec.Struct):
    """The log to ship, and where to."""

    data_dir: str
    url: str
    bytes_per_second: float
    stall_seconds: float
    keep_seconds: float = 0.0
    """Segments that are older and not needed are dropped from the store; 0: it keeps all."""


class Status(msgspec.Struct):
    """How the process stands."""

    listed_to: int | None = None
    """Position up to which the store lists the log; None before the store has said so."""
    segments: int = 0
    """How many segments the store lists."""
    shipped_us: int = 0
    """When a segment was listed last, 0 for never, in microseconds since 1970."""
    shipped_bytes: int = 0
    """The size of the segments that this process listed."""
    unreadable: int = 0
    """Messages whose payload could not be read for the table of such a segment."""
    dropped: int = 0
    """How many segments this process dropped from the store because of their age."""
    failures: int = 0
    """How many tries have failed since the process started."""
    failing: str = ""
    """Why the last try failed; "" where it did not."""
    refused: str = ""
    """Why this log may not go to that store; the process has ended then."""
    is_superseded: bool = False
    """Whether it is refused because the log was restored elsewhere and goes on there."""
