"""Admin routes of bridges and members: who feeds the queues, who is there."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.server.admin.writes import Desk


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `bridges` and `nodes`."""

    @routes.get("/bridges")
    async def bridges() -> dict[str, Any]:
        """Every source that a bridge has written for: epoch, position, lag, and how long it has been silent."""
        return {"bridges": desk.core.bridges.shown()}

    @routes.get("/bridges/{source}")
    async def bridge(source: str) -> dict[str, Any]:
        """One of them."""
        return desk.core.bridges.one(source)

    @routes.get("/nodes")
    async def nodes() -> dict[str, Any]:
        """Servers, bridges, relays and consumers in the registry; without one this server alone."""
        return desk.members()
