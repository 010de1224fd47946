"""A bridge's position in PostgreSQL's write-ahead log: a place, in the history of one cluster."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from notify.errors import InvalidRequest
from notify.protocol.wire import UNDECODABLE


def lsn_of(text: str) -> int:
    """A place in the log as PostgreSQL writes it (`16/B374D848`). Raises ValueError."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def lsn_text(lsn: int) -> str:
    """The opposite of `lsn_of`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


@dataclass(slots=True, frozen=True)
class Position:
    """The end of a transaction's commit. Everything that committed before is before it, and nothing else."""

    lsn: int
    system: str = ""
    """The identifier of the cluster, which its standbys share; "": unknown."""
    timeline: int = 0
    """The history in which the place was read: each promotion begins a new one. 0: unknown."""
    newest_us: int = 0
    """When the newest transaction was committed, in microseconds by the source's clock; 0: unknown."""
    published: str = ""
    """A digest of the source's publications when the place was read: see Published; "": unknown."""
    scope: str = ""
    """The schemas whose tables were read up to here: see Scope; "": unknown."""
    started: int = 0
    """When the server was started from which the place was read, in microseconds by its own clock; 0: unknown."""

    @property
    def shown(self) -> str:
        return lsn_text(self.lsn)

    @property
    def text(self) -> str:
        fields = {"lsn": lsn_text(self.lsn), "system": self.system, "timeline": self.timeline}
        further = {name: getattr(self, name) for name in (*_LATER, _STARTED) if getattr(self, name)}
        return msgspec.json.encode(fields | {"newest_us": self.newest_us} | further).decode()

    def reaches(self, other: Position) -> bool:
        """Whether it is at another position of the same history, or beyond it. After a failover places of the two
        timelines cannot be compared; a bridge writes one of the new timeline once it has read there."""
        is_same = all(
            not ours or not theirs or ours == theirs
            for ours, theirs in ((self.system, other.system), (self.timeline, other.timeline))
        )
        return is_same and self.lsn >= other.lsn

    @classmethod
    def of(cls, text: str) -> Position | None:
        """The position that a queue has stored; None if the text is a position of another kind. Raises InvalidRequest
        for a text that only begins like one."""
        try:
            stored = msgspec.json.decode(text)
        except UNDECODABLE:
            return None
        if not isinstance(stored, dict) or _FIRST not in stored:
            return None
        try:
            system, published, scope = (str(stored.get(name, "")) for name in ("system", *_LATER))
            timeline, newest_us, started = (int(stored.get(name, 0)) for name in ("timeline", "newest_us", _STARTED))
            return cls(lsn_of(str(stored[_FIRST])), system, timeline, newest_us, published, scope, started)
        except (ValueError, TypeError):
            raise InvalidRequest(
                f"the queue stands at {text[:100]!r} for this source, which is not a position in a write-ahead log: "
                "give this bridge another name"
            ) from None


_FIRST = "lsn"
_LATER, _STARTED = ("published", "scope"), "started"
"""The fields that a position may lack."""
GAP = "gap"
"""The digest of a position at which a bridge stopped because its source no longer logged all rows."""
MOMENT = "@"
"""Separates a digest of publications from the moment at which it was made: the number of a transaction."""
