"""HalfSender: sends the messages of a transaction, for SQLAlchemy and for Django.

It collects the messages of a transaction. At the commit it stores their half with the server and writes their rows;
after the commit it sends the outcome. It does not know when transactions and savepoints begin, commit and roll back:
`binding.py` observes that for SQLAlchemy, `django/transactions.py` for Django.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from notify.client.bodies.sending import Age, Unsent
from notify.client.producer.left_behind import LeftBehind, Origin, may_be_left, means_away
from notify.client.producer.options import ProducerPlan
from notify.client.producer.packing import give_key, pack_unkeyed, size_of_message
from notify.client.tables.definitions import MAKE_TABLES, SENDS
from notify.client.tables.half_rows import HalfRows
from notify.client.tables.left_rows import waiting_keys
from notify.client.tables.log_rows import LogRows
from notify.client.tables.schemas import Place, Places, unstorable
from notify.errors import (
    Backpressure,
    BindingRefused,
    Closed,
    InvalidRequest,
    NotifyError,
    TooLarge,
    TransactionRefused,
)
from notify.protocol import ids
from notify.protocol.limits import LIMITS, check_delay
from notify.protocol.message import Message
from notify.protocol.wire import Item, PackedMessage
from notify.runtime import tracing
from notify.runtime.databases import (
    NESTED,
    commits_by_itself,
    drop_if_nested,
    has_ended_on_sqlite,
    is_doubled,
    without_server_cursors,
)
from notify.runtime.program_log import program_log

log = program_log("notify.client")

CLOSED = "this producer is closed: make another one"
MOST_PLACES = 4
"""How often a transaction may turn out to be in another schema before it is refused."""


BEHIND_SECONDS = 0.5
"""How long a commit in mode auto waits at most for earlier transactions with its keys."""


class Outgoing(Protocol):
    """Carries halves and outcomes to the server, from the thread or the greenlet that commits (`outgoing.py`)."""

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        """Send a half, wait until it is stored, and return its item. Raises NotifyError.

        `source`: the id of the schema that holds the local transaction.
        """

    def upload(self, messages: list[PackedMessage]) -> None:
        """Store the large bodies of messages, and wait until they are stored. Raises NotifyError."""

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Queue an outcome. Never raises, and never blocks but with the producer's `wait_for_outcome`."""

    def wait_while(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait while a condition holds, at most `seconds`."""


class PendingMessages:
    """The messages of one root transaction."""

    __slots__ = (
        "_root", "dropped", "failed", "id", "in_doubt", "is_left", "is_named", "prepared", "rolled_back", "sends",
        "session", "shard", "stored", "undone",
    )  # fmt: skip

    def __init__(self, root: Callable[[], Any]) -> None:
        """`root` returns the transaction, or None once it is garbage. For SQLAlchemy it is a weak reference: the
        transaction references its connection, the key under which the Binding stores this object, so that a strong
        reference would keep both forever."""
        self._root = root
        self.session: weakref.ref[Session] | None = None
        """The session that the transaction belongs to; None for a transaction of a plain connection."""
        self.sends: list[tuple[tuple[str, ...], PackedMessage, Message | None]] = []
        """For each message: the savepoints that it was sent within, the encoded message, and the original Message if
        its key is a callable, which is called at the commit."""
        self.failed: BaseException | None = None
        self.rolled_back = False
        """Whether the session's owner asked for the rollback."""
        self.undone: BaseException | None = None
        """The error with which the database itself has rolled back the whole transaction."""
        self.dropped: list[PackedMessage] = []
        """The messages that a rollback of the whole transaction discarded."""
        self.prepared = False
        self.in_doubt = False
        """Whether a statement failed after the rows were written, so that a commit without an error proves nothing:
        PostgreSQL rolls such a transaction back instead."""
        self.id = ""
        self.is_named = False
        """Whether the id was read before the commit, so that it has to stay."""
        self.shard: str | None = None
        self.is_left = False
        """Whether it is left behind: its rows have the messages, since the server may have no half of it."""
        self.stored: Age | None = None
        """How old the stored bodies of its messages are; None if none is stored."""

    def __del__(self) -> None:
        """A session that is garbage without having been closed fires no event."""
        if self.session is not None and sys.exc_info()[0] is None:
            self.warn_of_dropped()

    @property
    def root(self) -> Any:
        """The transaction; None once it is garbage."""
        return self._root()

    def name(self) -> str:
        """The id under which the transaction commits, if it does."""
        if not self.id:
            self.id = ids.to_text(ids.new_id())
        self.is_named = self.is_named or not self.prepared
        return self.id

    @property
    def is_active(self) -> bool:
        """Whether a transaction of SQLAlchemy is still active."""
        root = self._root()
        return root is not None and root.is_active

    @property
    def messages(self) -> list[PackedMessage]:
        """The encoded messages, in the order in which they were sent."""
        return [packed for _, packed, _ in self.sends]

    def drop_all(self) -> None:
        """The whole transaction was rolled back."""
        self.dropped += self.messages
        self.sends.clear()

    def drop_within(self, savepoint: str) -> None:
        """A savepoint was rolled back."""
        self.sends = [send for send in self.sends if savepoint not in send[0]]

    def warn_of_dropped(self) -> None:
        """Warn of the messages of a session that ended without a commit that was tried, or a rollback."""
        lost = self.messages + self.dropped
        if lost and not self.prepared and not self.rolled_back and self.failed is None:
            topics = ", ".join(sorted({packed.topic for packed in lost})[:5])
            log.warning(
                "a session was closed before its commit: its %d messages to %s are dropped, and so are its changes; "
                "call session.commit(), or session.rollback() if you want to drop them",
                len(lost),
                topics,
            )


def undone(error: BaseException) -> BindingRefused:
    """The error for a transaction that the database itself has rolled back."""
    return BindingRefused(
        "nothing is committed: the database has rolled back the whole transaction with an error that was caught, so "
        f"that what came before it is gone: roll back, and repeat all of it. The error: {error}"
    )


class HalfSender:
    """Sends the messages of one producer with transactions of one database."""

    def __init__(
        self, outgoing: Outgoing, plan: ProducerPlan, make_tables: str = MAKE_TABLES, make_in: str = ""
    ) -> None:
        """`make_tables`, `make_in`: see Places."""
        self._outgoing = outgoing
        self._mode = plan.mode
        self._half_timeout = plan.half_timeout
        self._rows: HalfRows | LogRows = LogRows(plan.group)
        if plan.rows:
            self._rows = HalfRows(plan.group, plan.mode, keep_messages=plan.keep_messages)
        self._group = plan.group
        self._bodies = plan.bodies
        self._left_behind = plan.left_behind
        self._left_rows = HalfRows(plan.group, plan.mode, left_behind=True)
        self._places = Places(plan.sources, SENDS[plan.mode], make_tables, make_in)
        self.is_closed = False
        """Whether messages and commits are refused."""

    # --- sending ----------------------------------------------------------------------------------------------

    def pack(self, message: Message) -> PackedMessage:
        """Encode a message, without its key. Raises InvalidRequest."""
        return pack_unkeyed(message, self._bodies)

    def add(
        self,
        pending: PendingMessages,
        savepoints: tuple[str, ...],
        packed: PackedMessage,
        original: Message,
        not_counted: int = 0,
    ) -> int:
        """Add a message to a transaction, within these savepoints, and return its number there: if a savepoint is
        rolled back, the messages within it are the last ones.

        `packed`: the encoded message, still without its key; `original`: the message, which has the key. `not_counted`:
        how many of the earlier messages do not count for the bounds of a transaction. Raises Closed if the producer is
        closed, BindingRefused if the transaction is being committed, and InvalidRequest for a message that the server
        would refuse.
        """
        if self.is_closed:
            raise Closed(CLOSED)
        if not callable(original.key):
            give_key(packed, original)
        if pending.prepared:
            raise BindingRefused("the transaction is being committed: no more messages can join it")
        if len(pending.sends) - not_counted >= LIMITS.messages_per_transaction:
            raise InvalidRequest(
                f"a transaction carries at most {LIMITS.messages_per_transaction} messages", "out_of_bounds"
            )
        if self._mode != "half":
            _check_outbox(packed, pending.sends[not_counted:])
        pending.sends.append((savepoints, packed, original if callable(original.key) else None))
        return len(pending.sends) - 1

    # --- committing -------------------------------------------------------------------------------------------

    def prepare(self, connection: Connection, pending: PendingMessages) -> None:
        """Store the half with the server, and write the rows into the connection's transaction, just before its COMMIT.

        If this raises, the caller must stop the commit and roll the transaction back.
        """
        if self.is_closed:
            raise TransactionRefused(f"nothing is committed: the messages can no longer be sent. {CLOSED}")
        check_driver(connection)
        if has_ended_on_sqlite(connection):
            raise BindingRefused(
                "the transaction was ended with SQL (ROLLBACK or COMMIT), so that its messages cannot share its fate "
                "and are not sent: end it with session.rollback() or session.commit(), or with Django's atomic()"
            )
        for _, packed, original in pending.sends:
            if original is not None:
                give_key(packed, original)
        messages = pending.messages
        if self._bodies is not None:
            self._upload(pending, messages)
        if self._mode == "outbox":
            _trace(messages)
        with without_server_cursors(connection):
            self._write(connection, pending, messages)

    def _write(self, connection: Connection, pending: PendingMessages, messages: list[PackedMessage]) -> None:
        place = self._places.of(connection)
        for _ in range(MOST_PLACES):
            if self._is_written(connection, pending, messages, place):
                pending.prepared = True
                return
            if pending.is_named:
                refused = TransactionRefused(
                    f"nothing is committed: the transaction can commit under another id than {pending.id} only, which "
                    "was read before; repeat the transaction"
                )
                refused.retryable = True
                raise refused
            place = self._places.again(connection, place)
        raise BindingRefused(
            f"nothing is committed: the row of half_message goes to another schema than {place.schema!r}, although the "
            "connection finds the table there: name the schema, with schema= or a schema_translate_map"
        )

    def _is_written(
        self, connection: Connection, pending: PendingMessages, messages: list[PackedMessage], place: Place
    ) -> bool:
        """Store the half with the place's source, and insert the rows; False if they would not go to this place."""
        if not pending.is_named:
            pending.id = ids.to_text(ids.new_id())
        pending.shard = None
        if self._left_behind is not None:
            self._store_or_leave(pending, messages, place, self._left_behind)
        elif self._mode == "half":
            self._store_half(pending, messages, place.source)
        is_written = False
        try:
            is_inserted = self._insert(connection, pending, messages, place)
            if drop_if_nested(connection):
                raise _nested()
            if is_inserted and pending.stored is not None:
                pending.stored.check()
            is_written = is_inserted
        except DBAPIError as error:
            refused = self._places.wrong_table(error) or self._decided_by_check(error)
            if refused is None:
                raise
            raise refused from error
        except UnicodeEncodeError as error:  # the driver's, for a connection in an encoding such as latin1
            raise InvalidRequest(
                f"nothing is committed: the connection to the database is in an encoding that lacks a character of the "
                f"message's key or headers: {error}"
            ) from error
        except ValueError as error:  # psycopg2's, for a text with NUL
            raise unstorable(error) from error
        finally:
            # No COMMIT follows for a half without its rows, so the outcome is ROLLBACK.
            if not is_written and pending.shard is not None:
                self._outgoing.outcome_soon(pending.id, pending.shard, "ROLLBACK")
            if not is_written and self._left_behind is not None:
                self._left_behind.forget([pending.id])
        if not is_written and self._left_behind is not None and not pending.is_left:
            self._left_behind.meet(waiting_keys(connection, self._group, messages, place))
        return is_written

    def _decided_by_check(self, error: DBAPIError) -> TransactionRefused | None:
        """The error for a transaction whose check was answered before its row was written: a tombstone has its id. None
        for other errors."""
        if self._mode == "outbox" or not is_doubled(error.orig):
            return None
        refused = TransactionRefused(
            "nothing is committed: a check has found no row of this transaction and rolled it back, because its commit "
            "took longer than check_after; repeat the transaction, and give the producer a longer check_after if this "
            "happens again"
        )
        refused.retryable = True
        return refused

    def _upload(self, pending: PendingMessages, messages: list[PackedMessage]) -> None:
        """Store the large bodies. They are stored before the half and the rows, so that no message names a body that is
        not there."""
        uploads = [message for message in messages if isinstance(message.body, Unsent)]
        if not uploads:
            return
        pending.stored = Age()
        try:
            self._outgoing.upload(uploads)
        except NotifyError as error:
            refused = TransactionRefused(f"a body was not stored, so nothing is committed: {error}")
            refused.code, refused.retryable = error.code, error.retryable
            raise refused from error

    def _store_or_leave(
        self, pending: PendingMessages, messages: list[PackedMessage], place: Place, left_behind: LeftBehind
    ) -> None:
        """Store the half, or leave the transaction behind: if the server is unreachable, cannot take the half now, or
        has to get earlier transactions with the same keys first."""
        pending.is_left = self._stays_behind(messages, left_behind)
        times_away = left_behind.times_away
        if pending.is_left:
            _trace(messages)
        else:
            try:
                self._store_half(pending, messages, place.source)
            except NotifyError as error:
                cause = error.__cause__
                if not isinstance(cause, NotifyError) or not may_be_left(cause):
                    raise
                pending.is_left = True
                if means_away(cause):
                    left_behind.away()
            else:
                # The outcome of an earlier transaction may have failed meanwhile.
                pending.is_left = left_behind.times_away != times_away or left_behind.holds(messages)
        if pending.is_left:
            left_behind.leave(pending.id, messages, Origin(place.schema, place.source))

    def _stays_behind(self, messages: list[PackedMessage], left_behind: LeftBehind) -> bool:
        """Whether the transaction goes by row, without asking the server. If it does only because others with its keys
        wait, they get a moment to be sent: otherwise keys that are always in use would always go by row."""
        if not left_behind.holds(messages):
            return False
        seconds = min(self._half_timeout / 2, BEHIND_SECONDS)  # afterwards the half takes some time, too
        self._outgoing.wait_while(lambda: left_behind.holds(messages) and not left_behind.is_away, seconds)
        return left_behind.holds(messages)

    def _store_half(self, pending: PendingMessages, messages: list[PackedMessage], source: str) -> None:
        try:
            with tracing.sending(messages):
                item = self._outgoing.store_half(pending.id, messages, source)
        except NotifyError as error:
            detail = f"the half message was not stored, so nothing is committed: {error}"
            if isinstance(error, Backpressure):
                raise Backpressure(detail, error.code, error.retry_after) from error
            refused = TransactionRefused(detail)
            refused.code, refused.retryable = error.code, error.retryable
            raise refused from error
        pending.shard = item.shard

    def _insert(
        self, connection: Connection, pending: PendingMessages, messages: list[PackedMessage], place: Place
    ) -> bool:
        """Insert the rows. A method of its own, since `notify.testing.crashing` lets a process die here."""
        rows = self._left_rows if pending.is_left else self._rows
        return rows.insert(connection, pending.id, pending.shard, messages, place)

    def committed(self, pending: PendingMessages) -> None:
        """Send the outcome COMMIT to the server, in the background. Call it once the database's COMMIT has returned."""
        if not pending.prepared or self._mode == "outbox":
            return
        if pending.is_left and self._left_behind is not None:
            self._left_behind.ended(pending.id)
        elif not pending.in_doubt:  # else a check decides
            self._outgoing.outcome_soon(pending.id, pending.shard, "COMMIT")


def _nested() -> TransactionRefused:
    refused = TransactionRefused(f"nothing is committed: {NESTED}")
    refused.retryable = True
    return refused


def _trace(messages: list[PackedMessage]) -> None:
    """Give messages that only a row carries the context of their trace."""
    with tracing.sending(messages):
        pass


def check_driver(connection: Connection) -> None:
    """Raises BindingRefused if the driver commits each statement by itself, although SQLAlchemy sees a transaction."""
    if commits_by_itself(connection):
        raise BindingRefused(
            "the connection is in AUTOCOMMIT and commits each statement by itself: there is no transaction that a "
            "message could join"
        )


def _check_outbox(packed: PackedMessage, before: Sequence[tuple[Any, PackedMessage, Any]]) -> None:
    """Check a message in outbox mode as the server checks a half, because no server sees it before the commit.

    `before`: the transaction's other messages, as in `PendingMessages.sends`. Raises InvalidRequest or TooLarge for a
    message that the queue would refuse later, when the sender could not get the error any more.
    """
    if packed.deliver_at is not None:
        check_delay(None, packed.deliver_at, time.time_ns() // 1000)
    if not before:
        return  # one message is always smaller
    size = sum([size_of_message(each) for _, each, _ in before], size_of_message(packed))
    if size > LIMITS.request_bytes:
        raise TooLarge(
            f"the transaction's messages have {size} bytes with this one; at most {LIMITS.request_bytes} are allowed"
        )
