"""Admin routes of messages: searches, and one message's life."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from notify.errors import InvalidRequest
from notify.limits import LIMITS, check_between
from notify.server.admin.life import life
from notify.server.admin.writes import Desk
from notify.server.data.encode import json_pulled
from notify.server.newest import Place, page
from notify.storage.queues import Store
from notify.storage.records import StoredMessage
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

        Of a topic with `newest`: the newest first; `next` continues the list as `before`. An answer has 8 MiB of
        messages, or one: `is_more` says that some are left out.
        """
        check_between("max", max, 1, 10_000)
        if id is not None:
            return {"messages": [await message(id)]}
        from_us, until_us = _microseconds("from", since, 0), _microseconds("to", until, 1 << 62)
        store = desk.core.queues
        if key is not None:
            chosen, is_more = _in_a_reply(store.keyed(key, topic, from_us, until_us, max))
            # Another key may have the same hash.
            rows = [row for row in map(json_pulled, chosen) if row.get("key") == key]
            return {"messages": rows} | ({"is_more": True} if is_more else {})
        if topic is None:
            raise InvalidRequest("give an id, a key, or a topic (with from and to)", "invalid_query")
        if newest:
            place = Place.of(before) if before else None
            shown, last = page(store, topic, desk.topic(topic).queues, from_us, until_us, place, max)
            return {"messages": [json_pulled(m) for m in shown], "next": "" if last is None else str(last)}
        queues = range(desk.topic(topic).queues)
        matching = itertools.chain.from_iterable(_oldest(store, topic, q, from_us, until_us, max) for q in queues)
        chosen, is_more = _in_a_reply(itertools.islice(matching, max))
        return {"messages": [json_pulled(m) for m in chosen]} | ({"is_more": True} if is_more else {})

    @routes.get("/messages/{message_id}")
    async def message(message_id: str) -> dict[str, Any]:
        """Show a message's life: half, outcome, place, and each group's deliveries, failures, dead letter and redrive.

        An acknowledgement follows the handler's effect. `timeline_whole` is false where so much was recorded since
        that not all was read; `notify audit explain` reads everything, the effect's own row included.
        """
        return await life(desk.core, message_id)


def _oldest(store: Store, topic: str, queue: int, from_us: int, until_us: int, most: int) -> Iterator[StoredMessage]:
    """The oldest messages of a queue committed in [from, until)."""
    offset = store.offset_at(topic, queue, from_us)
    while some := store.read(topic, queue, offset, most, LIMITS.reply_bytes):
        for m in some:
            if m.committed_us >= until_us:
                return
            yield m
        offset = some[-1].offset + 1


def _in_a_reply(messages: Iterable[StoredMessage]) -> tuple[list[StoredMessage], bool]:
    """As many of these as go into a reply, one at least, without the damaged ones; and whether there are more."""
    chosen: list[StoredMessage] = []
    size = 0
    for m in messages:
        size += len(m.payload)
        if chosen and size > LIMITS.reply_bytes:
            return chosen, True
        if not m.corrupt:
            chosen.append(m)
    return chosen, False
