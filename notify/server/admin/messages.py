"""Admin routes of messages: searches, and one message's life."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from notify.errors import InvalidRequest
from notify.limits import LIMITS, check_between
from notify.server.admin.life import life
from notify.server.admin.writes import Desk
from notify.server.data.encode import json_pulled
from notify.server.newest import Place, page
from notify.wire import microseconds

From = Annotated[datetime | None, Query(alias="from")]
To = Annotated[datetime | None, Query(alias="to")]


def _microseconds(name: str, moment: datetime | None, otherwise: int) -> int:
    if moment is None:
        return otherwise
    try:
        return microseconds(moment)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", "invalid_query") from None


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `messages`."""

    @routes.get("/messages")
    async def messages(
        id: str | None = None,
        key: str | None = None,
        topic: str | None = None,
        since: From = None,
        until: To = None,
        newest: bool = False,
        before: str = "",
        max: int = 100,
    ) -> dict[str, Any]:
        """Find messages by id, by key, or of a topic by time in [from, to); the oldest of each queue first.

        Of a topic with `newest`: the newest first; `next` continues the list as `before`.
        """
        check_between("max", max, 1, 10_000)
        if id is not None:
            return {"messages": [await message(id)]}
        from_us, until_us = _microseconds("from", since, 0), _microseconds("to", until, 1 << 62)
        store = desk.core.queues
        if key is not None:
            matching = store.keyed(key, topic, from_us, until_us, max)
            # Another key may have the same hash.
            rows = [json_pulled(m) for m in matching if not m.corrupt]
            return {"messages": [row for row in rows if row.get("key") == key]}
        if topic is None:
            raise InvalidRequest("give an id, a key, or a topic (with from and to)", "invalid_query")
        if newest:
            place = Place.of(before) if before else None
            shown, last = page(store, topic, desk.topic(topic).queues, from_us, until_us, place, max)
            return {"messages": [json_pulled(m) for m in shown], "next": "" if last is None else str(last)}
        rows = []
        for queue in range(desk.topic(topic).queues):
            first = store.offset_at(topic, queue, from_us)
            for m in store.read(topic, queue, first, max - len(rows), LIMITS.reply_bytes) if len(rows) < max else []:
                if m.committed_us >= until_us:
                    break
                if not m.corrupt:
                    rows.append(json_pulled(m))
        return {"messages": rows}

    @routes.get("/messages/{message_id}")
    async def message(message_id: str) -> dict[str, Any]:
        """Show a message's life: half, outcome, place, and each group's deliveries, failures, dead letter and redrive.

        An acknowledgement follows the handler's effect. `timeline_whole` is false where so much was recorded since
        that not all was read; `notify audit explain` reads everything, the effect's own row included.
        """
        return await life(desk.core, message_id)
