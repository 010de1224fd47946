"""Messages that no queue accepts: listed in the source as refused, and sent again when an operator decides so.

The list is a table of the source (notify/refused.py), and the bridge continues after such messages. They are listed
before the position moves past them: a bridge that is killed in between reads them again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify import refused
from notify.binlog_bridge import source
from notify.client.table import notify_refused
from notify.databases import REFUSED, RELAYED, has_table
from notify.errors import Unavailable
from notify.outbox import present
from notify.pages import cut, readable
from notify.refused import RETRY, Refusal
from notify.wire import BridgedTransaction, RefusedReport

log = logging.getLogger("notify.bridge")

RETRIED_AT_ONCE = 100
RETRIED_BYTES = 2 << 20
"""The approximate size of a request with retried transactions; it has at least one transaction."""
Readable = tuple[list[BridgedTransaction], list[Refusal]]
"""Transactions, and refusals of transactions whose rows are not a message."""


class Refusals:
    """The list of refused messages of one source."""

    def note(self, engine: Engine, mover: str, refusals: Sequence[Refusal]) -> None:
        """Add to the list. Raises Unavailable if the source refuses it: the position must not move past them then."""
        ids = [refusal.id for refusal in refusals]
        why = f"no queue takes {ids[0]} ({refusals[0].detail}), and it cannot be noted in the source"
        try:
            _check_writable(engine, why)
            if not refused.ensure(engine):
                raise Unavailable(
                    f"{why}, which has no table notify_refused that this user may not make: "
                    "run `notify doctor --dsn … --create-tables` with a user that may"
                )
            with engine.begin() as connection:
                for outbox in present(connection):
                    outbox.mark(connection, ids, REFUSED)
                refused.note(connection, mover, refusals)
        except sa.exc.SQLAlchemyError as error:
            raise Unavailable(
                f"{why}, whose user needs UPDATE on the tables of messages, and SELECT, INSERT, UPDATE and DELETE on "
                f"notify_refused: {str(error)[:300]}"
            ) from error
        for refusal in refusals:
            log.error("no queue takes %s: %s (%s); it is on the list", refusal.id, refusal.detail, refusal.code)

    def retries(self, engine: Engine) -> Iterator[Readable]:
        """The transactions that an operator wants to retry, in pages for a request. Raises SQLAlchemyError."""
        if not _has_list(engine):
            return
        with engine.begin() as connection:
            if source.is_read_only(connection):
                return
            outboxes = present(connection)
            for outbox in outboxes:
                refused.tidy(connection, outbox)
            ids = refused.to_retry(connection, RETRIED_AT_ONCE)
            if not ids:
                return
            # Nothing is sent without the right to mark it as sent: it would be sent again.
            for outbox in outboxes:
                connection.execute(outbox.table.update().where(sa.false()).values(relayed=RELAYED))
            places = [
                outbox.oldest(connection, RETRIED_AT_ONCE, outbox.table.c.transaction_id.in_(ids))
                for outbox in outboxes
            ]
        for outbox, outbox_places in zip(outboxes, places, strict=True):
            for page in cut(outbox_places, RETRIED_BYTES):
                with engine.connect() as connection:
                    messages = readable(connection, outbox, [place.id for place in page])
                yield messages  # no connection is held while they are sent, nor by a bridge that stops then

    def has_any(self, engine: Engine) -> bool:
        """Whether anything is on the list, decided or not. Raises SQLAlchemyError."""
        if not _has_list(engine):
            return False
        with engine.connect() as connection:
            return bool(refused.states(connection))

    def listed(self, engine: Engine, ids: Sequence[str]) -> set[str]:
        """The ids of `ids` that are on the list. Raises SQLAlchemyError."""
        transaction_id = notify_refused.c.transaction_id
        with engine.connect() as connection:
            return set(map(str, connection.scalars(sa.select(transaction_id).where(transaction_id.in_(ids)))))

    def report(self, engine: Engine) -> RefusedReport | None:
        """The list as the queue's console shows it; None if the source has no list. Raises SQLAlchemyError."""
        if not _has_list(engine):
            return None
        with engine.connect() as connection:
            return refused.report(connection)

    def settle(self, engine: Engine, ids: Sequence[str]) -> None:
        """Mark transactions that the queue has, but that the bridge which sent them did not mark before it died.

        If all are marked, nothing is written: the source may have become a replica. Raises SQLAlchemyError; Unavailable
        if the source accepts no writes.
        """
        if not _has_list(engine):
            return
        columns = notify_refused.c
        is_unmarked = (columns.transaction_id.in_(ids), columns.state == RETRY)
        with engine.connect() as connection:
            unmarked = [str(each) for each in connection.scalars(sa.select(columns.transaction_id).where(*is_unmarked))]
        if unmarked:
            self.taken(engine, unmarked)

    def taken(self, engine: Engine, ids: Sequence[str]) -> None:
        """Mark transactions that the queue has now. Raises SQLAlchemyError; Unavailable if the source is read-only."""
        _check_writable(engine, "messages that were sent again from the list of refused messages cannot be marked")
        with engine.begin() as connection:
            for outbox in present(connection):
                outbox.mark(connection, ids, RELAYED)
            refused.taken(connection, ids)


def _check_writable(engine: Engine, why: str) -> None:
    """Raises Unavailable if the source is a replica."""
    with engine.connect() as connection:
        if source.is_read_only(connection):
            raise Unavailable(f"{why}: the source takes no writes (read_only is ON): is it a replica?")


def _has_list(engine: Engine) -> bool:
    return has_table(engine, notify_refused.name)
