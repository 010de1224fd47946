"""Messages that no queue takes: noted in the source's list of refused messages, and sent again when a person says so.

The list lies in the source (notify/refused.py), and the bridge goes on behind them. They are noted after the batch that
they belong to is stored. Until that has succeeded they are kept here and in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify import refused
from notify.errors import Unavailable
from notify.limits import LIMITS
from notify.outbox import REFUSED, RELAYED, present
from notify.refused import Refusal
from notify.wire import BridgedTransaction, Item, RefusedReport, encode_msgpack

log = logging.getLogger("notify.bridge")

MOST_WAITING = 1000
HEAD_BYTES = 1024 + (128 << 10)
"""A request has at most so many bytes besides its transactions: two positions, and names of parts."""


class Refusals:
    """Those of one source."""

    def __init__(self) -> None:
        self._waiting: list[Refusal] = []
        self._has_list: bool | None = None
        self._told = 0
        """How many the log said that wait."""

    def add(self, transactions: Sequence[BridgedTransaction], items: Sequence[Item]) -> None:
        """Take over what was refused. Raises Unavailable where the source has taken none of it for too long."""
        by_id = {t.id: t for t in transactions}
        for item in items:
            log.error("no queue takes %s: %s (%s); it stays in the source's table", item.id, item.detail, item.code)
            transaction = by_id.get(item.id)
            if transaction is not None:
                self._waiting.append(Refusal.of(transaction, item))
        if len(self._waiting) > MOST_WAITING:
            raise Unavailable(
                f"{len(self._waiting)} refused messages could not be noted in the source: its user needs UPDATE on the "
                "tables of messages, and INSERT, UPDATE and DELETE on notify_refused"
            )

    def note(self, engine: Engine, mover: str) -> None:
        """Note them in the source. Where it does not allow that now, they wait for the next call."""
        waiting = list(self._waiting)
        if not waiting:
            return
        try:
            if self._has_list is None:
                self._has_list = refused.ensure(engine)
            with engine.begin() as connection:
                for outbox in present(connection):
                    outbox.mark(connection, [refusal.id for refusal in waiting], REFUSED)
                if self._has_list:
                    refused.note(connection, mover, waiting)
        except sa.exc.SQLAlchemyError as error:
            if len(waiting) != self._told:
                self._told = len(waiting)
                log.warning("%d refused messages are not noted in the source yet: %s", len(waiting), str(error)[:300])
            return
        del self._waiting[: len(waiting)]

    def to_retry(self, engine: Engine) -> list[BridgedTransaction]:
        """Those that a person has had tried again; empty where the source has no list."""
        try:
            with engine.connect() as connection:
                names = refused.to_retry(connection)
                return [t for outbox in present(connection) for t in outbox.read(connection, names)] if names else []
        except sa.exc.SQLAlchemyError:
            return []

    def report(self, engine: Engine) -> RefusedReport | None:
        """The list as the queue's console shows it; None where the source has none."""
        try:
            with engine.connect() as connection:
                return refused.report(connection)
        except sa.exc.SQLAlchemyError:
            return None

    def taken(self, engine: Engine, names: Sequence[str]) -> None:
        """The queue has these now."""
        with engine.begin() as connection:
            for outbox in present(connection):
                outbox.mark(connection, names, RELAYED)
            refused.taken(connection, names)


def too_large(transactions: Sequence[BridgedTransaction]) -> list[Item]:
    """Those that fit into no request, even alone."""
    most = LIMITS.request_bytes - HEAD_BYTES
    sizes = [(t.id, len(encode_msgpack(t))) for t in transactions]
    return [
        Item(name, 413, code="request_too_large", detail=f"the transaction has {size:,} bytes; {most:,} fit a request")
        for name, size in sizes
        if size > most
    ]
