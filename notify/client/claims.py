"""Claims: the rows of the inbox by which messages take effect in this transaction, or did in an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from notify.client.table import notify_inbox
from notify.databases import begins_explicitly, commits_by_itself, database_now, is_doubled
from notify.errors import InvalidRequest
from notify.message import REPLAY, ReceivedMessage

Row = tuple[str, int]
"""The id and the replay number of a group's row."""
REPLAY_DIGITS = 9
"""The most digits of a replay number: every database's INTEGER holds it."""
ASKED_AT_ONCE = 1000
"""Ids in one SELECT: fewer than the parameters that any database takes."""
_INSERT = notify_inbox.insert().values(created_at=database_now())


def check_transactions(connection: sa.Connection) -> None:
    """Raises InvalidRequest where a claim would be committed alone: AUTOCOMMIT, SQLite without `use_explicit_begin`."""
    if commits_by_itself(connection):
        raise InvalidRequest(
            "the inbox's engine is in AUTOCOMMIT: a message would count as handled before its handler has run",
            "inbox_autocommit",
        )
    if connection.dialect.name == "sqlite" and not begins_explicitly(connection):
        raise InvalidRequest(
            "Python's sqlite3 ends the transaction with the first savepoint that is released, so that a message would "
            "count as handled before its handler has run; call notify.client.use_explicit_begin(engine) once after "
            "create_engine",
            "sqlite_begin",
        )


def claim(connection: sa.Connection, group: str, message: ReceivedMessage) -> bool:
    """Insert the message's inbox row; False if it stands already. Waits for a transaction that is inserting the same.

    A message that was dead and is sent again has another id than before: its effect may stand under either, and is
    noted under both. Raises InvalidRequest as `check_transactions` does.
    """
    check_transactions(connection)
    return _claim(connection, group, message)


def claim_all(connection: sa.Connection, group: str, messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
    """Claim messages as `claim` does, with few statements. The ones that have taken no effect yet, each once, in order.

    A message that is there twice, or under a new id beside its first one, is claimed once.
    """
    check_transactions(connection)
    # In one order: two transactions that insert the same rows wait for each other, and do not deadlock.
    rows = sorted({row for message in messages for row in _rows_of(message)})
    standing: set[Row] = set()
    # Most batches have nothing that stands, and then this one statement is all.
    if not _insert(connection, group, rows):
        standing = _standing(connection, group, rows)
        if not _insert(connection, group, [row for row in rows if row not in standing]):
            # Another transaction has committed some since.
            numbers = sorted(range(len(messages)), key=lambda n: messages[n].id)
            claimed = [n for n in numbers if _claim(connection, group, messages[n])]
            return [messages[n] for n in sorted(claimed)]
    taken = set(standing)
    fresh = []
    for message in messages:
        own = _rows_of(message)
        if taken.isdisjoint(own):
            fresh.append(message)
        taken.update(own)
    return fresh


def _claim(connection: sa.Connection, group: str, message: ReceivedMessage) -> bool:
    is_new = True
    for row in _rows_of(message):  # each, also where the first one stands
        is_new = _insert(connection, group, [row]) and is_new
    return is_new


def _rows_of(message: ReceivedMessage) -> tuple[Row, ...]:
    replay = replay_of(message)
    own = (message.id, replay)
    return (own,) if message.first_id == message.id else (own, (message.first_id, replay))


def _standing(connection: sa.Connection, group: str, rows: Iterable[Row]) -> set[Row]:
    """Which of these rows stand by now."""
    t = notify_inbox.c
    names = sorted({message_id for message_id, _ in rows})
    standing: set[Row] = set()
    for begin in range(0, len(names), ASKED_AT_ONCE):
        asked = sa.and_(t.consumer_group == group, t.message_id.in_(names[begin : begin + ASKED_AT_ONCE]))
        found = connection.execute(sa.select(t.message_id, t.replay).where(asked))
        standing.update((message_id, replay) for message_id, replay in found)
    return standing


def _insert(connection: sa.Connection, group: str, rows: Sequence[Row]) -> bool:
    """Insert rows, all or none; False where another transaction has inserted one.

    Raises SQLAlchemy's IntegrityError for a row that breaks another rule, such as that of a column that was added: its
    message would count as one that took effect.
    """
    if not rows:
        return True
    given: list[dict[str, Any]] = [
        {"consumer_group": group, "message_id": message_id, "replay": replay} for message_id, replay in rows
    ]
    insert = _INSERT
    if len(given) > 1 and connection.dialect.name in ("mysql", "mariadb"):
        # Their drivers send many rows in one statement where each value is a parameter, and else row by row.
        insert, now = notify_inbox.insert(), connection.scalar(sa.select(database_now()))
        given = [row | {"created_at": now} for row in given]
    try:
        with connection.begin_nested():
            connection.execute(insert, given if len(given) > 1 else given[0])
    except sa.exc.IntegrityError as error:
        if not is_doubled(error.orig):
            raise
        return False
    return True


def replay_of(message: ReceivedMessage) -> int:
    """The run that a message's effect belongs to: the delivery says it, or the header of one that was dead."""
    text = message.headers.get(REPLAY, "")
    if text.isascii() and text.isdigit() and len(text) <= REPLAY_DIGITS:
        return int(text)
    return message.replay
