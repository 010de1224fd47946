"""Admin routes of held keys: list them, and retry, skip or release the messages that hold them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.held_keys import AT_ONCE, HeldChoice
from notify.protocol.limits import check_between
from notify.server.admin.writes import Desk, Who
from notify.server.groups import own_holds


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `groups/{name}/held-keys`."""

    @routes.get("/groups/{name}/held-keys")
    async def held_keys(name: str, topic: str = "", max: int = 100) -> dict[str, Any]:
        """List the keys that a group holds, the longest held first: since when, why, and how many messages wait.

        A key is held if one of its messages used up its attempts under a subscription with `on_exhausted` hold.
        """
        check_between("max", max, 1, AT_ONCE)
        return own_holds.listed(desk.running.core, name, topic, max)

    @routes.post("/groups/{name}/held-keys/retry")
    async def retry(name: str, write: HeldChoice, who: Who) -> dict[str, Any]:
        """Deliver the messages that hold these keys again; a key whose message fails is held again."""
        preview, do = own_holds.decide(desk.running.core, name, "retry", write, who)
        return await desk.carry_out(write, who, "held_key.retry", name, do, preview)

    @routes.post("/groups/{name}/held-keys/skip")
    async def skip(name: str, write: HeldChoice, who: Who) -> dict[str, Any]:
        """Make the messages that hold these keys dead letters, with the reason; the keys continue."""
        preview, do = own_holds.decide(desk.running.core, name, "skip", write, who)
        return await desk.carry_out(write, who, "held_key.skip", name, do, preview)

    @routes.post("/groups/{name}/held-keys/release")
    async def release(name: str, write: HeldChoice, who: Who) -> dict[str, Any]:
        """Deliver the messages that hold these keys again, with all their attempts."""
        preview, do = own_holds.decide(desk.running.core, name, "release", write, who)
        return await desk.carry_out(write, who, "held_key.release", name, do, preview)
