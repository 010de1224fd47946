"""The source's list of refused messages while its log is read: the log's listed transactions are left out, and those
that an operator wants to retry are sent again.

A bridge lists a refused transaction before its position moves past it. If it dies between the two, the next bridge
reads the transaction again. By then the target may accept it, and an operator may have retried it. Only the list
decides about it. A target that knows ids recognises its messages. For another target the bridge leaves listed
transactions out, and sends nothing from the list before it has read everything that an earlier bridge can have read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.binlog_bridge.errors import Warnings
from notify.binlog_bridge.kinds import end_of_log, position_of
from notify.binlog_bridge.log import Position
from notify.binlog_bridge.refusals import Readable, Refusals
from notify.binlog_bridge.unfinished import with_sent_again
from notify.movers.refused import Refusal
from notify.protocol.wire import Bridged, PackedBridgeBatch
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


LOOK_SECONDS = 2.0
"""How often the list is read."""


class Retrying:
    """Retries from the list of one source, during one connection to it."""

    def __init__(
        self,
        engine: Engine,
        refusals: Refusals,
        post: Callable[[PackedBridgeBatch], Awaitable[Bridged]],
        note: Callable[[list[Refusal]], Awaitable[None]],
        knows_ids: bool,
    ) -> None:
        """`post` appends a batch; `note` lists transactions whose rows are not a message.

        `knows_ids`: whether the target recognises ids.
        """
        self._engine = engine
        self._refusals = refusals
        self._post = post
        self._note = note
        self._knows_ids = knows_ids
        self._warnings = Warnings()
        self._look_at = 0.0

    async def send(self, epoch: int, position: str) -> str:
        """If LOOK_SECONDS have passed, send all transactions to retry; the target's new position.

        For a target that knows no ids, the position names the transactions that were sent with it, until they are
        marked in the source. If this bridge dies before that, the next bridge marks them, and does not send them again.
        There is a position for this once the source has any transaction.
        """
        if time.monotonic() < self._look_at or not (position or self._knows_ids):
            return position
        self._look_at = time.monotonic() + LOOK_SECONDS
        pages = self._refusals.retries(self._engine)
        while (page := await self._next(pages)) is not None:
            transactions, unreadable = page
            await self._note(unreadable)
            if not transactions:
                continue
            ids = [t.id for t in transactions]
            next_position = position if self._knows_ids else with_sent_again(position, ids)
            answer = await self._post(PackedBridgeBatch(epoch, position, next_position, transactions=transactions))
            refused = {item.id for item in answer.refused}
            await in_thread(self._refusals.taken, self._engine, [each for each in ids if each not in refused])
            position = answer.position
        return position

    async def _next(self, pages: Iterator[Readable]) -> Readable | None:
        """The next page; None after the last page, or if the list cannot be read."""
        try:
            return await in_thread(next, pages, None)
        except sa.exc.SQLAlchemyError as error:
            self._warnings.say(
                "refused messages are not tried again (the bridge's user needs SELECT, INSERT, UPDATE and DELETE on "
                "notify_refused, and UPDATE on the tables of messages)",
                error,
            )
            return None
