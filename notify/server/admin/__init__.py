"""The admin routes: what is there, what is stuck, and mending it. Every write has a reason and is recorded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from notify.limits import check_between
from notify.server.admin import bridges, dead_letters, groups, jobs, limits, messages, repairs, topics, transactions
from notify.server.admin.jobs import Jobs
from notify.server.admin.writes import Desk
from notify.wire import instant

if TYPE_CHECKING:
    from notify.server.app import App


def router(app: App) -> APIRouter:
    """All admin routes; `app.jobs` is set to what runs their long work."""
    routes = APIRouter(tags=["admin"])
    desk = Desk(app)
    app.jobs = Jobs(desk)
    topics.add_routes(routes, desk)
    dead_letters.add_routes(routes, desk, app.jobs)
    repairs.add_routes(routes, desk)  # before those with an {action}
    groups.add_routes(routes, desk)
    transactions.add_routes(routes, desk)
    messages.add_routes(routes, desk)
    limits.add_routes(routes, desk)
    jobs.add_routes(routes, desk)
    bridges.add_routes(routes, desk)

    @routes.get("/actions")
    async def actions(max: int = 100) -> dict[str, Any]:
        """Who did what, the newest first."""
        check_between("max", max, 1, 10_000)
        rows = await asyncio.to_thread(desk.database.newest, max)
        for row in rows:
            row["at"] = instant(row.pop("at_us"))
        return {"actions": rows}

    return routes
