"""Admin routes of the server as a whole: its state now, and its last hour."""

from __future__ import annotations

import asyncio
import heapq
import shutil
from typing import Any

from fastapi import APIRouter

from notify import __version__
from notify.server.admin.writes import Desk
from notify.server.core.core import Core
from notify.storage.capabilities import shard_names
from notify.storage.names import dead_letter_topic
from notify.wire import instant

WORST = 10
READ_BYTES = 1 << 20


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `overview` and `history`."""

    @routes.get("/overview")
    async def overview() -> dict[str, Any]:
        """Show the last five seconds' rates, transactions in doubt, undelivered messages, lags, disk and alarms."""
        core = desk.core
        now_us = core.clock()
        doubt = await core.store.in_doubt()
        disk = await asyncio.to_thread(shutil.disk_usage, core.settings.data_dir)
        return {
            "at": instant(now_us),
            "version": __version__,
            "shards": shard_names(core.store, core.settings.shard),
            "rates": desk.history.rates(),
            "in_doubt": {
                "count": doubt.prepared,
                "is_more": doubt.prepared == doubt.counted_to != 0,
                "oldest_seconds": _age(now_us, doubt.oldest_us) if doubt.oldest_us else None,
            },
            "parked": {"count": doubt.parked, "is_more": doubt.parked == doubt.counted_to != 0},
            "disk": {"total": disk.total, "free": disk.free, "used_share": round(1 - disk.free / disk.total, 4)},
            "alarms": desk.alarms.now(),
            "queues": _queues(core, now_us) if core.has_queues else None,
        }

    @routes.get("/history")
    async def history() -> dict[str, Any]:
        """Show the last hour in columns: times, rates a second, lag."""
        return desk.history.columns()


def _queues(core: Core, now_us: int) -> dict[str, Any]:
    groups = core.delivery.groups.values()
    lags = [(g.lag(), g.name) for g in groups]
    rows = [
        {
            "name": name,
            "lag": behind,
            "oldest_seconds": oldest_seconds(core, name, now_us),
            "paused": core.delivery.groups[name].paused,
        }
        for behind, name in heapq.nlargest(WORST, lags)
        if behind
    ]
    dead = 0
    for group in groups:
        topic = core.queues.topic(dead_letter_topic(group.name))
        if topic is not None:
            start, end = core.queues.bounds(topic.name, 0)
            dead += end - start
    return {
        "lag": sum(behind for behind, _ in lags),
        "topics": len(core.queues.topics()),
        "groups": len(groups),
        "leased": sum(g.in_flight() for g in groups),
        "delayed": core.queues.delayed(),
        "dead_letters": dead,
        "oldest_undelivered_seconds": max((row["oldest_seconds"] or 0 for row in rows), default=None),
        "lagging": rows,
    }


def oldest_seconds(core: Core, group: str, now_us: int) -> float | None:
    """The age, in seconds, of the oldest message that a group has not settled; None if there is none."""
    oldest = None
    for cursor in core.delivery.groups[group].cursors.values():
        if not cursor.lag():
            continue
        first = core.queues.read(cursor.topic, cursor.queue, cursor.progress.floor, 1, READ_BYTES)
        if first and (oldest is None or first[0].committed_us < oldest):
            oldest = first[0].committed_us
    return None if oldest is None else _age(now_us, oldest)


def _age(now_us: int, then_us: int) -> float:
    return round(max(0, now_us - then_us) / 1e6, 3)
