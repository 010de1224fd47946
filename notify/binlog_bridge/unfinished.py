"""Notes in a stored position about work that a bridge has begun, for targets that know no ids.

A target stores the position in one transaction with the messages, so that the note is stored if and only if they are.
The next bridge reads the note before it publishes anything.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from notify.binlog_bridge.kinds import position_of
from notify.binlog_bridge.log import Position
from notify.client.tables.outbox import Place
from notify.errors import InvalidRequest

_SENT_AGAIN, _BACKFILL = "sent_again", "backfill"


def with_sent_again(text: str, ids: Sequence[str]) -> str:
    """The position with the ids of refused transactions that were sent again with it."""
    return json.dumps(json.loads(text) | {_SENT_AGAIN: list(ids)})


def sent_again(text: str) -> list[str]:
    """The ids of transactions that were sent again with a position."""
    return [str(each) for each in _fields(text).get(_SENT_AGAIN, ())]


def without(text: str, ids: Collection[str]) -> str:
    """The position without these ids of transactions that were sent again."""
    sent_ids = sent_again(text)
    return with_sent_again(text, [each for each in sent_ids if each not in ids]) if sent_ids else text


def _fields(text: str) -> dict[str, Any]:
    """A position's fields; empty if it is not a bridge's position, which Position refuses."""
    fields = json.loads(text) if text.startswith("{") else {}
    return fields if isinstance(fields, dict) else {}


def is_of_relay(text: str) -> bool:
    """Whether a relay wrote a position, which names the batch that it published last."""
    return text.startswith("[")


def published_by_relay(text: str) -> list[str]:
    """The ids of the transactions that a relay published last: it may have died before it marked them."""
    return [str(each) for each in json.loads(text)[1]]


def taken_over(name: str) -> str:
    """The text in place of a relay's position once a bridge has taken over; a relay that reads it stops."""
    return json.dumps({"bridge": name})


@dataclass(frozen=True, slots=True)
class Filling:
    """A backfill that is under way. Until it ends it is stored instead of a position; earlier versions refuse it."""

    since_us: int
    """The time from which rows are sent, in microseconds since 1970 by the source's clock."""
    goes_on: Position
    """Where the bridge continues after the backfill: the position of the first attempt's snapshot."""
    table: str = ""
    """The table that is being read, and its last published transaction; "": no transaction is published yet."""
    at: str = ""
    id: str = ""

    def behind(self, table: str, place: Place) -> Filling:
        """The backfill after the transaction at `place` of a table was published."""
        return Filling(self.since_us, self.goes_on, table, place.at.isoformat(), place.id)

    @property
    def place(self) -> Place | None:
        """The last published transaction; None if there is none yet."""
        return Place(self.id, datetime.fromisoformat(self.at), 0) if self.table else None

    @property
    def text(self) -> str:
        fields = {"since_us": self.since_us, "table": self.table, "at": self.at, "id": self.id}
        return json.dumps({_BACKFILL: fields | {"goes_on": self.goes_on.text}})

    @classmethod
    def of(cls, text: str) -> Filling | None:
        """The backfill in a stored position; None if there is none. Raises InvalidRequest."""
        stored = _fields(text).get(_BACKFILL)
        if stored is None:
            return None
        goes_on = position_of(stored["goes_on"])
        if goes_on is None:
            raise InvalidRequest(f"the queue stands at {text[:100]!r}, which is not a position of a backfill")
        return cls(int(stored["since_us"]), goes_on, str(stored["table"]), str(stored["at"]), str(stored["id"]))
