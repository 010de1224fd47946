"""Carrier: the part of sending within a transaction that is the same for SQLAlchemy and Django.

It collects the messages of a transaction. At the commit it stores their half with the server and writes their rows;
after the commit it sends the outcome. A binding observes where transactions and savepoints begin, commit and roll back
(`binding.py` for SQLAlchemy, `django/listening.py` for Django).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError, ProgrammingError

from notify import ids, tracing
from notify.check.question import read_source
from notify.client.bound import BoundTransaction
from notify.client.outgoing import CLOSED, Outgoing
from notify.client.packing import give_key, size_of_message
from notify.client.rows import HalfRows, Mode
from notify.client.table import MAKE_TABLES, SENDS
from notify.databases import commits_by_itself, has_ended_on_sqlite
from notify.errors import (
    Backpressure,
    BindingRefused,
    Closed,
    InvalidRequest,
    NotifyError,
    TooLarge,
    TransactionRefused,
)
from notify.guarantees import verify_once
from notify.limits import LIMITS, check_delay
from notify.message import Message
from notify.wire import PackedMessage


class Carrier:
    """Carries the messages of one producer with transactions of one database."""

    def __init__(
        self,
        outgoing: Outgoing,
        group: str,
        mode: Mode,
        *,
        keep_messages: bool = False,
        make_tables: str = MAKE_TABLES,
    ) -> None:
        """`make_tables`: the part of an error text that says how to create Notify's tables."""
        self._outgoing = outgoing
        self._mode = mode
        self._rows = HalfRows(group, mode, keep_messages=keep_messages)
        self._make_tables = make_tables
        self._source = ""
        self.is_closed = False
        """Whether messages and commits are refused."""

    # --- sending ----------------------------------------------------------------------------------------------

    def take(self, bound: BoundTransaction, savepoints: tuple[str, ...], packed: PackedMessage, late: Message) -> None:
        """Add a message to a transaction, within these savepoints.

        `packed`: the encoded message, still without its key; `late`: the original message, which has the key. Raises
        Closed if the producer is closed, BindingRefused if the transaction is being committed, and InvalidRequest for a
        message that the server would refuse.
        """
        if self.is_closed:
            raise Closed(CLOSED)
        if not callable(late.key):
            give_key(packed, late)
        if bound.prepared:
            raise BindingRefused("the transaction is being committed: no more messages can join it")
        if len(bound.sends) >= LIMITS.messages_per_transaction:
            raise InvalidRequest(
                f"a transaction carries at most {LIMITS.messages_per_transaction} messages", "out_of_bounds"
            )
        if self._mode == "outbox":
            _check_outbox(packed, [sent for _, sent, _ in bound.sends])
        bound.sends.append((savepoints, packed, late if callable(late.key) else None))

    # --- committing -------------------------------------------------------------------------------------------

    def prepare(self, connection: Connection, bound: BoundTransaction) -> None:
        """Store the half with the server, and write the rows into the connection's transaction, just before its COMMIT.

        If this raises, the caller must stop the commit and roll the transaction back.
        """
        if self.is_closed:
            raise TransactionRefused(f"nothing is committed: the messages cannot be sent any more. {CLOSED}")
        check_driver(connection)
        if has_ended_on_sqlite(connection):
            raise BindingRefused(
                "the transaction was ended with SQL (ROLLBACK or COMMIT), so that its messages cannot share its fate "
                "and are not sent: end it with session.rollback() or session.commit(), or with Django's atomic()"
            )
        for _, packed, late in bound.sends:
            if late is not None:
                give_key(packed, late)
        messages = [packed for _, packed, _ in bound.sends]
        bound.id = ids.to_text(ids.new_id())
        verify_once(connection, SENDS[self._mode])
        if not self._source:
            self._source = self._read_source(connection)
        if self._mode == "outbox":
            with tracing.sending(messages):
                pass  # the row carries the context; a bridge or relay moves it
        else:
            self._store_half(bound, messages)
        try:
            self._insert(connection, bound, messages)
        except BaseException:
            # No COMMIT follows after this, so the outcome is ROLLBACK.
            if bound.shard is not None:
                self._outgoing.outcome_soon(bound.id, bound.shard, "ROLLBACK")
            raise
        bound.prepared = True

    def _store_half(self, bound: BoundTransaction, messages: list[PackedMessage]) -> None:
        try:
            with tracing.sending(messages):
                item = self._outgoing.store_half(bound.id, messages, self._source)
        except NotifyError as error:
            detail = f"the half message was not stored, so nothing is committed: {error}"
            if isinstance(error, Backpressure):
                raise Backpressure(detail, error.code, error.retry_after) from error
            refused = TransactionRefused(detail)
            refused.code, refused.retryable = error.code, error.retryable
            raise refused from error
        bound.shard = item.shard

    def _insert(self, connection: Connection, bound: BoundTransaction, messages: list[PackedMessage]) -> None:
        self._rows.insert(connection, bound.id, bound.shard, messages)

    def _read_source(self, connection: Connection) -> str:
        """The source id of the database. Raises BindingRefused if Notify's tables are missing."""
        try:
            return read_source(connection)[0]
        except (ProgrammingError, OperationalError) as error:
            if "notify_source" not in str(error.orig):
                raise
            raise BindingRefused(
                f"nothing is committed: the database has no table notify_source; {self._make_tables}"
            ) from error

    def committed(self, bound: BoundTransaction) -> None:
        """Send the outcome COMMIT to the server, in the background. Call it once the database's COMMIT has returned."""
        if bound.prepared and self._mode == "half":
            self._outgoing.outcome_soon(bound.id, bound.shard, "COMMIT")


def check_driver(connection: Connection) -> None:
    """Raises BindingRefused if the driver commits each statement by itself, although SQLAlchemy sees a transaction."""
    if commits_by_itself(connection):
        raise BindingRefused(
            "the connection is in AUTOCOMMIT and commits each statement by itself: there is no transaction that a "
            "message could join"
        )


def _check_outbox(packed: PackedMessage, before: Sequence[PackedMessage]) -> None:
    """Check a message in outbox mode as the server checks a half, because no server sees it before the commit.

    `before`: the transaction's other messages. Raises InvalidRequest or TooLarge for a message that the queue would
    refuse later, when the sender could not get the error any more.
    """
    if packed.deliver_at is not None:
        check_delay(None, packed.deliver_at, time.time_ns() // 1000)
    size = sum(map(size_of_message, (*before, packed)))
    if size > LIMITS.request_bytes:
        raise TooLarge(
            f"the transaction's messages have {size} bytes with this one; at most {LIMITS.request_bytes} are allowed"
        )
