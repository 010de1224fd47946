"""Facts about a segment, as plain values for JSON, so that the next audit need not read the segment."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from notify.protocol.wire import NO_DATABASE


@dataclass(slots=True)
class Sent:
    """Committed messages of one producer group and one database whose half and outcome are in the same segment."""

    source: str
    """The id of the database, from its halves; "" if the halves have no id, NO_DATABASE if they are in none."""
    producer_group: int
    """Number of the group's name."""
    first_us: int
    last_us: int
    messages: int

    @property
    def is_of_database(self) -> bool:
        """Whether the halves name a database."""
        return self.source not in ("", NO_DATABASE)


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
    """The facts that an audit holds in memory for each segment: numbers, and bounded lists of damages."""

    base: int
    end: int
    durable: int = 0
    """The position up to which the log cannot change any more: the beginning of the last sound frame, which was written
    after a sync."""
    first_us: int = 0
    last_us: int = 0
    made_us: int = 0
    """When the newest id in the segment was made, by its producer's clock."""
    apart_us: int = 0
    """The longest time between a half and the time in its id."""
    messages: int = 0
    acks: int = 0
    letters: int = 0
    """Number of dead letters."""
    published: int = 0
    """Number of rows of messages that were sent without a transaction."""
    masked: tuple[str, ...] = ()
    """The consumer groups that have bits in the segment's masks, in order, see spark.columns.with_bits."""
    strays: int = 0
    """Number of rollbacks whose halves are in other segments."""
    loose: int = 0
    """Number of acks that the rows of messages do not show."""
    unnamed: int = 0
    """Number of acks of messages in other segments."""
    expired: int = 0
    """Number of acks of messages that had expired."""
    broken: tuple[dict[str, Any], ...] = ()
    """Damages, as spark.damage.Broken.plain returns them."""
    broken_left: int = 0
    """Number of further damages, which are not listed."""
    holes: tuple[Hole, ...] = ()
    """The damaged parts whose content could not be read."""
    crc: int = 0
    """CRC32C of the file's bytes: a later audit compares it to see whether the file has changed."""


@dataclass(slots=True)
class Scanned(Facts):
    """All facts about one segment, as its copy stores them. An audit adds up these lists over all segments."""

    consumer_groups: list[str] = field(default_factory=list)
    """Every group that settled a message in the segment."""
    sent: list[Sent] = field(default_factory=list)
    meta: list[list[Any]] = field(default_factory=list)
    """[position, time, record] of each META record."""

    def numbers(self) -> Facts:
        """The facts without the lists that an audit adds up."""
        return Facts(**{each.name: getattr(self, each.name) for each in fields(Facts)})
