"""Messages that no queue takes: noted in the source's list of refused messages, and sent again when a person says so.

The list lies in the source (notify/refused.py), and the bridge goes on behind them. They are noted before the position
moves past them: a bridge that is killed in between meets them again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify import refused
from notify.errors import Unavailable
from notify.outbox import REFUSED, RELAYED, present
from notify.refused import Refusal
from notify.wire import BridgedTransaction, Item, RefusedReport

log = logging.getLogger("notify.bridge")


class Refusals:
    """Those of one source."""

    def __init__(self) -> None:
        self._has_list: bool | None = None

    def note(
        self, engine: Engine, mover: str, transactions: Sequence[BridgedTransaction], items: Sequence[Item]
    ) -> None:
        """Note what a target refused of these transactions. Raises Unavailable where the source does not take that."""
        by_id = {t.id: t for t in transactions}
        refusals = [Refusal.of(by_id[item.id], item) for item in items if item.id in by_id]
        names = [refusal.id for refusal in refusals]
        try:
            if self._has_list is None:
                self._has_list = refused.ensure(engine)
            with engine.begin() as connection:
                for outbox in present(connection):
                    outbox.mark(connection, names, REFUSED)
                if self._has_list:
                    refused.note(connection, mover, refusals)
        except sa.exc.SQLAlchemyError as error:
            raise Unavailable(
                f"no queue takes {items[0].id} ({items[0].detail}), and it cannot be noted in the source, whose user "
                "needs UPDATE on the tables of messages, and SELECT, INSERT, UPDATE and DELETE on notify_refused: "
                f"{str(error)[:300]}"
            ) from error
        for refusal in refusals:
            log.error("no queue takes %s: %s (%s); it is on the list", refusal.id, refusal.detail, refusal.code)

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
