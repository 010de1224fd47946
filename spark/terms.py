"""The bounds of an audit's conditions: times from which, and until which, what is missing proves something."""

from __future__ import annotations

from dataclasses import dataclass

SKEW_US = 600_000_000
"""The most that a producer's clock may be off: ids hold the time by that clock."""


@dataclass(frozen=True)
class Terms:
    """The bounds that conditions compare with. Instants are in microseconds since 1970."""

    closed_before_us: int
    """Transactions before this are closed: the lowest watermark, minus the longest transaction."""
    settled_before_us: int
    """Messages queued before this should be settled."""
    covered_groups: frozenset[int]
    """Hashes of the producer groups whose local rows were read."""
    inbox_groups: frozenset[str]
    """Consumer groups whose inbox was read."""
    rows_from_us: int = 0
    """Local rows before this may have been purged."""
    inbox_from_us: int = 0
    inbox_until_us: int = 0
    """Later rows of inboxes may not have come to a copy of their database yet; 0: all have."""
    log_from_us: int = 0
    """Older parts of the log may have been deleted."""
    halves_from_us: int = 0
    """Older halves may have been deleted from their storage."""
    slack_us: int = SKEW_US
    """The most that the time of a row may differ from that in its id."""
    bridged_us: tuple[tuple[int, int], ...] = ()
    """When a bridge last moved on, by the number of its database."""
    holes: tuple[tuple[int, int], ...] = ()
    """Times of which a part of a log could not be read."""
    lost: tuple[tuple[int, int], ...] = ()
    """Times of which a log lost with its disk what was not shipped: it was restored without that."""
    strangers: frozenset[int] = frozenset()
    """Numbers of databases of which no log has a message: their rows cannot be judged."""
    ahead_us: int = 1 << 60
    """No right clock has made an id of this time or later."""
    whole_from_us: int = 0
    """All ids are read, and earlier ones are of no transaction that is audited; 0: ids of a time are read."""
