"""The list of refused messages: transactions that a target will never take, with the reason, in the outbox's database.

A mover (relay or bridge) puts a transaction on the list and continues with the next ones, which breaks the order of its
keys. An operator retries it once the reason is gone, or drops it. Until then its rows stay in their outbox. All
functions run in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.client.tables.definitions import notify_refused
from notify.client.tables.outbox import Outbox
from notify.errors import InvalidRequest
from notify.movers.outbox import LOCAL, present
from notify.protocol.wire import BridgedTransaction, Item, RefusedReport, RefusedTransaction
from notify.runtime.databases import (
    DROPPED,
    LEFT_BEHIND,
    REFUSED,
    RELAYED,
    UNSENT,
    WAKE_CHANNEL,
    database_now,
    has_table,
    is_doubled,
    schema_of,
)

WAITING, RETRY, DROPPED_STATE = "WAITING", "RETRY", "DROPPED"
STATES = (WAITING, RETRY, DROPPED_STATE)
"""WAITING: an operator has to decide; RETRY: the mover has to try again; DROPPED: an operator has dropped it."""
MOST_AT_ONCE = 1000
NAME_CHARACTERS = 127
DETAIL_CHARACTERS = 1000
REPORTED, REPORTED_CHARACTERS = 20, 300
GONE = "rows_gone"
"""The code of a transaction that should be retried, but whose rows are gone."""
GONE_DETAIL = "its rows are no longer in the database: it cannot be sent; restore them and try again, or drop it"
UNLISTED = "unlisted"
"""The code of a transaction that was refused before the database had a list."""
UNLISTED_DETAIL = "its target refused it while it was not listed; the log of its mover, or of its producer, says why"

_r = notify_refused.c


@dataclass(frozen=True, slots=True)
class Refusal:
    """A transaction that a target will never take unchanged. `status`, `code`, `detail`: the target's answer."""

    id: str
    producer_group: str
    topic: str
    messages: int
    status: int
    code: str
    detail: str

    @staticmethod
    def of(transaction: BridgedTransaction, item: Item) -> Refusal:
        """Make a refusal from a transaction and the target's answer to it."""
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
    """Create the list's table if it is missing; returns whether the database has it.

    False if the table is missing and this user may not create tables: run `create_tables` as a user who may.
    """
    if has_table(engine, notify_refused.name):
        return True
    try:
        with engine.begin() as connection:
            notify_refused.create(connection, checkfirst=False)
    except sa.exc.DBAPIError:
        # Another process may have created it meanwhile: PostgreSQL then says that a key of its catalogue exists.
        return has_table(engine, notify_refused.name)
    return True


def note(connection: Connection, mover: str, refusals: Iterable[Refusal]) -> None:
    """Put transactions on the list, or note that a listed one was refused again. `mover`: the name of the mover."""
    for refusal in refusals:
        values = {
            "mover": mover[:255],
            "status": refusal.status,
            "code": refusal.code[:64],
            "detail": refusal.detail[:DETAIL_CHARACTERS],
            "state": WAITING,
            "refused_at": database_now(),
        }
        # A transaction that an operator has dropped meanwhile stays dropped: the insert finds its row.
        is_open = sa.and_(_r.transaction_id == refusal.id, _r.state != DROPPED_STATE)
        update = notify_refused.update().where(is_open).values(tries=_r.tries + 1, **values)
        if connection.execute(update).rowcount:
            continue
        fixed = {
            "transaction_id": refusal.id,
            "producer_group": _listed_name(refusal.producer_group),
            "topic": _listed_name(refusal.topic),
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
            connection.execute(update)  # it is dropped, or another mover has listed it meanwhile


def _listed_name(name: str) -> str:
    """A name as the list's column holds it; no valid name changes, but a refused one may be anything."""
    return name.encode("ascii", "backslashreplace").decode()[:NAME_CHARACTERS]


def adopt(connection: Connection, mover: str, outbox: Outbox) -> int:
    """List transactions that are marked as refused but not listed, at most MOST_AT_ONCE; returns their number.

    A mover marked them while the database had no list. `mover`: the name of the mover that lists them.
    """
    columns = outbox.table.c
    query = sa.select(columns.transaction_id).where(
        columns.relayed == REFUSED,
        columns.message_no == 0,
        columns.transaction_id.not_in(sa.select(_r.transaction_id)),
    )
    ids = [str(transaction_id) for transaction_id in connection.scalars(query.limit(MOST_AT_ONCE))]
    unlisted = [
        Refusal(transaction_id, *outbox.whose(connection, transaction_id), 422, UNLISTED, UNLISTED_DETAIL)
        for transaction_id in ids
    ]
    note(connection, mover, unlisted)
    return len(ids)


def to_retry(connection: Connection, limit: int = 100) -> list[str]:
    """The ids of transactions that their mover has to try again, the oldest first.

    A transaction whose rows are gone waits for an operator again, with this reason: nobody can send it, and others
    would wait behind it.
    """
    _put_back_without_rows(connection)
    query = sa.select(_r.transaction_id).where(_r.state == RETRY).order_by(_r.transaction_id).limit(limit)
    return [str(transaction_id) for transaction_id in connection.scalars(query)]


def _put_back_without_rows(connection: Connection) -> None:
    """Let transactions that should be retried, but whose rows are gone, wait for an operator."""
    has_no_row = [
        _r.transaction_id.not_in(sa.select(outbox.table.c.transaction_id).where(outbox.table.c.message_no == 0))
        for outbox in present(connection)
    ]
    query = sa.select(_r.transaction_id).where(_r.state == RETRY, *has_no_row).limit(MOST_AT_ONCE)
    ids = connection.scalars(query).all()
    if ids:
        condition = sa.and_(_r.transaction_id.in_(ids), _r.state == RETRY)
        values = {"state": WAITING, "status": 404, "code": GONE, "detail": GONE_DETAIL}
        connection.execute(notify_refused.update().where(condition).values(values))


def released(connection: Connection, transaction_ids: Sequence[str]) -> set[str]:
    """Those of the ids that an operator wants to be sent."""
    query = sa.select(_r.transaction_id).where(_r.transaction_id.in_(transaction_ids), _r.state == RETRY)
    return {str(transaction_id) for transaction_id in connection.scalars(query)}


def taken(connection: Connection, transaction_ids: Sequence[str]) -> None:
    """Remove transactions from the list that the target has taken."""
    if transaction_ids:
        connection.execute(notify_refused.delete().where(_r.transaction_id.in_(transaction_ids), _r.state == RETRY))


def tidy(connection: Connection, outbox: Outbox) -> None:
    """Remove transactions from the list that a relay has sent after an operator had them retried."""
    columns = outbox.table.c
    sent = sa.select(columns.transaction_id).where(
        columns.relayed == RELAYED, columns.message_no == 0, columns.transaction_id.in_(retried)
    )
    taken(connection, [str(transaction_id) for transaction_id in connection.scalars(sent)])


retried = sa.select(_r.transaction_id).where(_r.state == RETRY)
"""Selects the ids of transactions that a mover has to try again."""


def states(connection: Connection) -> set[str]:
    """The states of the transactions on the list; empty if there are none."""
    return set(connection.scalars(sa.select(_r.state).distinct()))


def count(connection: Connection) -> int:
    """The number of transactions that wait for an operator."""
    return int(connection.execute(sa.select(sa.func.count()).where(_r.state == WAITING)).scalar_one())


def all_waiting(connection: Connection) -> list[str]:
    """The ids of all transactions that wait for an operator, in one look: pages may not end while more are refused."""
    query = sa.select(_r.transaction_id).where(_r.state == WAITING).order_by(_r.transaction_id)
    return [str(transaction_id) for transaction_id in connection.scalars(query)]


def report(connection: Connection) -> RefusedReport:
    """The number of transactions that wait for an operator, and the first of them, for a server's report."""
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
    """The list in the order of transaction ids above `after`: the columns of `notify_refused`; `refused_at` is in UTC,
    without a time zone."""
    query = sa.select(notify_refused).where(_r.transaction_id > after)
    if state is not None:
        query = query.where(_r.state == state)
    rows = connection.execute(query.order_by(_r.transaction_id).limit(limit)).mappings()
    return [dict(row) for row in rows]


def retry(connection: Connection, transaction_ids: Sequence[str], reason: str) -> list[str]:
    """Have transactions retried, dropped ones too; returns the ids that are on the list. Raises InvalidRequest."""
    return _decide(connection, transaction_ids, RETRY, reason, (WAITING, DROPPED_STATE), (REFUSED, DROPPED), UNSENT)


def drop(connection: Connection, transaction_ids: Sequence[str], reason: str) -> list[str]:
    """Drop transactions, with a reason that the list keeps; returns the dropped ids. Raises InvalidRequest."""
    return _decide(connection, transaction_ids, DROPPED_STATE, reason, (WAITING, RETRY), (UNSENT, REFUSED), DROPPED)


def _decide(
    connection: Connection,
    transaction_ids: Sequence[str],
    state: str,
    reason: str,
    from_states: Sequence[str],
    from_relayed: Sequence[int],
    relayed: int,
) -> list[str]:
    """Change the state of listed transactions, and `relayed` of their rows."""
    if not reason.strip():
        raise InvalidRequest("say why, in a reason: it is kept with the decision")
    if len(transaction_ids) > MOST_AT_ONCE:
        raise InvalidRequest(
            f"at most {MOST_AT_ONCE} transactions at once, not {len(transaction_ids)}", "out_of_bounds"
        )
    query = sa.select(_r.transaction_id).where(_r.transaction_id.in_(transaction_ids), _r.state.in_(from_states))
    decided = [str(found) for found in connection.scalars(query.order_by(_r.transaction_id).with_for_update())]
    if not decided:
        return []
    is_decided = _r.transaction_id.in_(decided)
    connection.execute(notify_refused.update().where(is_decided).values(state=state, reason=reason[:DETAIL_CHARACTERS]))
    for outbox in present(connection):
        columns = outbox.table.c
        # A refused row of mode half was left behind, and is sent like what is left behind.
        is_left = sa.and_(columns.mode == "half", sa.literal(outbox is LOCAL and relayed == UNSENT))
        connection.execute(
            outbox.table.update()
            .where(columns.transaction_id.in_(decided), columns.relayed.in_(from_relayed))
            .values(relayed=sa.case((is_left, LEFT_BEHIND), else_=relayed))
        )
    if relayed == UNSENT and connection.dialect.name == "postgresql":  # no insert wakes the relay
        connection.execute(sa.select(sa.func.pg_notify(WAKE_CHANNEL, schema_of(connection) or "")))
    return decided
