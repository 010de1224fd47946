"""Admin routes that send content from a person: a message to a topic, and a dead letter with corrected content."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from notify.admin_api.dead_letters import EditLetter
from notify.admin_api.topics import SendMessage
from notify.protocol import ids
from notify.protocol.wire import JsonMessages, JsonPublished
from notify.server.admin.writes import Asker, Desk, Who
from notify.server.core.admission import new_messages
from notify.server.letters.engine import Closing
from notify.server.letters.query import Edited


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes `topics/{name}/messages` and `groups/{name}/dead-letters/edit`."""

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

    @routes.post("/groups/{name}/dead-letters/edit")
    async def edit(name: str, write: EditLetter, who: Who) -> dict[str, Any]:
        """Send a dead letter with other content to its own group, once, as a redrive does.

        The record names the changed fields. The log keeps the letter unchanged, and the message that was sent.
        """
        how = Closing(replay_effects=write.replay_effects, force=write.force)
        edited = Edited(write.id, write.given("id", "replay_effects", "force"), how)
        preview, do = await desk.running.queues.letters.edit(name, edited)
        return await desk.carry_out(write, who, "dead_letter.edit", name, do, preview)
