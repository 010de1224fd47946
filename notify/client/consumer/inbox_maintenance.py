"""Keeping: checks a consumer's inbox before anything is received, purges its old rows, and reports the purge to the
servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from notify.client.consumer.session import Session, Work
from notify.client.inbox import inbox as inboxes
from notify.client.inbox.inbox import Inbox
from notify.errors import NotifyError
from notify.runtime.backoff import CHANCE, Backoff
from notify.runtime.databases import reason_of
from notify.runtime.program_log import program_log
from notify.runtime.signals import done_before

log = program_log("notify.consumer")

INBOX_LOOK_SECONDS = 60.0
INBOX_PURGE_SECONDS = 3600.0
INBOX_BATCH = 1000
INBOX_PAUSE_SECONDS = 0.2
"""The pause between two batches of a purge, so that the purge takes little of the database's time."""
INBOX_WAIT_SECONDS = 0.5
INBOX_WAIT_MAX_SECONDS = 10.0
NOT_KEPT = "the inbox was not purged, or the purge was not reported to the servers; trying again later"


class InboxMaintenance:
    """Keeps the inbox of one consumer. Belongs to the consumer's event loop."""

    def __init__(self, inbox: Inbox, ask: Callable[..., Awaitable[Any]]) -> None:
        """`ask(inbox, function, *arguments)` calls a function with a connection, as the inbox's `call` does."""
        self._inbox = inbox
        self._ask = ask

    async def until_good(self, stopping: asyncio.Event) -> None:
        """Wait while the inbox's database is unreachable. Raises InvalidRequest if an inbox cannot work in the
        database, and the database's other errors."""
        backoff = Backoff(INBOX_WAIT_SECONDS, INBOX_WAIT_MAX_SECONDS)
        while not stopping.is_set():
            try:
                await done_before(stopping, self._ask(self._inbox, inboxes.check, self._inbox.make_tables))
                return
            except Exception as error:
                if not self._inbox.is_away(error):
                    raise
                wait = backoff.next()
                log.warning("the inbox's database is unreachable, trying again in %.1f s: %s", wait, reason_of(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), wait)

    async def whole_from(self) -> datetime:
        """The time since which the inbox has a row for each message that took effect."""
        since: datetime = await self._ask(self._inbox, inboxes.whole_from)
        return since

    async def run(self, work: Work, sessions: Mapping[str, tuple[Session, asyncio.Task[None]]]) -> None:
        """Purge old rows in small batches until cancelled. Before that, tell the servers since when the inbox is whole.

        The servers are also told after another process has purged the inbox (`Inbox.purge`).
        """
        inbox, loop = self._inbox, asyncio.get_running_loop()
        purge_at = loop.time() + CHANCE.uniform(0, INBOX_PURGE_SECONDS)  # instances of a group often start together
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
                            await session.report_inbox()
                # A session that has not subscribed yet tells its server when it does; delete nothing before that.
                while is_old and sessions and all(session.is_subscribed for session, _ in sessions.values()):
                    is_old = await self._ask(inbox, inboxes.delete_noted, INBOX_BATCH) == INBOX_BATCH
                    await asyncio.sleep(INBOX_PAUSE_SECONDS)
            except (sa.exc.SQLAlchemyError, NotifyError, OSError) as error:
                log.warning("%s: %s", NOT_KEPT, reason_of(error))
            except Exception:
                log.exception(NOT_KEPT)
