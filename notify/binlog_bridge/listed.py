"""Leaves out transactions from the log that are already on the source's list of refused messages.

A bridge lists a refused transaction before its position moves past it. If it dies between the two, the next bridge
reads the transaction again. By then the target may accept it, and an operator may have retried it. Only the list
decides about it. A target that knows ids recognises its messages. For another target the bridge leaves listed
transactions out, and sends nothing from the list before it has read everything that an earlier bridge can have read.
"""

from __future__ import annotations

import logging

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.binlog_bridge.kinds import end_of_log, position_of
from notify.binlog_bridge.log import Position
from notify.binlog_bridge.refusals import Refusals
from notify.protocol.wire import PackedBridgeBatch
from notify.runtime.threads import in_thread

log = logging.getLogger("notify.binlog_bridge")

NO_RIGHT = ((1142,), (1143,))
"""MySQL's errors for a missing right to a table or column."""
NO_RIGHT_STATE = "42501"
"""PostgreSQL's state for the same."""


class Listed:
    """The listed transactions that may still be read during one connection to the source."""

    def __init__(self, engine: Engine, refusals: Refusals, *, knows_ids: bool) -> None:
        """`knows_ids`: whether the target recognises ids."""
        self._engine = engine
        self._refusals = refusals
        self._until: Position | None = None
        """The source's position when this connection began; None once it is reached, or if nothing is listed."""
        self._knows_ids = knows_ids

    async def begin(self) -> None:
        """Check whether anything is on the list. Raises SQLAlchemyError."""
        if not self._knows_ids:
            self._until = await in_thread(self._look)

    def _look(self) -> Position | None:
        try:
            if not self._refusals.has_any(self._engine):
                return None
            with self._engine.connect() as connection:
                return end_of_log(connection)
        except sa.exc.DBAPIError as error:
            is_refused = getattr(error.orig, "sqlstate", None) == NO_RIGHT_STATE
            if error.orig is None or (not is_refused and error.orig.args[:1] not in NO_RIGHT):
                raise
            return None  # a user that may not read the list has not written to it either

    @property
    def is_passed(self) -> bool:
        """Whether the log has no more listed transactions to come, so that retries may be sent."""
        return self._until is None

    async def without(self, batch: PackedBridgeBatch) -> PackedBridgeBatch:
        """A batch without its listed transactions. Raises SQLAlchemyError."""
        if self._until is None or not batch.transactions:
            return batch
        ids = [t.id for t in batch.transactions]
        listed = await in_thread(self._refusals.listed, self._engine, ids)
        if not listed:
            return batch
        log.warning("%d transactions are on the list of refused messages already: left out", len(listed))
        return msgspec.structs.replace(batch, transactions=[t for t in batch.transactions if t.id not in listed])

    def read(self, position: str, *, is_caught_up: bool) -> None:
        """Record that the log was read up to a position; `is_caught_up`: it has no more events."""
        if self._until is None:
            return
        reached = None if is_caught_up else position_of(position)
        if is_caught_up or (reached and reached.reaches(self._until)):
            self._until = None
