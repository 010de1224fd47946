"""Admin routes of rate limits. The limits are part of a revision of the settings, so that all servers follow them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter

from notify.admin_api.server import LimitsWrite
from notify.protocol.limits import check_name
from notify.server.admin.writes import Desk, Who
from notify.server.core.flow import RateLimits


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `limits`."""

    @routes.get("/limits")
    async def limits() -> dict[str, Any]:
        """Show the rates by topic, producer group and consumer group; a name that is not listed has no limit."""
        return dataclasses.asdict(desk.running.core.flow.limits)

    @routes.put("/limits")
    async def put_limits(write: LimitsWrite, who: Who) -> dict[str, Any]:
        """Replace all rates; a name that is left out no longer has a limit."""
        for name in [*write.topics, *write.producer_groups, *write.consumer_groups]:
            check_name("name", name)
        wanted = RateLimits(write.topics, write.producer_groups, write.consumer_groups)

        async def do() -> Any:
            document = desk.running.administration.configuration.with_limits(wanted)
            await desk.running.administration.revise(who, write.reason, document)
            return dataclasses.asdict(wanted)

        return await desk.carry_out(write, who, "limits.put", "limits", do, dataclasses.asdict(wanted))
