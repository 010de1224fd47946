"""The parts of every admin write: a reason, a dry run, and a record with the principal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import structlog
from fastapi import Depends, Header, Request
from pydantic import BaseModel, ConfigDict, Field

from notify import faults
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
    """The principal's name; while access is off, whatever the header says."""
    principal: Principal = request.state.principal
    return user if principal is EVERYONE else principal.name


SpanName = Literal["hour", "day"]
"""How far back a chart goes."""

Who = Annotated[str, Depends(_who)]


def _asker(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


Asker = Annotated[Principal, Depends(_asker)]


class Write(BaseModel):
    """The fields of every write: its reason, and whether it is a dry run."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(min_length=1, max_length=1000, examples=["the mailer is mended"])
    dry_run: bool = Field(False, description="only say what would be done")


class Desk:
    """Gives admin routes the parts that run, and carries out their writes. Raises Unavailable while nothing runs."""

    def __init__(self, running: Callable[[], Running]) -> None:
        """`running` gives what runs, or raises Unavailable."""
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
        """The workers of the machine that this server is one of."""
        return self._running().workers

    @property
    def shipping(self) -> Shipping | None:
        return self._running().shipping

    def members(self) -> dict[str, Any]:
        """The answer of `GET /v1/members`."""
        return self._running().members()

    def topic(self, name: str) -> Topic:
        """Raises NotFound."""
        topic = self.core.queues.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        return topic

    async def carry_out(
        self, write: Write, who: str, what: str, target: str, do: Callable[[], Awaitable[Any]], preview: Any
    ) -> dict[str, Any]:
        """Do it unless it is a dry run, and record it.

        The record comes first, so that nothing is changed that nobody can look up. What cannot be recorded is refused;
        an action whose end cannot be recorded stays `begun` in the records.
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
            else:  # it may have been done all the same
                failed = {"state": "failed", "detail": str(refusal)}
                await _recorded(lambda: records.complete(number, failed), what)
            raise
        await _recorded(lambda: records.complete(number, result), what)
        return {"status": 200, "dry_run": False, "target": target, "result": result}


async def _recorded(change: Callable[[], None], what: str) -> None:
    """Record the end of an action. The action counts, not its record: what fails is logged."""
    try:
        await in_thread(change)
    except faults.DATABASE_AWAY as error:
        log.warning("action_stays_begun", what=what, reason=str(error)[:300])
