"""Admin routes of check webhooks: the addresses that get checks for producers that cannot poll."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.server import WebhooksWrite
from notify.protocol.limits import check_name
from notify.server import webhooks
from notify.server.admin.writes import Desk, Who
from notify.server.configuration.revisions import WEBHOOKS


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `check-webhooks`."""

    @routes.get("/check-webhooks")
    async def shown() -> dict[str, Any]:
        """List the addresses by producer group."""
        return {"webhooks": desk.running.administration.configuration.check_webhooks}

    @routes.put("/check-webhooks")
    async def put(write: WebhooksWrite, who: Who) -> dict[str, Any]:
        """Replace all webhooks; their hosts must be on the allow-list, and the server signs its calls."""
        configuration = desk.running.administration.configuration
        for group, url in write.webhooks.items():
            check_name("producer_group", group)
            webhooks.check_address(url, configuration.settings)
        result = {"webhooks": write.webhooks}

        async def do() -> Any:
            document = configuration.document() | {WEBHOOKS: write.webhooks}
            await desk.running.administration.revise(who, write.reason, document)
            return result

        return await desk.carry_out(write, who, "check_webhooks.put", "check-webhooks", do, result)
