"""Inbox: the handler's effect and a row that says it happened commit together, so a redelivery has no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client.table import notify_inbox
from notify.databases import database_now
from notify.message import ReceivedMessage

_INSERT = notify_inbox.insert().values(created_at=database_now())


class Inbox:
    """Effects exactly once, in the database of `engine` (an Engine, or an AsyncEngine for AsyncConsumer).

    Keep rows longer than messages can come again: `purge` refuses less than a day.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run(self, group: str, message: ReceivedMessage, handler: Callable[..., Any]) -> bool:
        """Call `handler(message, session)` and commit its effect; False if that happened before.

        What the handler raises rolls both back and is raised.
        """
        with Session(self.engine) as session, session.begin():
            if not claim(session.connection(), group, message.id):
                return False
            handler(message, session)
        return True

    async def run_async(self, group: str, message: ReceivedMessage, handler: Callable[..., Any]) -> bool:
        """The same for a coroutine function and an AsyncSession."""
        from sqlalchemy.ext.asyncio import AsyncSession

        async with AsyncSession(self.engine) as session, session.begin():
            connection = await session.connection()
            if not await connection.run_sync(claim, group, message.id):
                return False
            await handler(message, session)
        return True


def claim(connection: sa.Connection, group: str, message_id: str) -> bool:
    """Insert the inbox row; False if it stands already. Waits for a transaction that is inserting the same."""
    try:
        with connection.begin_nested():
            connection.execute(_INSERT, {"consumer_group": group, "message_id": message_id})
    except sa.exc.IntegrityError:
        return False
    return True
