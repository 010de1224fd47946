"""Notes in a stored position about work that its bridge had begun, for targets that know no ids.

A target stores the position in one transaction with the messages, so that a note is there exactly where they are. The
bridge that comes next reads it before it publishes anything.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from notify.binlog_bridge.position import Position
from notify.errors import InvalidRequest
from notify.outbox import Place

_SENT_AGAIN, _BACKFILL = "sent_again", "backfill"


def with_sent_again(text: str, names: Sequence[str]) -> str:
    """A position that says which transactions of the list of refused messages were sent again with it."""
    return json.dumps(json.loads(text) | {_SENT_AGAIN: list(names)})


def sent_again(text: str) -> list[str]:
    """Ids of the transactions that were sent again with a position."""
    return [str(name) for name in _known(text).get(_SENT_AGAIN, ())]


def without(text: str, names: Collection[str]) -> str:
    """A position that does not say of these that they were sent again."""
    again = sent_again(text)
    return with_sent_again(text, [name for name in again if name not in names]) if again else text


def _known(text: str) -> dict[str, Any]:
    """A position's fields; none where it is no bridge's, which Position refuses."""
    known = json.loads(text) if text.startswith("{") else {}
    return known if isinstance(known, dict) else {}


@dataclass(frozen=True, slots=True)
class Filling:
    """A backfill that is under way. While it is, it stands where a position would; an earlier version refuses it."""

    since_us: int
    """From when on it looks, in microseconds since 1970 by the source's clock."""
    goes_on: Position
    """Where the bridge goes on once the tables are read: behind the snapshot of the first attempt."""
    table: str = ""
    """The table that is being read, and the last transaction of it that is published; "": nothing is yet."""
    at: str = ""
    id: str = ""

    def behind(self, table: str, place: Place) -> Filling:
        """The same backfill, once a transaction of a table is published."""
        return Filling(self.since_us, self.goes_on, table, place.at.isoformat(), place.id)

    @property
    def place(self) -> Place | None:
        """The last transaction that is published."""
        return Place(self.id, datetime.fromisoformat(self.at), 0) if self.table else None

    @property
    def text(self) -> str:
        return json.dumps({_BACKFILL: asdict(self) | {"goes_on": self.goes_on.text}})

    @classmethod
    def of(cls, text: str) -> Filling | None:
        """The backfill that a stored position names; None where it names none. Raises InvalidRequest."""
        known = _known(text).get(_BACKFILL)
        if known is None:
            return None
        goes_on = Position.of(known["goes_on"])
        if goes_on is None:
            raise InvalidRequest(f"the queue stands at {text[:100]!r}, which is no position of a backfill")
        return cls(int(known["since_us"]), goes_on, str(known["table"]), str(known["at"]), str(known["id"]))
