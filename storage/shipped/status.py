"""The order to a process that ships a log, and the status lines that it prints (worker.py)."""

from __future__ import annotations

import msgspec


class Order(msgspec.Struct):
    """The log to ship, and the store."""

    data_dir: str
    url: str
    bytes_per_second: float
    stall_seconds: float
    keep_seconds: float = 0.0
    """The age from which unneeded segments are dropped from the store; 0: they are kept."""


class Status(msgspec.Struct):
    """The status of the process."""

    listed_to: int | None = None
    """Position up to which the store lists the log; None: not known yet."""
    segments: int = 0
    """The number of segments in the manifest."""
    shipped_us: int = 0
    """When a segment was last listed, in microseconds since 1970; 0: never."""
    shipped_bytes: int = 0
    """The size of the segments that this process listed."""
    unreadable: int = 0
    """Messages whose payload could not be read for the table of one of these segments."""
    dropped: int = 0
    """How many segments this process dropped from the store because of their age."""
    failures: int = 0
    """The number of failed attempts since the process started."""
    failing: str = ""
    """Why the last attempt failed; "" if it did not."""
    refused: str = ""
    """Why this log may not be shipped to that store; then the process has ended."""
    is_superseded: bool = False
    """Whether it is refused because the log was restored elsewhere and continues there."""
