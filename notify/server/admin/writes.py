"""Shared by all admin writes: a reason, a dry run, and a record of who did what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Header, Request
from pydantic import BaseModel, ConfigDict, Field

from notify.errors import NotFound, Unavailable
from notify.server.access import EVERYONE, Principal
from notify.server.core import Core
from notify.storage.store import Topic

if TYPE_CHECKING:
    from notify.server.administration import Administration
    from notify.server.app import App
    from notify.server.history import History
    from notify.server.jobs.runner import Jobs


async def _who(request: Request, user: Annotated[str, Header(alias="x-notify-user", max_length=255)] = "") -> str:
    """The principal's name; while access is off, whatever the header says."""
    principal: Principal = request.state.principal
    return user if principal is EVERYONE else principal.name


Who = Annotated[str, Depends(_who)]


def _asker(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


Asker = Annotated[Principal, Depends(_asker)]


class Write(BaseModel):
    """Every write says why, and may only say what it would do."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(min_length=1, max_length=1000, examples=["the mailer is mended"])
    dry_run: bool = Field(False, description="only say what would be done")


class Desk:
    """Where the admin routes find the server, and carry out writes."""

    def __init__(self, app: App) -> None:
        self._app = app

    @property
    def core(self) -> Core:
        """Raises Unavailable while there is none."""
        if self._app.core is None:
            raise Unavailable("the server is starting or stopping; try again")
        return self._app.core

    def topic(self, name: str) -> Topic:
        """Raises NotFound."""
        found = self.core.queues.topic(name)
        if found is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        return found

    def members(self) -> dict[str, Any]:
        return self._app.members()

    @property
    def administration(self) -> Administration:
        """Raises Unavailable while there is none."""
        if self._app.administration is None:
            raise Unavailable("the server is starting or stopping; try again")
        return self._app.administration

    @property
    def history(self) -> History:
        """Raises Unavailable while there is none."""
        if self._app.history is None:
            raise Unavailable("the server is starting or stopping; try again")
        return self._app.history

    def alarms(self) -> list[dict[str, Any]]:
        """The alarms that are raised now."""
        return [] if self._app.alarms is None else self._app.alarms.now()

    @property
    def jobs(self) -> Jobs:
        """Raises Unavailable while there is none."""
        if self._app.jobs is None:
            raise Unavailable("the server is starting or stopping; try again")
        return self._app.jobs

    async def carry_out(
        self, write: Write, who: str, what: str, target: str, do: Callable[[], Awaitable[Any]], preview: Any
    ) -> dict[str, Any]:
        """Do it unless it is a dry run, and record it."""
        if write.dry_run:
            return {"status": 200, "dry_run": True, "target": target, "result": preview}
        result = await do()
        records = self.administration.records
        await asyncio.to_thread(records.record, self.core.clock(), who, what, target, write.reason, result)
        return {"status": 200, "dry_run": False, "target": target, "result": result}
