"""Admin routes of dead letters: listing them, and sending some or all to their group again."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from notify import ids
from notify.errors import InvalidRequest
from notify.limits import check_between
from notify.server.admin.writes import Desk, Who, Write
from notify.server.data.encode import json_pulled
from notify.server.jobs.redrive import AT_ONCE, EFFECTS_AGAIN, EFFECTS_KEPT, DeadLetters, Wanted
from notify.storage.names import dead_letter_topic
from notify.storage.records import StoredMessage
from notify.wire import instant


class WantedFields(BaseModel):
    """Conditions on dead letters; one that is left out matches all."""

    model_config = ConfigDict(extra="forbid")
    topic: str | None = None
    tag: str | None = None
    key: str | None = None
    contains: Annotated[str | None, Field(description="text in why it is dead", max_length=500)] = None
    filter: Annotated[str, Field(description="CEL over headers, key, tag and topic")] = ""
    dead_from: AwareDatetime | None = None
    dead_to: AwareDatetime | None = None

    def wanted(self) -> Wanted:
        """Raises InvalidRequest for a filter that does not parse."""
        fields = self.model_dump(exclude_none=True)
        return Wanted(**{k: v.isoformat() if isinstance(v, datetime) else v for k, v in fields.items()})


class Redrive(Write):
    ids: list[str] | None = Field(None, max_length=AT_ONCE)
    max: int = Field(100, ge=1, le=AT_ONCE)
    wanted: WantedFields = WantedFields()
    all: bool = Field(False, description="every one that matches, as a job: see jobs/{id}")
    replay_effects: bool = Field(
        False, description="handlers with an inbox have their effects again, of what took effect before, too"
    )
    force: bool = Field(False, description="although the inbox's rows of some of these messages may be purged")


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `groups/{name}/dead-letters`."""
    _views(routes, desk)
    _redriving(routes, desk)


def _views(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/groups/{name}/dead-letters")
    async def dead_letters(
        name: str,
        offset: int = 0,
        max: int = 100,
        topic: str | None = None,
        tag: str | None = None,
        key: str | None = None,
        contains: str | None = None,
        filter: str = "",
    ) -> dict[str, Any]:
        """List a group's dead letters that match, from an offset on; `next_offset` continues the list."""
        check_between("max", max, 1, 10_000)
        check_between("offset", offset, 0, 1 << 62)
        wanted = WantedFields(topic=topic, tag=tag, key=key, contains=contains, filter=filter).wanted()
        letters = DeadLetters(desk.core, name)
        chosen, next_offset = await letters.find(wanted, offset, max)
        return {"messages": await _shown(letters, chosen), "next_offset": next_offset}


def _redriving(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/groups/{name}/dead-letters/redrive")
    async def redrive(name: str, write: Redrive, who: Who) -> dict[str, Any]:
        """Send dead letters to this group alone again; a repeated redrive sends each once."""
        wanted = write.wanted.wanted()
        effects = EFFECTS_AGAIN if write.replay_effects else EFFECTS_KEPT
        letters = DeadLetters(desk.core, name)
        if write.all:
            if write.ids is not None:
                raise InvalidRequest("give ids or all, not both", "invalid_schema")
            start, end = letters.bounds()
            spec = {"group": name, "wanted": wanted.plain(), "from": start, "until": end}
            spec |= {"replay_effects": write.replay_effects, "force": write.force}

            async def begin() -> Any:
                return {"job": await desk.jobs.start("redrive", name, spec, end - start)}

            return await desk.carry_out(
                write, who, "dead_letter.redrive", name, begin, {"at_most": end - start, "effects": effects}
            )
        limit = AT_ONCE if write.ids is not None else write.max
        if write.ids is not None:
            chosen = letters.by_ids(set(write.ids))
        else:
            chosen = (await letters.find(wanted, 0, limit, not_redriven=True))[0]
        names = [ids.message_id(m.transaction_id, m.message_no) for m in chosen]

        async def do() -> Any:
            items = await letters.send_again(chosen, replay_effects=write.replay_effects, force=write.force)
            missing = set(write.ids or ()) - set(names)
            items += [
                {"id": i, "status": 404, "detail": f"not among the dead letters of {dead_letter_topic(name)!r}"}
                for i in sorted(missing)
            ]
            return {"items": items}

        return await desk.carry_out(write, who, "dead_letter.redrive", name, do, {"ids": names, "effects": effects})


async def _shown(letters: DeadLetters, messages: list[StoredMessage]) -> list[dict[str, Any]]:
    return [
        json_pulled(m) | {"dead_at": instant(m.committed_us), "redriven": is_redriven}
        for m, is_redriven in zip(messages, await letters.are_redriven(messages), strict=True)
    ]
