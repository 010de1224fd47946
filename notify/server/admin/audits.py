"""Admin routes of audits: `notify audit --publish` sends its verdicts here, for the console and for alarms."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from pydantic import AfterValidator, Field

from notify.errors import InvalidRequest, NotFound
from notify.limits import check_between, instant_us
from notify.server.admin.writes import Desk, Who, Write
from notify.threads import in_thread
from notify.wire import instant

REPORT_BYTES = 512 << 10
NO_SCRIPT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"


MOST = 1 << 53
"""The largest number of a verdict: browsers, too, count so far."""
_OLDER = {"verdict": "INCONCLUSIVE", "counts": {}, "totals": {}, "reasons": [], "since": "", "until": ""}
"""The fields of a verdict that an older version stored without them."""


def _instant(text: str) -> str:
    """An instant as the console formats it. Raises ValueError."""
    if not text:
        return ""
    try:
        return instant(instant_us("it", datetime.fromisoformat(text)))
    except (ValueError, InvalidRequest):
        raise ValueError("it should be an instant, such as 2026-01-31T12:00:00Z") from None


Instant = Annotated[str, AfterValidator(_instant)]
Name = Annotated[str, Field(max_length=100)]


class AuditWrite(Write):
    verdict: Literal["PASS", "FINDINGS", "INCONCLUSIVE"]
    counts: dict[Name, Annotated[int, Field(ge=0, le=MOST)]] = Field(max_length=64, description="findings by class")
    totals: dict[Name, Annotated[int | float, Field(ge=-MOST, le=MOST)]] = Field(default_factory=dict, max_length=64)
    reasons: list[Annotated[str, Field(max_length=1000)]] = Field(
        default_factory=list, max_length=100, description="why a part could not be judged"
    )
    since: Instant = Field("", max_length=40, description="start of the time that the audit covers, RFC 3339")
    until: Instant = Field("", max_length=40, description="end of the time that the audit covers, RFC 3339")
    report: str = Field("", max_length=REPORT_BYTES, description="the report, a self-contained HTML page")


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `audits`."""

    @routes.get("/audits")
    async def audits(max: int = 20) -> dict[str, Any]:
        """List the newest verdicts."""
        check_between("max", max, 1, 1000)
        rows = await in_thread(desk.administration.records.audits, max)
        return {
            "audits": [
                _OLDER | {k: v for k, v in r.items() if k != "at_us"} | {"at": instant(r["at_us"])} for r in rows
            ]
        }

    @routes.get("/audits/{number}/report", response_class=HTMLResponse)
    async def report(number: int) -> HTMLResponse:
        """Show an audit's report, with headers that keep it from running or loading anything."""
        check_between("number", number, 0, 1 << 62)
        page = await in_thread(desk.administration.records.audit_report, number)
        if not page:
            raise NotFound(f"audit {number} has no report here")
        return HTMLResponse(page, headers={"content-security-policy": NO_SCRIPT})

    @routes.post("/audits")
    async def add(write: AuditWrite, who: Who) -> dict[str, Any]:
        """Keep a verdict and its report; only the newest hundred reports are kept."""
        fields = write.model_dump(exclude={"reason", "dry_run", "report"})

        async def do() -> Any:
            at_us = desk.core.clock()
            number = await in_thread(desk.administration.records.add_audit, at_us, fields, write.report)
            return {"id": number, "verdict": write.verdict}

        return await desk.carry_out(write, who, "audit.add", write.verdict, do, fields)
