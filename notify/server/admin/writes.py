"""The common parts of all admin writes: a reason, a dry run, and a record with the principal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import structlog
from fastapi import Depends, Header, Request

from notify.admin_api.declaration import Write
from notify.errors import InvalidRequest, NotFound, NotifyError
from notify.runtime import faults
from notify.runtime.threads import in_thread
from notify.server.access.principal import EVERYONE, Principal
from notify.server.running import Running
from notify.storage.topics import Topic

log = structlog.get_logger("notify.server")


async def _who(request: Request, user: Annotated[str, Header(alias="x-notify-user", max_length=255)] = "") -> str:
    """The principal's name; while access is off, the name in the header."""
    principal: Principal = request.state.principal
    return user if principal is EVERYONE else principal.name


SpanName = Literal["5min", "hour", "day", "week"]
"""The time that a chart covers."""


def check_no_after(after: str) -> None:
    """Raises InvalidRequest if a list that is sorted by a figure should continue after a name."""
    if after:
        raise InvalidRequest("after continues a list by name: leave it out, or sort by name", "invalid_query")


Who = Annotated[str, Depends(_who)]


def _asker(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


Asker = Annotated[Principal, Depends(_asker)]


class Desk:
    """Gives admin routes the running parts of the server, and carries out their writes.

    Raises Unavailable while the server is starting or stopping.
    """

    def __init__(self, running: Callable[[], Running]) -> None:
        """`running` returns the running parts of the server, or raises Unavailable."""
        self._running = running

    @property
    def running(self) -> Running:
        return self._running()

    def topic(self, name: str) -> Topic:
        """The topic of this name. Raises NotFound."""
        topic = self.running.core.queues.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        return topic

    async def carry_out(
        self, write: Write, who: str, what: str, target: str, do: Callable[[], Awaitable[Any]], preview: Any
    ) -> dict[str, Any]:
        """Record the action and call `do`; a dry run only answers `preview`.

        The record is written before the change, so that everyone can look up every change: an action that cannot be
        recorded is refused. An action whose end cannot be recorded stays `begun` in the records.
        """
        if write.dry_run:
            return {"status": 200, "dry_run": True, "target": target, "result": preview}
        records = self.running.administration.records
        number = await in_thread(
            records.record, self.running.core.clock(), who, what, target, write.reason, {"state": "begun"}
        )
        try:
            result = await do()
        except NotifyError as refusal:
            if refusal.status < 500:
                await _recorded(lambda: records.take_back(number), what)
            else:  # the change may have been made although `do` failed
                failed = {"state": "failed", "detail": str(refusal)}
                await _recorded(lambda: records.complete(number, failed), what)
            raise
        await _recorded(lambda: records.complete(number, result), what)
        return {"status": 200, "dry_run": False, "target": target, "result": result}


async def _recorded(change: Callable[[], None], what: str) -> None:
    """Record the end of an action; a failure is only logged, because the action itself is over."""
    try:
        await in_thread(change)
    except faults.DATABASE_AWAY as error:
        log.warning("action_stays_begun", what=what, reason=str(error)[:300])
