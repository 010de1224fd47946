"""Messages that no queue takes: noted in the source's list of refused messages, and sent again when a person says so.

The list lies in the source (notify/refused.py), and the bridge goes on behind them. They are noted before the position
moves past them: a bridge that is killed in between meets them again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify import refused
from notify.binlog_bridge import source
from notify.client.table import notify_refused
from notify.databases import REFUSED, RELAYED
from notify.errors import Unavailable
from notify.outbox import present
from notify.pages import cut, readable
from notify.refused import RETRY, Refusal
from notify.wire import BridgedTransaction, RefusedReport

log = logging.getLogger("notify.bridge")

RETRIED_AT_ONCE = 100
RETRIED_BYTES = 2 << 20
"""All that is tried again goes in requests of about so many bytes, or one transaction."""
Readable = tuple[list[BridgedTransaction], list[Refusal]]
"""Transactions, and refusals of those whose rows are no message."""


class Refusals:
    """The list of one source."""

    def note(self, engine: Engine, mover: str, refusals: Sequence[Refusal]) -> None:
        """Put these on the list. Raises Unavailable where the source does not take that: nothing goes past them."""
        names = [refusal.id for refusal in refusals]
        why = f"no queue takes {names[0]} ({refusals[0].detail}), and it cannot be noted in the source"
        try:
            _check_writable(engine, why)
            if not refused.ensure(engine):
                raise Unavailable(
                    f"{why}, which has no table notify_refused that this user may not make: "
                    "run `notify doctor --dsn … --create-tables` with a user that may"
                )
            with engine.begin() as connection:
                for outbox in present(connection):
                    outbox.mark(connection, names, REFUSED)
                refused.note(connection, mover, refusals)
        except sa.exc.SQLAlchemyError as error:
            raise Unavailable(
                f"{why}, whose user needs UPDATE on the tables of messages, and SELECT, INSERT, UPDATE and DELETE on "
                f"notify_refused: {str(error)[:300]}"
            ) from error
        for refusal in refusals:
            log.error("no queue takes %s: %s (%s); it is on the list", refusal.id, refusal.detail, refusal.code)

    def retries(self, engine: Engine) -> Iterator[Readable]:
        """Those that a person has had tried again, a request's worth at a time. Raises SQLAlchemyError."""
        if not _has_list(engine):
            return
        with engine.begin() as connection:
            if source.is_read_only(connection):
                return
            outboxes = present(connection)
            for outbox in outboxes:
                refused.tidy(connection, outbox)
            names = refused.to_retry(connection, RETRIED_AT_ONCE)
            if not names:
                return
            places = [
                outbox.oldest(connection, RETRIED_AT_ONCE, outbox.table.c.transaction_id.in_(names))
                for outbox in outboxes
            ]
        for outbox, some in zip(outboxes, places, strict=True):
            for page in cut(some, RETRIED_BYTES):
                with engine.connect() as connection:
                    messages = readable(connection, outbox, [place.id for place in page])
                yield messages  # no connection is held while they are sent, nor by a bridge that is stopped then

    def has_any(self, engine: Engine) -> bool:
        """Whether anything is on the list, whatever was decided about it. Raises SQLAlchemyError."""
        if not _has_list(engine):
            return False
        with engine.connect() as connection:
            return connection.scalar(sa.select(notify_refused.c.transaction_id).limit(1)) is not None

    def listed(self, engine: Engine, names: Sequence[str]) -> set[str]:
        """Those of the transactions that are on the list. Raises SQLAlchemyError."""
        name = notify_refused.c.transaction_id
        with engine.connect() as connection:
            return {str(each) for each in connection.scalars(sa.select(name).where(name.in_(names)))}

    def report(self, engine: Engine) -> RefusedReport | None:
        """The list as the queue's console shows it; None where the source has none. Raises SQLAlchemyError."""
        if not _has_list(engine):
            return None
        with engine.connect() as connection:
            return refused.report(connection)

    def settle(self, engine: Engine, names: Sequence[str]) -> None:
        """Note that the queue has these, as far as the bridge that sent them died before it could.

        Nothing is written where nothing is left to note: the source may be a replica by now. Raises SQLAlchemyError,
        and Unavailable where the source takes no writes.
        """
        if not _has_list(engine):
            return
        r = notify_refused.c
        with engine.connect() as connection:
            left = connection.scalars(sa.select(r.transaction_id).where(r.transaction_id.in_(names), r.state == RETRY))
            unmarked = [str(name) for name in left]
        if unmarked:
            self.taken(engine, unmarked)

    def taken(self, engine: Engine, names: Sequence[str]) -> None:
        """The queue has these now. Raises SQLAlchemyError, and Unavailable where the source takes no writes."""
        _check_writable(engine, "what was sent again from the list of refused messages is to be marked in the source")
        with engine.begin() as connection:
            for outbox in present(connection):
                outbox.mark(connection, names, RELAYED)
            refused.taken(connection, names)


def _check_writable(engine: Engine, why: str) -> None:
    """Raises Unavailable for a replica."""
    with engine.connect() as connection:
        if source.is_read_only(connection):
            raise Unavailable(f"{why}, which takes no writes (read_only is ON): is it a replica?")


def _has_list(engine: Engine) -> bool:
    return sa.inspect(engine).has_table(notify_refused.name)
