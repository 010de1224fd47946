"""Sending again what a person has had tried again, from the list of refused messages, where the source stands."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.binlog_bridge.announcing import Warnings
from notify.binlog_bridge.refusals import Readable, Refusals
from notify.binlog_bridge.unfinished import with_sent_again
from notify.refused import Refusal
from notify.threads import in_thread
from notify.wire import Bridged, PackedBridgeBatch

LOOK_SECONDS = 2.0
"""How often the list is asked."""


class Retrying:
    """The list of one source, as long as one connection to it lasts."""

    def __init__(
        self,
        engine: Engine,
        refusals: Refusals,
        post: Callable[[PackedBridgeBatch], Awaitable[Bridged]],
        note: Callable[[list[Refusal]], Awaitable[None]],
        knows_ids: bool,
    ) -> None:
        """`post` appends a batch, `note` lists those whose rows are no message; `knows_ids`: does the target?"""
        self._engine = engine
        self._refusals = refusals
        self._post = post
        self._note = note
        self._knows_ids = knows_ids
        self._warnings = Warnings()
        self._look_at = 0.0

    async def send(self, epoch: int, position: str) -> str:
        """Send all that is to be tried again, if it is time to look; the position that the target has then.

        For a target that knows no ids the position names what was sent with it, until that is marked in the source: a
        bridge that dies before that is succeeded by one that marks it, and does not send it. There is always a position
        to name it in once the source has any transaction.
        """
        if time.monotonic() < self._look_at or not (position or self._knows_ids):
            return position
        self._look_at = time.monotonic() + LOOK_SECONDS
        pages = self._refusals.retries(self._engine)
        while (page := await self._next(pages)) is not None:
            again, unreadable = page
            await self._note(unreadable)
            if not again:
                continue
            stands = position if self._knows_ids else with_sent_again(position, [t.id for t in again])
            answer = await self._post(PackedBridgeBatch(epoch, position, stands, transactions=again))
            refused = {item.id for item in answer.refused}
            await in_thread(self._refusals.taken, self._engine, [t.id for t in again if t.id not in refused])
            position = answer.position
        return position

    async def _next(self, pages: Iterator[Readable]) -> Readable | None:
        """None behind the last one, and where the source does not let its list be read."""
        try:
            return await in_thread(next, pages, None)
        except sa.exc.SQLAlchemyError as error:
            self._warnings.say(
                "refused messages are not tried again (the bridge's user needs SELECT, INSERT, UPDATE and DELETE on "
                "notify_refused, and UPDATE on the tables of messages)",
                error,
            )
            return None
