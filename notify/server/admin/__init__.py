"""The admin routes: they show the state of a server and change it. Every write has a reason, and is recorded."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends

from notify.server.admin import (
    actions,
    alarms,
    audits,
    backups,
    bridges,
    credentials,
    dead_letters,
    decisions,
    groups,
    held_keys,
    jobs,
    messages,
    overview,
    permission,
    repairs,
    schedules,
    settings,
    topics,
    transactions,
    withdrawing,
)
from notify.server.admin.writes import Desk
from notify.server.json_body import JsonRoute
from notify.server.running import Running


def router(running: Callable[[], Running]) -> APIRouter:
    """All admin routes. `running` returns the running parts of the server, or raises Unavailable."""
    routes = APIRouter(tags=["admin"], dependencies=[Depends(permission.check_admin)], route_class=JsonRoute)
    # Each of these checks its own right, because older SDKs call them as a service.
    services = APIRouter(tags=["admin"], route_class=JsonRoute)
    desk = Desk(running)
    topics.add_routes(routes, services, desk)
    dead_letters.add_routes(routes, desk)
    repairs.add_routes(routes, desk)
    withdrawing.add_routes(routes, desk)
    held_keys.add_routes(routes, desk)  # before the groups' {action}
    groups.add_routes(routes, services, desk)
    decisions.add_routes(routes, desk)
    transactions.add_routes(routes, desk)
    messages.add_routes(routes, desk)
    jobs.add_routes(routes, desk)
    bridges.add_routes(routes, desk)
    settings.add_routes(routes, desk)
    schedules.add_routes(routes, desk)
    backups.add_routes(routes, desk)
    credentials.add_routes(routes, desk)
    actions.add_routes(routes, desk)
    alarms.add_routes(routes, desk)
    audits.add_routes(routes, desk)
    overview.add_routes(routes, desk)
    all_routes = APIRouter()
    all_routes.include_router(routes)
    all_routes.include_router(services)
    return all_routes
