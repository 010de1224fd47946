"""Admin route of actions: the record of all admin writes, with who, when and why."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter

from notify.protocol.limits import check_between
from notify.protocol.wire import instant
from notify.runtime.threads import in_thread
from notify.server.admin.writes import Desk


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The route `actions`."""

    @routes.get("/actions")
    async def actions(
        max: int = 100, before: int | None = None, what: str = "", target: str = "", exact_target: str = ""
    ) -> dict[str, Any]:
        """List admin writes, the newest first, older than the id `before`; `what` and `target` are prefixes, and
        `exact_target` is a whole target."""
        check_between("max", max, 1, 10_000)
        if before is not None:
            check_between("before", before, 0, 1 << 62)
        records = desk.running.administration.records
        rows = await in_thread(records.actions, max, before, what[:64], target[:255], exact_target[:255])
        return {"actions": [_shown(row) for row in rows]}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "at_us"} | {
        "at": instant(row["at_us"]),
        "result": json.loads(row["result"]),
    }
