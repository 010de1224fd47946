"""Admin routes of audits: `notify audit --publish` sends its verdicts here, for the console and for alarms."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from notify.admin_api.server import AuditWrite
from notify.errors import NotFound
from notify.protocol.limits import check_between
from notify.protocol.wire import instant
from notify.runtime.threads import in_thread
from notify.server.admin.writes import Desk, Who

NO_SCRIPT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"


_OLDER = {"verdict": "INCONCLUSIVE", "counts": {}, "totals": {}, "reasons": [], "since": "", "until": ""}
"""The fields of a verdict that an older version stored without them."""


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `audits`."""

    @routes.get("/audits")
    async def audits(max: int = 20) -> dict[str, Any]:
        """List the newest verdicts."""
        check_between("max", max, 1, 1000)
        rows = await in_thread(desk.running.administration.records.audits, max)
        return {
            "audits": [
                _OLDER | {k: v for k, v in r.items() if k != "at_us"} | {"at": instant(r["at_us"])} for r in rows
            ]
        }

    @routes.get("/audits/{number}/report", response_class=HTMLResponse)
    async def report(number: int) -> HTMLResponse:
        """Show an audit's report, with headers that keep it from running or loading anything."""
        check_between("number", number, 0, 1 << 62)
        page = await in_thread(desk.running.administration.records.audit_report, number)
        if not page:
            raise NotFound(f"audit {number} has no report here")
        return HTMLResponse(page, headers={"content-security-policy": NO_SCRIPT})

    @routes.post("/audits")
    async def add(write: AuditWrite, who: Who) -> dict[str, Any]:
        """Keep a verdict and its report; only the newest hundred reports are kept."""
        fields = write.given("report")

        async def do() -> Any:
            at_us = desk.running.core.clock()
            number = await in_thread(desk.running.administration.records.add_audit, at_us, fields, write.report)
            return {"id": number, "verdict": write.verdict}

        return await desk.carry_out(write, who, "audit.add", write.verdict, do, fields)
