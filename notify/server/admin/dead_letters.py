"""Admin routes of dead letters: list them, count them by cause, send them to their group again, drop them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from notify.admin_api.dead_letters import MOST_TEXT, Drop, EditLetter, LetterConditions, Redrive
from notify.admin_api.topics import Purge
from notify.errors import InvalidRequest, NotFound
from notify.protocol.limits import check_between
from notify.server.admin.writes import Desk, Who
from notify.server.letters.engine import Closing
from notify.server.letters.letters import effects_of
from notify.server.letters.query import Chosen, Edited, LetterQuery


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `groups/{name}/dead-letters`."""
    _views(routes, desk)
    _redriving(routes, desk)
    _dropping(routes, desk)
    _editing(routes, desk)


def _wanted(conditions: LetterConditions) -> LetterQuery:
    """Raises InvalidRequest for a filter that does not parse."""
    return LetterQuery(**conditions.plain())


def _views(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/groups/{name}/dead-letters")
    async def dead_letters(
        name: str,
        offset: int = 0,
        max: int = 100,
        topic: str | None = None,
        tag: str | None = None,
        key: str | None = None,
        contains: Annotated[str | None, Query(max_length=MOST_TEXT)] = None,
        filter: str = "",
        failure: Annotated[str, Query(pattern="^([0-9a-f]{12})?$")] = "",
        newest: bool = False,
        before: int = 0,
    ) -> dict[str, Any]:
        """List a group's dead letters that match, from an offset on; `next_offset` continues the list.

        The list ends where `next_offset` is the offset that was asked for, or 0. With `newest`, the newest come first;
        `next_before`, given as `before`, continues the list, and 0 ends it. An answer may have fewer than `max`
        letters, or none, although there are more: a search ends after 5 s, at a queue server after 20,000 letters.
        """
        check_between("max", max, 1, 10_000)
        check_between("offset", offset, 0, 1 << 62)
        wanted = _wanted(
            LetterConditions(topic=topic, tag=tag, key=key, contains=contains, filter=filter, failure=failure)
        )
        if newest:
            check_between("before", before, 0, 1 << 62)
            return await desk.running.queues.letters.newest(name, wanted, before, max)
        return await desk.running.queues.letters.listed(name, wanted, offset, max)

    @routes.get("/groups/{name}/dead-letters/failures")
    async def failures(name: str) -> dict[str, Any]:
        """List the causes of a group's dead letters: one exception type and one function each, or one text.

        `looked_at` of `of` dead letters have been counted so far; `others` of them belong to no listed failure group.
        """
        return await desk.running.queues.letters.failures(name)

    @routes.get("/dead-letters")
    async def groups_with_dead_letters(prefix: str = "", max: int = 100) -> dict[str, Any]:
        """List the groups that have dead letters, the groups with the most dead letters first."""
        check_between("max", max, 1, 10_000)
        return {"groups": await desk.running.queues.letters.counted(prefix, max)}


def _redriving(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/groups/{name}/dead-letters/redrive")
    async def redrive(name: str, write: Redrive, who: Who) -> dict[str, Any]:
        """Send dead letters to this group alone again; a repeated redrive sends each dead letter once.

        It looks for 5 s, and at a queue server at 20,000 letters at most: where there are more, `next_offset` in the
        result is not 0, and is the `offset` of the next request. Ids are looked for in this way over Kafka
        alone; the request that has seen the last letter refuses those that it did not find.
        """
        wanted = _wanted(write.wanted)
        if write.all:
            return await _redrive_all(desk, name, write, who)
        letter_ids = None if write.ids is None else tuple(write.ids)
        chosen = Chosen(letter_ids, wanted, write.max, _how(write), write.offset)
        preview, do = await desk.running.queues.letters.redrive(name, chosen)
        return await desk.carry_out(write, who, "dead_letter.redrive", name, do, preview)


def _how(write: Redrive) -> Closing:
    return Closing(replay_effects=write.replay_effects, force=write.force)


async def _redrive_all(desk: Desk, name: str, write: Redrive, who: str) -> dict[str, Any]:
    if write.ids is not None:
        raise InvalidRequest("give ids or all, not both", "invalid_schema")
    how = {"replay_effects": write.replay_effects, "force": write.force}
    # A queue engine that cannot do this refuses it now, before the job begins.
    await desk.running.queues.letters.redrive(name, Chosen((), _wanted(write.wanted), 1, _how(write)))
    return await _as_job(desk, name, write, who, "redrive", how, {"effects": effects_of(_how(write))})


def _dropping(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/groups/{name}/dead-letters/drop")
    async def drop(name: str, write: Drop, who: Who) -> dict[str, Any]:
        """Drop dead letters, so that they are never sent again: these ids, or as a job all dead letters that match.

        A letter that was already sent again stays sent. To drop all letters of a group, purge them. For `next_offset`
        see redrive.
        """
        why = f"{who}: {write.reason}" if who else write.reason
        if write.ids is not None:
            preview, do = await desk.running.queues.letters.drop(name, tuple(write.ids), why, write.offset)
            return await desk.carry_out(write, who, "dead_letter.drop", name, do, preview)
        if not any(_wanted(write.wanted).plain().values()):
            raise InvalidRequest("say which: give ids, or conditions in wanted; a purge deletes all", "invalid_schema")
        return await _as_job(desk, name, write, who, "drop", {"drop": why}, {})

    @routes.post("/groups/{name}/dead-letters/purge")
    async def purge_dead_letters(name: str, write: Purge, who: Who) -> dict[str, Any]:
        """Purge a group's dead letters from before a point, redriven or not."""
        preview, do = await desk.running.queues.letters.purge(name, write.before)
        return await desk.carry_out(write, who, "dead_letter.purge", name, do, preview)


async def _as_job(
    desk: Desk, name: str, write: Redrive | Drop, who: str, what: str, how: dict[str, Any], more: dict[str, Any]
) -> dict[str, Any]:
    """Send or drop all letters that match; `how` is stored with the job, `more` is added to the preview."""
    start, end, at_most, _ = await desk.running.queues.letters.bounds(name)
    spec = {"group": name, "wanted": _wanted(write.wanted).plain(), "from": start, "until": end} | how

    async def begin() -> Any:
        return {"job": await desk.running.jobs.start(what, name, spec, at_most)}

    preview = {"at_most": at_most} | more
    if write.wanted.failure:
        preview["failure"] = await _failure(desk, name, write.wanted.failure)
    return await desk.carry_out(write, who, f"dead_letter.{what}", name, begin, preview)


async def _failure(desk: Desk, name: str, fingerprint: str) -> dict[str, Any]:
    """The failure group with this fingerprint. Raises NotFound if no letter has the fingerprint."""
    listed = await desk.running.queues.letters.failures(name)
    for row in listed["failures"]:
        if row["fingerprint"] == fingerprint:
            return dict(row)
    raise NotFound(f"group {name[:100]!r} has no failure group {fingerprint}: list them again, they may be gone")


def _editing(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/groups/{name}/dead-letters/edit")
    async def edit(name: str, write: EditLetter, who: Who) -> dict[str, Any]:
        """Send a dead letter with other content to its own group, once, as a redrive does.

        The record names the changed fields. The log keeps the letter unchanged, and the message that was sent.
        """
        how = Closing(replay_effects=write.replay_effects, force=write.force)
        edited = Edited(write.id, write.given("id", "replay_effects", "force"), how)
        preview, do = await desk.running.queues.letters.edit(name, edited)
        return await desk.carry_out(write, who, "dead_letter.edit", name, do, preview)
