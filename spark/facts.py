"""Facts about a segment besides its rows, as plain values for JSON: what the next audit knows without reading it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Sent:
    """Committed messages of one producer group and one database, whose half and outcome are in the same segment."""

    source: str
    """The database's id, as its halves carry it; "" if they carry none."""
    producer_group: int
    """Number of the group's name."""
    first_us: int
    last_us: int
    messages: int


@dataclass(slots=True)
class Hole:
    """Bytes [start, end) of the log that could not be read, and the times of the frames around them.

    Instants are in microseconds since 1970; `to_us` is 0 if nothing follows.
    """

    start: int
    end: int
    from_us: int
    to_us: int


@dataclass(slots=True)
class Facts:
    """Facts about one segment that an audit holds of each: numbers, and bounded lists of what is damaged."""

    base: int
    end: int
    durable: int = 0
    """Up to here nothing may change any more: where its last sound frame begins, which was written after a sync."""
    first_us: int = 0
    last_us: int = 0
    made_us: int = 0
    """When the newest id in it was made, by its producer's clock."""
    apart_us: int = 0
    """The most that the time of a half and that in its id lie apart."""
    messages: int = 0
    acks: int = 0
    letters: int = 0
    """Number of dead letters."""
    published: int = 0
    """Number of rows of messages that were sent without a transaction."""
    masked: tuple[str, ...] = ()
    """The consumer groups that have bits in its masks, in their order, see spark.columns.with_bits."""
    strays: int = 0
    """Number of rollbacks whose halves are in other segments."""
    loose: int = 0
    """Number of acks that the rows of messages do not tell of."""
    unnamed: int = 0
    """Number of acks of messages in other segments."""
    broken: tuple[dict[str, Any], ...] = ()
    """Damage, as spark.damage describes it."""
    broken_left: int = 0
    """Number of further pieces of damage, which nothing else is told of."""
    holes: tuple[Hole, ...] = ()
    """The damage whose content is not known."""
    is_sealed: bool = False
    crc: int = 0
    """CRC32C of the file's bytes, by which a later audit sees that they are the same."""


@dataclass(slots=True)
class Scanned(Facts):
    """All facts about one segment, as its copy has them. An audit adds up the rest over all segments."""

    consumer_groups: list[str] = field(default_factory=list)
    """Every group that settled something in it."""
    sent: list[Sent] = field(default_factory=list)
    meta: list[list[Any]] = field(default_factory=list)
    """[position, time, record] of META records."""

    def numbers(self) -> Facts:
        """Without what an audit adds up."""
        return Facts(**{each.name: getattr(self, each.name) for each in fields(Facts)})
