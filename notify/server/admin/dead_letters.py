"""Admin routes of dead letters: listing them, and sending some or all to their group again."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from notify.errors import InvalidRequest
from notify.limits import check_between
from notify.server.admin.writes import Desk, Who, Write
from notify.server.groups import Chosen
from notify.server.jobs.redrive import AT_ONCE, EFFECTS_AGAIN, EFFECTS_KEPT, Wanted


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
        return await desk.letters.listed(name, wanted, offset, max)

    @routes.get("/dead-letters")
    async def groups_with_dead_letters(prefix: str = "", max: int = 100) -> dict[str, Any]:
        """List the groups that have dead letters, those with the most first."""
        check_between("max", max, 1, 10_000)
        return {"groups": await desk.letters.counted(prefix, max)}


def _redriving(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/groups/{name}/dead-letters/redrive")
    async def redrive(name: str, write: Redrive, who: Who) -> dict[str, Any]:
        """Send dead letters to this group alone again; a repeated redrive sends each once."""
        wanted = write.wanted.wanted()
        if write.all:
            return await _redrive_all(desk, name, write, who)
        names = None if write.ids is None else tuple(write.ids)
        chosen = Chosen(names, wanted, write.max, write.replay_effects, write.force)
        preview, do = await desk.letters.redrive(name, chosen)
        return await desk.carry_out(write, who, "dead_letter.redrive", name, do, preview)


async def _redrive_all(desk: Desk, name: str, write: Redrive, who: str) -> dict[str, Any]:
    if write.ids is not None:
        raise InvalidRequest("give ids or all, not both", "invalid_schema")
    start, end, at_most = await desk.letters.bounds(name)
    spec = {"group": name, "wanted": write.wanted.wanted().plain(), "from": start, "until": end}
    spec |= {"replay_effects": write.replay_effects, "force": write.force}

    async def begin() -> Any:
        return {"job": await desk.jobs.start("redrive", name, spec, at_most)}

    effects = EFFECTS_AGAIN if write.replay_effects else EFFECTS_KEPT
    preview = {"at_most": at_most, "effects": effects}
    return await desk.carry_out(write, who, "dead_letter.redrive", name, begin, preview)
