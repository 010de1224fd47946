"""Rows that came back: an outbox that was restored from a dump has rows again that were sent long ago.

A server recognises the ids of the last IDS_RETENTION_SECONDS; Kafka recognises none. Older rows are not published: they
are put on the list of refused messages, and an operator says whether they were ever sent. A row counts as old only if
both its time and the time in its id do. For Kafka a row has come back if it is older than what was sent last, by more
than a transaction may stay open: so a relay that was stopped for days takes nothing for a dump.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from notify.client.tables.purge import IDS_RETENTION_SECONDS
from notify.movers.refused import Refusal
from notify.protocol import ids
from notify.runtime.clock import wall_clock

OPEN_SECONDS = 3600.0
"""The longest time that a transaction may stay open after its row was written."""
_KNOWN, _OPEN = timedelta(seconds=IDS_RETENTION_SECONDS), timedelta(seconds=OPEN_SECONDS)
CODE = "returned"


def is_old(transaction_id: str, seconds: float) -> bool:
    """Whether an id is older than `seconds`; an id without a time counts as old."""
    try:
        made_ms = ids.milliseconds(ids.from_text(transaction_id))
    except ValueError:  # another program's id
        return True
    return made_ms < wall_clock() / 1000 - seconds * 1000


def is_returned(transaction_id: str, at: Any, sent_until: datetime | None) -> bool:
    """Whether a waiting row may have been sent before. `at`: its time in UTC as the driver reads it.

    `sent_until`: for a target that knows no ids, the time of the newest transaction that it got.
    """
    if sent_until == datetime.min:  # the target has got nothing yet
        return False
    now = datetime.fromtimestamp(wall_clock() / 1e6, UTC).replace(tzinfo=None)
    last = now - _KNOWN if sent_until is None else sent_until - _OPEN
    moment = moment_of(at)
    if moment is None or moment >= last:
        return False
    return is_old(transaction_id, (now - last).total_seconds())


def moment_of(at: Any) -> datetime | None:
    """A column's time in UTC without a time zone; None if the calendar does not have it."""
    if isinstance(at, datetime):
        return at
    try:
        return datetime.fromisoformat(at[:26])
    except (TypeError, ValueError):
        return None


def returned(transaction_id: str, group: str, topic: str, messages: int, *, knows_ids: bool) -> Refusal:
    """The refusal of a transaction that may have come back."""
    why = (
        f"its row is older than the {_KNOWN.days} days for which a server recognises what it has"
        if knows_ids
        else "its row is older than what was sent before it, and Kafka recognises nothing that it has"
    )
    detail = (
        f"{why}: the target may have it already, if the row came back with a dump. Drop it then; if it was never sent, "
        "have it sent with `notify refused retry`"
    )
    return Refusal(transaction_id, group, topic, messages, 409, CODE, detail)
