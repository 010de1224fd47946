"""Inbox: the handler's effect and a row that says it happened commit together, so a redelivery has no effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client.table import instant_before, note_purged, notify_inbox, notify_source
from notify.databases import database_now
from notify.errors import InvalidRequest
from notify.message import ReceivedMessage

DAY = 86_400.0
_INSERT = notify_inbox.insert().values(created_at=database_now())


class Inbox:
    """Effects exactly once, in the database of `engine` (an Engine, or an AsyncEngine for AsyncConsumer).

    Keep rows longer than messages can come again (`purge`), and as long as an audit is to cover.
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

    def purge(self, older_than: float, *, batch: int = 10_000) -> int:
        """Delete rows older than so many seconds, in transactions of `batch` rows; how many there were.

        The database notes that they may be gone, so that an audit does not miss their effects. Raises InvalidRequest
        for less than a day: a message may come again as long as its topic retains it.
        """
        if older_than < DAY:
            raise InvalidRequest(
                f"older_than is at least {DAY:g} s: a message that comes again would take effect again"
            )
        engine = getattr(self.engine, "sync_engine", self.engine)
        t = notify_inbox.c
        with engine.begin() as connection:
            note_purged(connection, notify_source.c.inbox_from, older_than)
            cutoff = instant_before(connection, older_than)
        total = 0
        while True:
            with engine.begin() as connection:
                oldest = sa.select(t.consumer_group, t.message_id).where(t.created_at < cutoff).limit(batch)
                rows = connection.execute(oldest).all()
                if rows:
                    gone = [sa.and_(t.consumer_group == g, t.message_id.in_(ids)) for g, ids in _by_group(rows).items()]
                    connection.execute(notify_inbox.delete().where(sa.or_(*gone)))
            total += len(rows)
            if len(rows) < batch:
                return total

    async def run_async(self, group: str, message: ReceivedMessage, handler: Callable[..., Any]) -> bool:
        """The same for a coroutine function and an AsyncSession."""
        from sqlalchemy.ext.asyncio import AsyncSession

        async with AsyncSession(self.engine) as session, session.begin():
            connection = await session.connection()
            if not await connection.run_sync(claim, group, message.id):
                return False
            await handler(message, session)
        return True


def _by_group(rows: Sequence[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group, message_id in rows:
        found.setdefault(group, []).append(message_id)
    return found


def claim(connection: sa.Connection, group: str, message_id: str) -> bool:
    """Insert the inbox row; False if it stands already. Waits for a transaction that is inserting the same."""
    try:
        with connection.begin_nested():
            connection.execute(_INSERT, {"consumer_group": group, "message_id": message_id})
    except sa.exc.IntegrityError:
        return False
    return True
