"""The admin route of stored bodies: which of them this server's messages name."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.errors import InvalidRequest
from notify.protocol.limits import digits
from notify.server.admin.writes import Desk
from notify.storage.capabilities import NamesBodies
from notify.storage.log import LogStore


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The route `stored-bodies`."""

    @routes.get("/stored-bodies")
    async def stored_bodies(after: str = "") -> dict[str, Any]:
        """List the stored bodies that messages of this server name, part by part, for `notify store sweep`.

        `next`, given as `after`, continues the list; empty: it has ended. It also names bodies of messages that nothing
        needs any more, until retention drops them.
        """
        store = desk.running.core.store
        if not isinstance(store, NamesBodies):
            raise InvalidRequest("this server's storage cannot tell which bodies it names", "no_log")
        if isinstance(store, LogStore) and after and digits(after) is None:
            raise InvalidRequest(f"after is {after[:80]!r}: it should be an earlier answer's `next`", "invalid_query")
        names, following = await store.stored_bodies(after)
        return {"names": sorted(names), "next": following}
