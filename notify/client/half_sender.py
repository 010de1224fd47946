"""HalfSender: the part of sending within a transaction that is the same for SQLAlchemy and Django.

It collects the messages of a transaction. At the commit it stores their half with the server and writes their rows;
after the commit it sends the outcome. A binding observes where transactions and savepoints begin, commit and roll back
(`binding.py` for SQLAlchemy, `django/transactions.py` for Django).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from notify.client.outgoing import CLOSED, Outgoing
from notify.client.packing import give_key, size_of_message
from notify.client.pending_messages import PendingMessages
from notify.client.places import Place, Places
from notify.client.rows import HalfRows, Mode
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
from notify.protocol.wire import PackedMessage
from notify.runtime import tracing
from notify.runtime.databases import commits_by_itself, has_ended_on_sqlite

MOST_PLACES = 4
"""How often a transaction may turn out to be in another schema before it is refused."""


class HalfSender:
    """Carries the messages of one producer with transactions of one database."""

    def __init__(
        self,
        outgoing: Outgoing,
        group: str,
        mode: Mode,
        places: Places,
        *,
        keep_messages: bool = False,
    ) -> None:
        self._outgoing = outgoing
        self._mode = mode
        self._rows = HalfRows(group, mode, keep_messages=keep_messages)
        self._places = places
        self.is_closed = False
        """Whether messages and commits are refused."""

    # --- sending ----------------------------------------------------------------------------------------------

    def take(self, bound: PendingMessages, savepoints: tuple[str, ...], packed: PackedMessage, late: Message) -> None:
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

    def prepare(self, connection: Connection, bound: PendingMessages) -> None:
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
        if self._mode == "outbox":
            with tracing.sending(messages):
                pass  # the row carries the context; a bridge or relay moves it
        place = self._places.of(connection)
        for _ in range(MOST_PLACES):
            if self._is_written(connection, bound, messages, place):
                bound.prepared = True
                return
            place = self._places.again(connection, place)
        raise BindingRefused(
            f"nothing is committed: the row of half_message goes to another schema than {place.schema!r}, although the "
            "connection finds the table there: name the schema, with schema= or a schema_translate_map"
        )

    def _is_written(
        self, connection: Connection, bound: PendingMessages, messages: list[PackedMessage], place: Place
    ) -> bool:
        """Store the half with the place's source, and insert the rows; False if they would not go to this place."""
        bound.id = ids.to_text(ids.new_id())
        if self._mode == "half":
            self._store_half(bound, messages, place.source)
        is_written = False
        try:
            is_written = self._insert(connection, bound, messages, place)
        except DBAPIError as error:
            refused = self._places.wrong_table(error)
            if refused is None:
                raise
            raise refused from error
        finally:
            # No COMMIT follows for a half without its rows, so the outcome is ROLLBACK.
            if not is_written and bound.shard is not None:
                self._outgoing.outcome_soon(bound.id, bound.shard, "ROLLBACK")
        return is_written

    def _store_half(self, bound: PendingMessages, messages: list[PackedMessage], source: str) -> None:
        try:
            with tracing.sending(messages):
                item = self._outgoing.store_half(bound.id, messages, source)
        except NotifyError as error:
            detail = f"the half message was not stored, so nothing is committed: {error}"
            if isinstance(error, Backpressure):
                raise Backpressure(detail, error.code, error.retry_after) from error
            refused = TransactionRefused(detail)
            refused.code, refused.retryable = error.code, error.retryable
            raise refused from error
        bound.shard = item.shard

    def _insert(
        self, connection: Connection, bound: PendingMessages, messages: list[PackedMessage], place: Place
    ) -> bool:
        """Insert the rows. A method of its own, since `notify.testing.crashing` lets a process die here."""
        return self._rows.insert(connection, bound.id, bound.shard, messages, place)

    def committed(self, bound: PendingMessages) -> None:
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
