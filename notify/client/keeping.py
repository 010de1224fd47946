"""Keeping a consumer's inbox: a look at it before anything is received, and its old rows, which servers are told of."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from notify.backoff import Backoff
from notify.client import inbox as inboxes
from notify.client.inbox import Inbox
from notify.client.session import Session, Work
from notify.errors import NotifyError

log = logging.getLogger("notify.consumer")

INBOX_LOOK_SECONDS = 60.0
INBOX_PURGE_SECONDS = 3600.0
INBOX_BATCH = 1000
INBOX_PAUSE_SECONDS = 0.2
"""Between two batches of a purge, so that it takes little of the database."""
INBOX_WAIT_SECONDS = 0.5
INBOX_WAIT_MAX_SECONDS = 10.0


class Keeping:
    """Belongs to the consumer's event loop."""

    def __init__(self, inbox: Inbox, ask: Callable[..., Awaitable[Any]]) -> None:
        """`ask(inbox, function, *arguments)` calls a function of a connection as the inbox's `call` does."""
        self._inbox = inbox
        self._ask = ask

    async def until_good(self, stopping: asyncio.Event) -> None:
        """Wait while the inbox's database is away. Raises InvalidRequest where an inbox cannot work in it."""
        backoff = Backoff(INBOX_WAIT_SECONDS, INBOX_WAIT_MAX_SECONDS)
        while not stopping.is_set():
            try:
                await self._ask(self._inbox, inboxes.check, self._inbox.make_tables)
                return
            except sa.exc.OperationalError as error:
                wait = backoff.next()
                log.warning("the inbox's database is away, again in %.1f s: %s", wait, error.orig)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), wait)

    async def whole_from(self) -> datetime:
        """Since when the inbox has a row for each message that took effect."""
        since: datetime = await self._ask(self._inbox, inboxes.whole_from)
        return since

    async def run(self, work: Work, sessions: Mapping[str, tuple[Session, asyncio.Task[None]]]) -> None:
        """Purge old rows in small batches, and tell the servers first from when on the inbox will be whole.

        Also when somebody else has purged it (`Inbox.purge`). Until it is cancelled.
        """
        inbox, loop = self._inbox, asyncio.get_running_loop()
        purge_at = loop.time() + random.uniform(0, INBOX_PURGE_SECONDS)  # instances of a group start together
        while True:
            await asyncio.sleep(INBOX_LOOK_SECONDS)
            try:
                is_old = False
                if inbox.purge_after is not None and loop.time() >= purge_at:
                    is_old = await self._ask(inbox, inboxes.note_old, inbox.purge_after)
                    purge_at = loop.time() + INBOX_PURGE_SECONDS
                whole_from = await self.whole_from()
                if whole_from != work.inbox_from:
                    work.inbox_from = whole_from
                    for session, _ in list(sessions.values()):
                        if session.is_subscribed:
                            await session.tell_inbox()
                # A session that has not subscribed yet will tell its server then, before anything is deleted.
                while is_old and sessions and all(session.is_subscribed for session, _ in sessions.values()):
                    is_old = await self._ask(inbox, inboxes.delete_noted, INBOX_BATCH) == INBOX_BATCH
                    await asyncio.sleep(INBOX_PAUSE_SECONDS)
            except (sa.exc.DBAPIError, NotifyError) as error:
                log.warning("the inbox was not purged, or the servers were not told of it; again later: %s", error)
