"""Admin routes of bridges, of refused messages, of what was left behind, and of the registry's members."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.errors import NotFound
from notify.server.admin.writes import Desk


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `bridges`, `refused`, `left-behind` and `nodes`."""

    @routes.get("/bridges")
    async def bridges() -> dict[str, Any]:
        """List the sources of bridges and relays, each with epoch, position, lag and silence."""
        return {"bridges": await desk.running.queues.groups.sources()}

    @routes.get("/bridges/{source}")
    async def bridge(source: str) -> dict[str, Any]:
        """Show one source, with the same fields as in the list."""
        for row in await desk.running.queues.groups.sources():
            if row["source"] == source:
                return row
        raise NotFound(f"no bridge has written for source {source[:60]!r}")

    @routes.get("/refused")
    async def refused() -> dict[str, Any]:
        """List the sources whose refused messages wait for a decision, as bridges and relays report."""
        return {"sources": await desk.running.queues.groups.refused()}

    @routes.get("/left-behind")
    async def left_behind() -> dict[str, Any]:
        """List the producer groups in mode auto with transactions that wait in their databases, as they report."""
        return {"left_behind": desk.running.core.left_behind.shown()}

    @routes.get("/nodes")
    async def nodes() -> dict[str, Any]:
        """List the servers, bridges, relays and consumers of the registry; without a registry, this server."""
        return desk.running.members()
