"""The list of refused messages: what a target will never take, with its reason, beside the tables that it came from.

A mover (relay or bridge) puts a transaction on the list and goes on with the next ones, so that the order of its keys
is broken there. A person has it tried again, once the reason is gone, or drops it. The rows stay in their outbox until
then. All functions run in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.client.table import notify_refused
from notify.databases import DROPPED, REFUSED, RELAYED, UNSENT, database_now, is_doubled
from notify.errors import InvalidRequest
from notify.outbox import Outbox, present
from notify.wire import BridgedTransaction, Item, RefusedReport, RefusedTransaction

WAITING, RETRY, DROPPED_STATE = "WAITING", "RETRY", "DROPPED"
STATES = (WAITING, RETRY, DROPPED_STATE)
"""A person is to decide; the mover is to try again; a person has dropped it, with a reason."""
MOST_AT_ONCE = 1000
DETAIL_CHARACTERS = 1000
REPORTED, REPORTED_CHARACTERS = 20, 300
GONE = "rows_gone"
"""The code of a transaction that was to be tried again, and whose rows nobody has any more."""
GONE_DETAIL = "its rows are not in the database any more: it cannot be sent; restore them and try again, or drop it"
UNLISTED = "unlisted"
"""The code of a transaction that was refused before the database had a list."""
UNLISTED_DETAIL = "its target refused it before this database had a list; its mover's log of that time says why"

_r = notify_refused.c


@dataclass(frozen=True, slots=True)
class Refusal:
    """A transaction that a target will never take as it is. `status`, `code`, `detail`: the target's answer."""

    id: str
    producer_group: str
    topic: str
    messages: int
    status: int
    code: str
    detail: str

    @staticmethod
    def of(transaction: BridgedTransaction, item: Item) -> Refusal:
        """From a transaction and the target's answer to it."""
        first = transaction.messages[0].topic if transaction.messages else ""
        return Refusal(
            transaction.id,
            transaction.producer_group,
            first,
            len(transaction.messages),
            item.status,
            item.code or "refused",
            item.detail or "",
        )


def ensure(engine: Engine) -> bool:
    """Whether the database has the list; it is made where that is allowed.

    False where it is missing and this user may not make tables: `create_tables` or a person with that right makes it.
    """
    if sa.inspect(engine).has_table(notify_refused.name):
        return True
    try:
        with engine.begin() as connection:
            notify_refused.create(connection, checkfirst=True)
    except (sa.exc.ProgrammingError, sa.exc.OperationalError, sa.exc.InternalError):
        return sa.inspect(engine).has_table(notify_refused.name)
    return True


def note(connection: Connection, mover: str, refusals: Iterable[Refusal]) -> None:
    """Put transactions on the list, or note that one which is there was refused again. `mover`: who met them."""
    for refusal in refusals:
        values = {
            "mover": mover[:255],
            "status": refusal.status,
            "code": refusal.code[:64],
            "detail": refusal.detail[:DETAIL_CHARACTERS],
            "state": WAITING,
            "refused_at": database_now(),
        }
        # Not what a person has dropped while its mover held it; the insert finds that it is there.
        open_one = sa.and_(_r.transaction_id == refusal.id, _r.state != DROPPED_STATE)
        again = notify_refused.update().where(open_one).values(tries=_r.tries + 1, **values)
        if connection.execute(again).rowcount:
            continue
        fixed = {
            "transaction_id": refusal.id,
            "producer_group": refusal.producer_group,
            "topic": refusal.topic,
            "messages": refusal.messages,
            "tries": 1,
            "reason": "",
        }
        try:
            with connection.begin_nested():
                connection.execute(notify_refused.insert().values(fixed | values))
        except sa.exc.IntegrityError as error:
            if not is_doubled(error.orig):
                raise
            connection.execute(again)  # it is dropped, or another mover has put it there meanwhile


def adopt(connection: Connection, mover: str, outbox: Outbox) -> int:
    """Put on the list what is marked as refused and is not there, a thousand at most; how many.

    A mover marked them while the database had no list. `mover`: who puts them there.
    """
    t = outbox.table.c
    strange = sa.select(t.transaction_id).where(
        t.relayed == REFUSED, t.message_no == 0, t.transaction_id.not_in(sa.select(_r.transaction_id))
    )
    names = [str(name) for name in connection.scalars(strange.limit(MOST_AT_ONCE))]
    unlisted = [Refusal(name, *outbox.whose(connection, name), 422, UNLISTED, UNLISTED_DETAIL) for name in names]
    note(connection, mover, unlisted)
    return len(names)


def to_retry(connection: Connection, limit: int = 100) -> list[str]:
    """Ids of those that their mover is to try again, the oldest first.

    One without rows waits for a person again, with that reason: nobody can send it, and others would wait behind it.
    """
    _put_back_what_is_lost(connection)
    wanted = sa.select(_r.transaction_id).where(_r.state == RETRY).order_by(_r.transaction_id).limit(limit)
    return [str(name) for name in connection.scalars(wanted)]


def _put_back_what_is_lost(connection: Connection) -> None:
    """Those that are to be tried again, and whose rows are gone, wait for a person."""
    kept = [
        _r.transaction_id.not_in(sa.select(outbox.table.c.transaction_id).where(outbox.table.c.message_no == 0))
        for outbox in present(connection)
    ]
    lost = connection.scalars(sa.select(_r.transaction_id).where(_r.state == RETRY, *kept).limit(MOST_AT_ONCE)).all()
    if lost:
        among = sa.and_(_r.transaction_id.in_(lost), _r.state == RETRY)
        values = {"state": WAITING, "status": 404, "code": GONE, "detail": GONE_DETAIL}
        connection.execute(notify_refused.update().where(among).values(values))


def taken(connection: Connection, names: Sequence[str]) -> None:
    """The target has these now: they leave the list."""
    if names:
        connection.execute(notify_refused.delete().where(_r.transaction_id.in_(names), _r.state == RETRY))


def tidy(connection: Connection, outbox: Outbox) -> None:
    """Take those off the list that a relay has sent since a person had them tried again."""
    t = outbox.table.c
    sent = sa.select(t.transaction_id).where(t.relayed == RELAYED, t.message_no == 0, t.transaction_id.in_(retried))
    taken(connection, [str(name) for name in connection.scalars(sent)])


retried = sa.select(_r.transaction_id).where(_r.state == RETRY)
"""The ids of those that a mover is to try again."""


def count(connection: Connection) -> int:
    """How many wait for a person."""
    return int(connection.execute(sa.select(sa.func.count()).where(_r.state == WAITING)).scalar_one())


def report(connection: Connection) -> RefusedReport:
    """The number of those that wait for a person, and the first of them, as a server shows it."""
    lines = [
        RefusedTransaction(
            id=row["transaction_id"], topic=row["topic"], code=row["code"], detail=row["detail"][:REPORTED_CHARACTERS]
        )
        for row in listed(connection, state=WAITING, limit=REPORTED)
    ]
    return RefusedReport(waiting=count(connection), transactions=lines)


def listed(
    connection: Connection, *, state: str | None = None, after: str = "", limit: int = 100
) -> list[dict[str, Any]]:
    """The list by transaction id, from behind one: the columns of `notify_refused`; `refused_at` is naive UTC."""
    wanted = sa.select(notify_refused).where(_r.transaction_id > after)
    if state is not None:
        wanted = wanted.where(_r.state == state)
    rows = connection.execute(wanted.order_by(_r.transaction_id).limit(limit)).mappings()
    return [dict(row) for row in rows]


def retry(connection: Connection, names: Sequence[str], reason: str) -> list[str]:
    """Have these tried again, dropped ones too; the ids of those that are on the list. Raises InvalidRequest."""
    return _decide(connection, names, RETRY, reason, (WAITING, DROPPED_STATE), (REFUSED, DROPPED), UNSENT)


def drop(connection: Connection, names: Sequence[str], reason: str) -> list[str]:
    """Give these up, for a reason that the list keeps; the ids of those that were. Raises InvalidRequest."""
    return _decide(connection, names, DROPPED_STATE, reason, (WAITING, RETRY), (UNSENT, REFUSED), DROPPED)


def _decide(
    connection: Connection,
    names: Sequence[str],
    state: str,
    reason: str,
    before: Sequence[str],
    rows: Sequence[int],
    relayed: int,
) -> list[str]:
    if not reason.strip():
        raise InvalidRequest("say why, in a reason: it is kept with what was decided")
    if len(names) > MOST_AT_ONCE:
        raise InvalidRequest(f"at most {MOST_AT_ONCE} transactions at once, not {len(names)}", "out_of_bounds")
    wanted = sa.select(_r.transaction_id).where(_r.transaction_id.in_(names), _r.state.in_(before))
    chosen = [str(name) for name in connection.scalars(wanted.order_by(_r.transaction_id).with_for_update())]
    if not chosen:
        return []
    of_these = _r.transaction_id.in_(chosen)
    connection.execute(notify_refused.update().where(of_these).values(state=state, reason=reason[:DETAIL_CHARACTERS]))
    for outbox in present(connection):
        t = outbox.table.c
        connection.execute(
            outbox.table.update().where(t.transaction_id.in_(chosen), t.relayed.in_(rows)).values(relayed=relayed)
        )
    return chosen
