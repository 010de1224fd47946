"""Admin routes of messages: searches, one message's life, a message from a person, and the bodies that they name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from notify.admin_api.topics import SendMessage
from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.limits import LIMITS, check_between, digits
from notify.protocol.wire import JsonMessages, JsonPublished, microseconds
from notify.server.admin.timeline import timeline
from notify.server.admin.writes import Asker, Desk, Who
from notify.server.core.admission import new_messages
from notify.server.data.encode import json_pulled
from notify.server.message_pages import Place, page
from notify.storage.capabilities import NamesBodies
from notify.storage.log import LogStore
from notify.storage.queues import Store
from notify.storage.records import StoredMessage

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
    """The routes under `messages`, and the route `stored-bodies`."""
    _views(routes, desk)
    _sending(routes, desk)
    _stored_bodies(routes, desk)


def _views(routes: APIRouter, desk: Desk) -> None:
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
        """Find messages by id, by key, or by topic and time in [from, to); the oldest of each queue come first.

        With `topic` and `newest`, the newest come first; `next`, given as `before`, continues the list. An answer has
        at most 8 MiB of messages, but at least one message; `is_more` says that some are left out.
        """
        check_between("max", max, 1, 10_000)
        if id is not None:
            return {"messages": [await message(id)]}
        from_us, until_us = _microseconds("from", since, 0), _microseconds("to", until, 1 << 62)
        store = desk.running.core.queues
        if key is not None:
            chosen, is_more = _in_a_reply(store.keyed(key, topic, from_us, until_us, max))
            # Another key may have the same hash.
            rows = [row for row in map(json_pulled, chosen) if row.get("key") == key]
            return {"messages": rows} | ({"is_more": True} if is_more else {})
        if topic is None:
            raise InvalidRequest("give an id, a key, or a topic (with from and to)", "invalid_query")
        if newest:
            place = Place.of(before) if before else None
            chosen, last = page(store, topic, desk.topic(topic).queues, from_us, until_us, place, max)
            return {"messages": [json_pulled(m) for m in chosen], "next": "" if last is None else str(last)}
        queues = range(desk.topic(topic).queues)
        matching = itertools.chain.from_iterable(_oldest(store, topic, q, from_us, until_us, max) for q in queues)
        chosen, is_more = _in_a_reply(itertools.islice(matching, max))
        return {"messages": [json_pulled(m) for m in chosen]} | ({"is_more": True} if is_more else {})

    @routes.get("/messages/{message_id}")
    async def message(message_id: str) -> dict[str, Any]:
        """Show a message's life: half, outcome, place, and each group's deliveries, failures, dead letter and redrive.

        An acknowledgement follows the handler's effect. `timeline_whole` is false if too much was recorded since then
        to read all of it; `notify audit explain` reads everything, including the row of the effect.
        """
        return await timeline(desk.running.core, message_id)


def _sending(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/topics/{name}/messages")
    async def send(name: str, write: SendMessage, who: Who, asker: Asker) -> dict[str, Any]:
        """Send a message to a topic that exists, without a transaction; the preview names the receiving groups."""
        desk.topic(name)  # a mistyped name makes no topic
        message = JsonPublished(topic=name, id=ids.message_id(ids.new_id(), 0), **write.given())
        new_messages(
            [message], desk.running.core.clock(), lambda _: True, lambda _: None
        )  # raises what publishing raises
        desk.running.core.transactions.check_place([message])
        groups = None
        if asker.may("view"):  # an administrator of this topic alone must not learn who reads it
            groups = [row["group"] for row in await desk.running.queues.topics.groups_of(name)]

        async def do() -> Any:
            (item,) = await desk.running.core.transactions.publish(JsonMessages(messages=[message]))
            why = {"code": item.code, "detail": item.detail} if item.code else {}
            return {"items": [{"id": item.id, "status": item.status} | why], "groups": groups}

        return await desk.carry_out(write, who, "message.send", name, do, {"groups": groups})


def _stored_bodies(routes: APIRouter, desk: Desk) -> None:
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


def _oldest(store: Store, topic: str, queue: int, from_us: int, until_us: int, most: int) -> Iterator[StoredMessage]:
    """The oldest messages of a queue committed in [from, until)."""
    offset = store.offset_at(topic, queue, from_us)
    while batch := store.read(topic, queue, offset, most, LIMITS.reply_bytes):
        for message in batch:
            if message.committed_us >= until_us:
                return
            yield message
        offset = batch[-1].offset + 1


def _in_a_reply(messages: Iterable[StoredMessage]) -> tuple[list[StoredMessage], bool]:
    """The messages that fit into a reply, at least one, without damaged ones; and whether more follow."""
    chosen: list[StoredMessage] = []
    size = 0
    for message in messages:
        size += len(message.payload)
        if chosen and size > LIMITS.reply_bytes:
            return chosen, True
        if not message.corrupt:
            chosen.append(message)
    return chosen, False
