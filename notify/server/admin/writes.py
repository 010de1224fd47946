"""The common parts of all admin writes: a reason, a dry run, and a record with the principal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import structlog
from fastapi import Depends, Header, Request

from notify import faults
from notify.admin_api.declaration import Write
from notify.errors import NotFound, NotifyError
from notify.server.access.principal import EVERYONE, Principal
from notify.server.cluster.workers import Workers
from notify.server.configuration.follow import Administration
from notify.server.core.core import Core
from notify.server.core.pushes import Pushes
from notify.server.groups import Groups, Letters, TopicViews
from notify.server.jobs.runner import Jobs
from notify.server.running import Running
from notify.server.shipping import Shipping
from notify.server.watch.alarms import Alarms
from notify.server.watch.figures import Figures
from notify.server.watch.history import History
from notify.server.watch.silences import Silences
from notify.storage.topics import Topic
from notify.threads import in_thread

log = structlog.get_logger("notify.server")


async def _who(request: Request, user: Annotated[str, Header(alias="x-notify-user", max_length=255)] = "") -> str:
    """The principal's name; while access is off, the name in the header."""
    principal: Principal = request.state.principal
    return user if principal is EVERYONE else principal.name


SpanName = Literal["hour", "day"]
"""The time that a chart covers."""

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
    def core(self) -> Core:
        return self._running().core

    @property
    def administration(self) -> Administration:
        return self._running().administration

    @property
    def groups(self) -> Groups:
        return self._running().queues.groups

    @property
    def letters(self) -> Letters:
        return self._running().queues.letters

    @property
    def topics(self) -> TopicViews:
        return self._running().queues.topics

    @property
    def jobs(self) -> Jobs:
        return self._running().jobs

    @property
    def history(self) -> History:
        return self._running().history

    @property
    def figures(self) -> Figures:
        return self._running().figures

    @property
    def alarms(self) -> Alarms:
        return self._running().alarms

    @property
    def silences(self) -> Silences:
        return self._running().silences

    @property
    def pushes(self) -> Pushes:
        return self._running().pushes

    @property
    def workers(self) -> Workers | None:
        """The workers of this machine, if this server is one of them."""
        return self._running().workers

    @property
    def shipping(self) -> Shipping | None:
        return self._running().shipping

    def members(self) -> dict[str, Any]:
        """The answer of `GET /v1/members`."""
        return self._running().members()

    def topic(self, name: str) -> Topic:
        """The topic of this name. Raises NotFound."""
        topic = self.core.queues.topic(name)
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
        records = self.administration.records
        number = await in_thread(records.record, self.core.clock(), who, what, target, write.reason, {"state": "begun"})
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
