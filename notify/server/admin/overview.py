"""Admin routes of the whole server: its current state, and its history."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify import __version__
from notify.errors import Unavailable
from notify.protocol.wire import instant
from notify.runtime.threads import in_thread
from notify.server.admin.writes import Desk, SpanName
from notify.server.data_directory import room_of
from notify.storage.capabilities import shard_names


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `status`, `overview` and `history`."""

    @routes.get("/status")
    async def status() -> dict[str, Any]:
        """Show name and version, alarms that are not silenced, and counts of what waits, as of the last alarm search.

        Everything is in memory, so that it costs nothing to ask. What waits: transactions in doubt, parked and refused,
        unresolved dead letters, held keys.
        """
        settings, alarms = desk.running.core.settings, desk.running.alarms
        rows = [{"name": a.name, "target": a.target, "severity": a.shown()["severity"]} for a in alarms.heard()]
        told = {"name": settings.name, "version": __version__, "trace_url": settings.trace_url}
        return told | {"alarms": rows, "waiting": alarms.waiting}

    @routes.get("/overview")
    async def overview() -> dict[str, Any]:
        """Show the last five seconds' rates, transactions in doubt, undelivered messages, lags, disk and alarms."""
        core = desk.running.core
        now_us = core.clock()
        doubt = await core.store.in_doubt()
        disk = await in_thread(room_of, core.settings.data_dir)
        return {
            "at": instant(now_us),
            "version": __version__,
            "shards": shard_names(core.store, core.settings.shard),
            "rates": desk.running.history.rates(),
            "in_doubt": {
                "count": doubt.prepared,
                "is_more": doubt.prepared == doubt.counted_to != 0,
                "oldest_seconds": _age(now_us, doubt.oldest_us) if doubt.oldest_us else None,
            },
            "parked": {"count": doubt.parked, "is_more": doubt.parked == doubt.counted_to != 0},
            "disk": {"total": disk.total, "free": disk.free, "used_share": round(disk.used_share, 4)},
            "shipping": None if desk.running.shipping is None else desk.running.shipping.shown(),
            "alarms": desk.running.alarms.now(),
        } | await _queues(desk)

    @routes.get("/history")
    async def history(span: SpanName = "hour") -> dict[str, Any]:
        """Show the last hour, or another span, in columns: rates per second, transactions in doubt and parked, lag."""
        return desk.running.history.columns(span)


async def _queues(desk: Desk) -> dict[str, Any]:
    """The figures of groups, or the reason if Kafka keeps them and does not answer: the rest is shown anyway."""
    try:
        return {"queues": await desk.running.queues.groups.summary(), "queues_away": None}
    except Unavailable as error:
        return {"queues": None, "queues_away": str(error)}


def _age(now_us: int, then_us: int) -> float:
    return round(max(0, now_us - then_us) / 1e6, 3)
