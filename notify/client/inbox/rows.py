"""Claims: a claim is the inbox row of a message, which says that the message takes effect in the row's transaction.

A claim is inserted within a savepoint that stays open while the handler runs. If the savepoint is gone afterwards, the
handler has ended the transaction itself: by `COMMIT` as SQL, or by a statement that commits, such as DDL on MySQL.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import sqlalchemy as sa

from notify.client.handling.handlers import Partial
from notify.client.tables.definitions import CLAIMS, notify_inbox
from notify.errors import InvalidRequest
from notify.protocol.limits import digits
from notify.protocol.message import REPLAY, ReceivedMessage
from notify.runtime.databases import (
    NESTED,
    as_sqlalchemys,
    begins_explicitly,
    commits_by_itself,
    database_now,
    drop_if_nested,
    has_threaded_driver,
    is_doubled,
    is_of_aborted,
    is_savepoint_gone,
    tell,
    whole,
    without_server_cursors,
)
from notify.runtime.guarantees import verify_once
from notify.runtime.schemas import in_schema, within

Row = tuple[str, int]
"""The message id and the replay number of an inbox row."""
REPLAY_DIGITS = 9
"""The most digits of a replay number, so that the INTEGER of every database holds it."""
_GUARD = "notify_inbox_claim"
_SAVEPOINT, _ROLLBACK, _RELEASE = (
    f"SAVEPOINT {_GUARD}",
    f"ROLLBACK TO SAVEPOINT {_GUARD}",
    f"RELEASE SAVEPOINT {_GUARD}",
)
ASKED_AT_ONCE = 1000
"""The most ids in one SELECT: fewer than the parameters that any database allows."""
_INSERT = notify_inbox.insert().values(created_at=database_now())


def check_transactions(connection: sa.Connection) -> None:
    """Raises InvalidRequest if a claim would be committed alone: with AUTOCOMMIT, or SQLite without
    `use_explicit_begin`."""
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


def claim(connection: sa.Connection, group: str, message: ReceivedMessage, schema: str | None = None) -> bool:
    """Insert the message's inbox row; False if it exists already. Waits for a transaction that inserts the same row.

    `schema`: the schema of the inbox; None: where the connection finds the table.

    A redriven dead letter has a new id. Its effect may be recorded under either id, so rows are inserted for both.
    Raises InvalidRequest like `check_transactions`. If this returns True, run the handler within a Guard.
    """
    check_transactions(connection)
    verify_once(connection, CLAIMS, schema)
    return _claim(connection, group, message, schema, is_guarded=True)


def claim_all(
    connection: sa.Connection, group: str, messages: Sequence[ReceivedMessage], schema: str | None = None
) -> list[ReceivedMessage]:
    """Claim messages like `claim`, with few statements. Returns those that have not taken effect yet, in order.

    A message that is contained twice, or under its new id and its first one, is claimed and returned once. If any are
    returned, run the handler within a Guard.
    """
    check_transactions(connection)
    verify_once(connection, CLAIMS, schema)
    # Sorted, so that two transactions that insert the same rows wait for each other, but do not deadlock.
    rows = sorted({row for message in messages for row in _rows_of(message)})
    existing: set[Row] = set()
    # For most batches no row exists, and this one statement is enough.
    if not _insert(connection, group, rows, schema, is_guarded=True):
        existing = _existing(connection, group, rows, schema)
        if not _insert(connection, group, [row for row in rows if row not in existing], schema, is_guarded=True):
            # Another transaction has committed some of the rows since.
            numbers = sorted(range(len(messages)), key=lambda n: messages[n].id)
            claimed = [n for n in numbers if _claim(connection, group, messages[n], schema)]
            _open(connection)
            return [messages[n] for n in sorted(claimed)]
    seen = set(existing)
    fresh = []
    for message in messages:
        message_rows = _rows_of(message)
        if seen.isdisjoint(message_rows):
            fresh.append(message)
        seen.update(message_rows)
    return fresh


def _claim(
    connection: sa.Connection, group: str, message: ReceivedMessage, schema: str | None, *, is_guarded: bool = False
) -> bool:
    first_row, *more_rows = _rows_of(message)
    is_new = _insert(connection, group, [first_row], schema, is_guarded=is_guarded)
    for row in more_rows:  # even if the first row exists
        is_new = _insert(connection, group, [row], schema) and is_new
    return is_new


def _rows_of(message: ReceivedMessage) -> tuple[Row, ...]:
    replay = replay_of(message)
    row = (_recorded(message.id), replay)
    return (row,) if message.first_id == message.id else (row, (_recorded(message.first_id), replay))


def _recorded(message_id: str) -> str:
    """The id under which an effect is recorded. A record of another program is named by its place in Kafka. This may be
    longer than the column, which a MySQL that is not strict cuts off, or differ from another one in case only, which
    most collations of MySQL do not see: then a digest stands for it."""
    if _RECORDED.fullmatch(message_id):
        return message_id
    return "digest-" + blake2b(message_id.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()


_RECORDED = re.compile(r"[a-z0-9._@/-]{1,64}")


def _existing(connection: sa.Connection, group: str, rows: Iterable[Row], schema: str | None) -> set[Row]:
    """These rows, as far as the inbox has them."""
    found = _selected(connection, group, rows, schema)
    if found and connection.dialect.name in ("mysql", "mariadb"):
        # At READ UNCOMMITTED the transactions of some rows may still run, and these rows may vanish. A locking read
        # waits for their ends, at any level.
        return _selected(connection, group, found, schema, is_locking=True)
    return found


def _selected(
    connection: sa.Connection, group: str, rows: Iterable[Row], schema: str | None, *, is_locking: bool = False
) -> set[Row]:
    columns = notify_inbox.c
    wanted = set(rows)
    ids = sorted({message_id for message_id, _ in wanted})
    # The whole key, so that a locking read locks no gaps, into which other consumers insert.
    replays = columns.replay.in_(sorted({replay for _, replay in wanted}))
    selected: set[Row] = set()
    for begin in range(0, len(ids), ASKED_AT_ONCE):
        page = ids[begin : begin + ASKED_AT_ONCE]
        condition = sa.and_(columns.consumer_group == group, columns.message_id.in_(page), replays)
        query = sa.select(columns.message_id, columns.replay).where(condition)
        if is_locking:
            query = query.with_for_update(read=True)
        result = connection.execute(whole(query), execution_options=_options(schema))
        selected.update((message_id, replay) for message_id, replay in result)
    return selected & wanted


def _options(schema: str | None) -> dict[str, Any]:
    """The execution options of a statement on the inbox. A handler may have changed the session's search_path or
    current database, also for its pool's next user: a named schema is the same for each delivery of a message."""
    return in_schema(schema) if schema else {}


def _insert(
    connection: sa.Connection, group: str, rows: Sequence[Row], schema: str | None, *, is_guarded: bool = False
) -> bool:
    """Insert rows, all or none; False if one of them exists already. `is_guarded`: the savepoint, which the insert
    needs anyway, stays open.

    Raises SQLAlchemy's IntegrityError if a row breaks another constraint, such as one of an added column: returning
    False would make the message count as handled.
    """
    if not rows:
        return True
    values: list[dict[str, Any]] = [
        {"consumer_group": group, "message_id": message_id, "replay": replay} for message_id, replay in rows
    ]
    insert: sa.Insert = _INSERT
    if len(values) > 1 and connection.dialect.name in ("mysql", "mariadb"):
        # Their drivers send many rows in one statement only if each value is a parameter, otherwise row by row.
        insert, now = notify_inbox.insert(), connection.scalar(sa.select(database_now()))
        values = [row | {"created_at": now} for row in values]
    try:
        with _until_failure(connection) if is_guarded else connection.begin_nested():
            if len(values) == 1 and schema:
                written = _insert_one(connection, values[0], schema)
            else:
                many_or_one = values if len(values) > 1 else values[0]
                options = _options(schema) | _COUNTED
                written = connection.execute(insert, many_or_one, execution_options=options).rowcount
            if 0 <= written < len(values):  # drivers that do not know it say -1
                raise InvalidRequest(
                    f"{written} of {len(values)} rows of {notify_inbox.name} were written, because a trigger of that "
                    "table skips the others, whose messages would take effect again: drop the trigger",
                    "unsafe_table",
                )
    except sa.exc.IntegrityError as error:
        if not is_doubled(error.orig):
            raise
        return False
    return True


_COUNTED = {"preserve_rowcount": True}
_Text = tuple[str, Sequence[str] | None]
_inserts: weakref.WeakKeyDictionary[sa.Dialect, dict[str, _Text]] = weakref.WeakKeyDictionary()
"""The statement that inserts one row, by dialect and schema, with the names of its parameters if they go by place."""


def _insert_one(connection: sa.Connection, row: dict[str, Any], schema: str) -> int:
    """Insert one row and return the number of rows that were written. SQLAlchemy would look the statement up by its
    parts, and put the schema into its text, for each message."""
    dialect = connection.dialect
    by_schema = _inserts.get(dialect)
    if by_schema is None:
        by_schema = _inserts[dialect] = {}
    if schema not in by_schema:
        insert = within(notify_inbox, schema).insert().values(created_at=database_now())
        compiled: Any = insert.compile(dialect=dialect, column_keys=list(row))
        by_schema[schema] = str(compiled), compiled.positiontup
    text, names = by_schema[schema]
    parameters: Any = row if names is None else tuple([row[name] for name in names])
    if not has_threaded_driver(connection):
        return connection.exec_driver_sql(text, parameters, execution_options=_COUNTED).rowcount
    try:
        return tell(connection, text, parameters)
    except Exception as error:
        raise as_sqlalchemys(connection, text, error) from error


def _open(connection: sa.Connection) -> None:
    """Open the savepoint of a Guard."""
    try:
        tell(connection, _SAVEPOINT)
    except Exception:
        connection.exec_driver_sql(_SAVEPOINT)
    if drop_if_nested(connection):
        raise sa.exc.InterfaceError(_SAVEPOINT, None, Exception(NESTED), connection_invalidated=True)


@contextlib.contextmanager
def _until_failure(connection: sa.Connection) -> Iterator[None]:
    """Open the savepoint of a Guard; roll back to it if a statement fails."""
    _open(connection)
    try:
        yield
    except sa.exc.DBAPIError as error:
        if not error.connection_invalidated:
            connection.exec_driver_sql(_ROLLBACK)
        raise


class Guard:
    """A context manager around the handler's work that notices if the handler has ended the claims' transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._is_over = False
        """Whether `release` was called, so that the savepoint needs no further look."""
        self.is_lost = False
        """Whether the transaction ended before the handler's work did."""

    def release(self) -> None:
        """Call this when the handler has returned. Raises InvalidRequest if a commit would not contain its whole
        effect."""
        self._is_over = True
        try:
            tell(self._connection, _RELEASE)
        except Exception as error:
            self.is_lost = is_savepoint_gone(error)
            if self.is_lost:
                raise has_ended() from None
            if is_of_aborted(error):
                raise _was_aborted() from None
            with without_server_cursors(self._connection):
                self._connection.exec_driver_sql(_RELEASE)
            raise

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.look()

    def look(self) -> None:
        """Call this when the handler has failed: find out whether the transaction had ended before."""
        if self._is_over:
            return
        try:
            with without_server_cursors(self._connection):
                self._connection.exec_driver_sql(_ROLLBACK)
        except sa.exc.DBAPIError as refusal:
            self.is_lost = is_savepoint_gone(refusal.orig)
        except sa.exc.SQLAlchemyError:
            pass  # the transaction is rolled back and closed


def is_claimed(
    connection: sa.Connection, group: str, messages: Sequence[ReceivedMessage], schema: str | None = None
) -> bool:
    """Whether the inbox has a claim of one of these messages, with the number of the same replay."""
    rows = [row for message in messages for row in _rows_of(message)]
    return not _existing(connection, group, rows, schema).isdisjoint(rows)


def refuse_partial(is_claimed: bool, error: BaseException) -> None:
    """Raises Partial if a claim was committed although the inbox did not commit its transaction."""
    if is_claimed:
        raise Partial(error) from error


def has_ended() -> InvalidRequest:
    """The error if a handler has ended the inbox's transaction."""
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
    """The replay number of a message's effect: from the delivery, or from the header of a redriven dead letter."""
    written = digits(message.headers.get(REPLAY, ""), REPLAY_DIGITS)
    return message.replay if written is None else written
