"""Sends refused messages again that an operator wants to retry, from the source's list of refused messages."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.binlog_bridge.announcing import Warnings
from notify.binlog_bridge.refusals import Readable, Refusals
from notify.binlog_bridge.unfinished import with_sent_again
from notify.movers.refused import Refusal
from notify.protocol.wire import Bridged, PackedBridgeBatch
from notify.runtime.threads import in_thread

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
