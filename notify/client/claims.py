"""Claims: the rows of the inbox by which messages take effect in this transaction, or did in an earlier one.

A claim is inserted within a savepoint that stays open while the handler runs. Where it is gone afterwards, the handler
has ended the transaction, and its claim with it: `COMMIT` as SQL, or a statement that commits, such as DDL on MySQL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from notify.client.table import notify_inbox
from notify.databases import (
    begins_explicitly,
    commits_by_itself,
    database_now,
    is_doubled,
    is_of_aborted,
    is_savepoint_gone,
)
from notify.errors import DeadLetter, InvalidRequest
from notify.message import REPLAY, ReceivedMessage

Row = tuple[str, int]
"""The id and the replay number of a group's row."""
REPLAY_DIGITS = 9
"""The most digits of a replay number: every database's INTEGER holds it."""
_GUARD = "notify_inbox_claim"
_SAVEPOINT, _ROLLBACK, _RELEASE = (
    f"SAVEPOINT {_GUARD}",
    f"ROLLBACK TO SAVEPOINT {_GUARD}",
    f"RELEASE SAVEPOINT {_GUARD}",
)
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
    noted under both. Raises InvalidRequest as `check_transactions` does. Where it is True, a Guard is to follow.
    """
    check_transactions(connection)
    return _claim(connection, group, message, is_guarded=True)


def claim_all(connection: sa.Connection, group: str, messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
    """Claim messages as `claim` does, with few statements. The ones that have taken no effect yet, each once, in order.

    A message that is there twice, or under a new id beside its first one, is claimed once. Where there are any, a Guard
    is to follow.
    """
    check_transactions(connection)
    # In one order: two transactions that insert the same rows wait for each other, and do not deadlock.
    rows = sorted({row for message in messages for row in _rows_of(message)})
    standing: set[Row] = set()
    # Most batches have nothing that stands, and then this one statement is all.
    if not _insert(connection, group, rows, is_guarded=True):
        standing = _standing(connection, group, rows)
        if not _insert(connection, group, [row for row in rows if row not in standing], is_guarded=True):
            # Another transaction has committed some since.
            numbers = sorted(range(len(messages)), key=lambda n: messages[n].id)
            claimed = [n for n in numbers if _claim(connection, group, messages[n])]
            connection.exec_driver_sql(_SAVEPOINT)
            return [messages[n] for n in sorted(claimed)]
    taken = set(standing)
    fresh = []
    for message in messages:
        own = _rows_of(message)
        if taken.isdisjoint(own):
            fresh.append(message)
        taken.update(own)
    return fresh


def _claim(connection: sa.Connection, group: str, message: ReceivedMessage, *, is_guarded: bool = False) -> bool:
    own, *more = _rows_of(message)
    is_new = _insert(connection, group, [own], is_guarded=is_guarded)
    for row in more:  # also where the first one stands
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


def _insert(connection: sa.Connection, group: str, rows: Sequence[Row], *, is_guarded: bool = False) -> bool:
    """Insert rows, all or none; False where another transaction has inserted one. `is_guarded`: the savepoint, which
    the insert needs anyway, stays open.

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
        with _until_failure(connection) if is_guarded else connection.begin_nested():
            connection.execute(insert, given if len(given) > 1 else given[0])
    except sa.exc.IntegrityError as error:
        if not is_doubled(error.orig):
            raise
        return False
    return True


@contextlib.contextmanager
def _until_failure(connection: sa.Connection) -> Iterator[None]:
    """The savepoint of a Guard; what fails within it is undone."""
    connection.exec_driver_sql(_SAVEPOINT)
    try:
        yield
    except sa.exc.DBAPIError as error:
        if not error.connection_invalidated:
            connection.exec_driver_sql(_ROLLBACK)
        raise


class Guard:
    """Around the handler's work, as a context manager: whether the claims' transaction went on to its end."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._is_told = False
        self.is_lost = False
        """Whether the transaction has ended before the handler's work."""

    def release(self) -> None:
        """The handler has returned. Raises InvalidRequest where the commit would not be that of its whole effect."""
        try:
            self._connection.exec_driver_sql(_RELEASE)
        except sa.exc.DBAPIError as error:
            self._is_told = True
            self.is_lost = is_savepoint_gone(error.orig)
            if self.is_lost:
                raise has_ended() from None
            if is_of_aborted(error.orig):
                raise _was_aborted() from None
            raise

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.look()

    def look(self) -> None:
        """The handler has failed: has the transaction ended before?"""
        if self._is_told:
            return
        try:
            self._connection.exec_driver_sql(_ROLLBACK)
        except sa.exc.DBAPIError as refusal:
            self.is_lost = is_savepoint_gone(refusal.orig)
        except sa.exc.SQLAlchemyError:
            pass  # rolled back, and closed


def is_claimed(connection: sa.Connection, group: str, messages: Sequence[ReceivedMessage]) -> bool:
    """Whether a claim of one of these messages stands."""
    return bool(_standing(connection, group, [row for message in messages for row in _rows_of(message)]))


def refuse_partial(is_claimed: bool, error: BaseException) -> None:
    """Raises Partial where a claim stands although its transaction did not come to its end."""
    if is_claimed:
        raise Partial(error) from error


class Partial(DeadLetter, InvalidRequest):
    """The handler has committed a part of its effect, or all of it, together with the claim: another attempt would
    count as one that is handled already, whatever is missing."""

    code = "inbox_commit"

    def __init__(self, error: BaseException) -> None:
        ended = "" if isinstance(error, InvalidRequest) else f". It ended with {type(error).__name__}: {error}"
        super().__init__(
            "the handler has ended the inbox's transaction itself (COMMIT as SQL, or a statement that commits, such as "
            "DDL on MySQL): a part of its effect may be committed, and the next attempt would count as handled; raise "
            f"what should roll it back, and leave the commit to the inbox{ended}"
        )


def has_ended() -> InvalidRequest:
    """The error of a handler that has ended the inbox's transaction."""
    return InvalidRequest(
        "the handler has ended the inbox's transaction, so its effect cannot be committed with the message; raise "
        "what should roll it back, and use begin_nested() for a part that may fail alone",
        "inbox_commit",
    )


def _was_aborted() -> InvalidRequest:
    return InvalidRequest(
        "the transaction was aborted by an error that the handler caught, so its effect cannot be committed with "
        "the message; raise what should roll it back, and use begin_nested() for a part that may fail alone",
        "inbox_commit",
    )


def replay_of(message: ReceivedMessage) -> int:
    """The run that a message's effect belongs to: the delivery says it, or the header of one that was dead."""
    text = message.headers.get(REPLAY, "")
    if text.isascii() and text.isdigit() and len(text) <= REPLAY_DIGITS:
        return int(text)
    return message.replay
