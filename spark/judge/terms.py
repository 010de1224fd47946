"""The bounds of an audit's conditions: the times between which a missing record proves something."""

from __future__ import annotations

from dataclasses import dataclass

SKEW_US = 600_000_000
"""How wrong a producer's clock may be. The time in an id comes from that clock."""


@dataclass(frozen=True)
class Terms:
    """The bounds. Instants are in microseconds since 1970."""

    closed_before_us: int
    """Transactions before this are closed: the lowest watermark, minus the longest transaction."""
    settled_before_us: int
    """Messages queued before this should be settled."""
    covered_groups: frozenset[int]
    """The hashes of the producer groups whose local rows were read."""
    inbox_groups: frozenset[str]
    """The consumer groups whose inbox was read."""
    rows_from_us: int = 0
    """Local rows from before this may have been purged."""
    inbox_from_us: int = 0
    """Inbox rows from before this may have been purged."""
    inbox_until_us: int = 0
    """A copy of a database may not have later inbox rows yet; 0: it has all of them."""
    log_from_us: int = 0
    """Older parts of the log may have been deleted."""
    halves_from_us: int = 0
    """Older halves may have been deleted from their storage."""
    slack_us: int = SKEW_US
    """The longest time between a row and the time in its id."""
    bridged_us: tuple[tuple[int, int], ...] = ()
    """Pairs of a database's number and the time at which its bridge last advanced."""
    holes: tuple[tuple[int, int], ...] = ()
    """The times (from, to) of parts of a log that could not be read."""
    lost: tuple[tuple[int, int], ...] = ()
    """The times (from, to) of records that a log lost with its disk, because they were not shipped."""
    strangers: frozenset[int] = frozenset()
    """The numbers of databases of which no log has a message: their rows cannot be judged."""
    ahead_us: int = 1 << 60
    """No correct clock has made an id with this time or a later one."""
    whole_from_us: int = 0
    """If all ids are read: no audited transaction has an older id. 0: only the ids of a span are read."""
