"""Transactions on the source's list of refused messages that are met in the binlog again.

A bridge notes a refusal in the source before its position moves past it. One that dies between the two is succeeded by
one that reads the transaction again: the target may take it by now, and a person may have had it tried again. The list
alone decides about it. A target that knows ids recognises what it has; for another one the bridge leaves such
transactions out, and sends nothing from the list before it has read whatever an earlier bridge can have read.
"""

from __future__ import annotations

import logging

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.binlog_bridge import source
from notify.binlog_bridge.position import Position, reaches
from notify.binlog_bridge.refusals import Refusals
from notify.threads import in_thread
from notify.wire import PackedBridgeBatch

log = logging.getLogger("notify.bridge")

NO_RIGHT = ((1142,), (1143,))
"""MySQL's errors where a right to a table or column is missing."""


class Listed:
    """For one connection to the source."""

    def __init__(self, engine: Engine, refusals: Refusals, *, knows_ids: bool) -> None:
        """`knows_ids`: whether the target does."""
        self._engine = engine
        self._refusals = refusals
        self._until: Position | None = None
        """Where the source stood when this connection began; None: it is read up to there, or nothing is listed."""
        self._knows_ids = knows_ids

    async def begin(self) -> None:
        """Look whether there is anything on the list. Raises SQLAlchemyError."""
        if not self._knows_ids:
            self._until = await in_thread(self._look)

    def _look(self) -> Position | None:
        try:
            if not self._refusals.has_any(self._engine):
                return None
            with self._engine.connect() as connection:
                return source.current_position(connection)
        except sa.exc.OperationalError as error:
            if error.orig is None or error.orig.args[:1] not in NO_RIGHT:
                raise
            return None  # a user that may not read the list has not written to it either

    @property
    def is_passed(self) -> bool:
        """Whether no transaction of the list is met any more: what is to be tried again may be sent."""
        return self._until is None

    async def without(self, batch: PackedBridgeBatch) -> PackedBridgeBatch:
        """A batch without what stands on the list. Raises SQLAlchemyError."""
        if self._until is None or not batch.transactions:
            return batch
        ids = [t.id for t in batch.transactions]
        known = await in_thread(self._refusals.listed, self._engine, ids)
        if not known:
            return batch
        log.warning("%d transactions are on the list of refused messages already: left out", len(known))
        return msgspec.structs.replace(batch, transactions=[t for t in batch.transactions if t.id not in known])

    def read(self, position: str, *, is_caught_up: bool) -> None:
        """The binlog is read up to a position; `is_caught_up`: and has no more."""
        behind = Position.of(position)
        if self._until is not None and (is_caught_up or (behind and reaches(behind.gtids, self._until.gtids))):
            self._until = None
