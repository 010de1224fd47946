"""The dead letters of this server's own groups."""

from __future__ import annotations

import heapq
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from notify.admin_api.dead_letters import AT_ONCE
from notify.errors import Conflict, NotFound
from notify.protocol.limits import LIMITS
from notify.protocol.wire import instant
from notify.server.core.core import Core
from notify.server.data.encode import json_pulled
from notify.server.groups import Change, Chosen, Edited, purging, rewriting
from notify.server.groups.open_letters import OpenLetters
from notify.server.jobs.dead_letters import (
    EFFECTS_AGAIN,
    EFFECTS_KEPT,
    LETTER_DROPPED,
    DeadLetters,
    Fate,
    Place,
    place_of,
)
from notify.server.jobs.failures import Failure
from notify.server.jobs.letter_query import LetterQuery, RedriveSpec
from notify.server.jobs.letter_search import LetterSearch
from notify.storage.names import dead_letter_topic
from notify.storage.records import StoredMessage


class OwnLetters:
    """The dead letters of the own groups. Every method raises WrongRole if the server has no queues."""

    def __init__(self, core: Core, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`monotonic`: a clock in seconds, which bounds searches."""
        self._core = core
        self._monotonic = monotonic
        self.open = OpenLetters(core)

    def count(self, group: str) -> int:
        """The number of a group's letters that were neither redriven nor dropped."""
        return self.open.count(group)

    async def counted(self, prefix: str, most: int) -> list[dict[str, Any]]:
        first = dead_letter_topic("")
        names = [t.name.removeprefix(first) for t in self._core.queues.topics() if t.name.startswith(first + prefix)]
        rows = []
        for name in names:
            letters = DeadLetters(self._core, name).bounds()[2]
            if letters:
                count = self.count(name)
                rows.append({"group": name, "count": count, "redriven": letters - count})
        return heapq.nlargest(most, rows, key=lambda row: (row["count"], row["redriven"]))

    async def listed(self, name: str, wanted: LetterQuery, offset: int, most: int) -> dict[str, Any]:
        search = self._listing(name, wanted, most)
        next_offset = await search.forwards(offset)
        return {"messages": search.results, "next_offset": next_offset}

    async def newest(self, name: str, wanted: LetterQuery, before: int, most: int) -> dict[str, Any]:
        search = self._listing(name, wanted, most)
        next_before = await search.backwards(before)
        return {"messages": search.results, "next_before": next_before}

    def _listing(self, name: str, wanted: LetterQuery, most: int) -> LetterSearch[dict[str, Any]]:
        letters = DeadLetters(self._core, name)
        return LetterSearch(letters, wanted, _shown, most, LIMITS.reply_bytes, self._monotonic)

    async def failures(self, name: str) -> dict[str, Any]:
        await self.open.look_at(name)
        failures, looked_at = self.open.failures(name)
        total = DeadLetters(self._core, name).bounds()[2]
        rows = [failure_row(failure) for failure in failures.listed()]
        return {"failures": rows, "others": failures.others, "looked_at": looked_at, "of": total}

    async def drop(self, name: str, names: tuple[str, ...], why: str, offset: int = 0) -> Change:
        letters = DeadLetters(self._core, name)
        places = await letters.places_of(set(names))

        async def do() -> Any:
            items = await self._lot_by_lot(letters, places, names, lambda lot: letters.drop(lot, why))
            return {"items": items, "next_offset": 0}

        return Change({"ids": [place.id for place in places], "next_offset": 0}, do)

    async def redrive(self, name: str, chosen: Chosen) -> Change:
        letters = DeadLetters(self._core, name)
        places, next_offset = await self._chosen(letters, chosen)
        send = partial(letters.send_again, replay_effects=chosen.replay_effects, force=chosen.force)
        names = [place.id for place in places]

        async def do() -> Any:
            items = await self._lot_by_lot(letters, places, chosen.ids or names, send)
            return {"items": items, "next_offset": next_offset}

        effects = EFFECTS_AGAIN if chosen.replay_effects else EFFECTS_KEPT
        return Change({"ids": names, "effects": effects, "next_offset": next_offset}, do)

    async def _chosen(self, letters: DeadLetters, chosen: Chosen) -> tuple[Sequence[Place], int]:
        """(the places of the chosen letters, the offset where the search for further ones goes on, or 0)."""
        if chosen.ids is not None:
            return await letters.places_of(set(chosen.ids)), 0
        search = LetterSearch(letters, chosen.wanted, _open_place, min(chosen.most, AT_ONCE), monotonic=self._monotonic)
        next_offset = await search.forwards(chosen.offset)
        return search.results, 0 if search.is_over else next_offset

    async def _lot_by_lot(
        self,
        letters: DeadLetters,
        places: Sequence[Place],
        asked: Sequence[str],
        do: Callable[[list[StoredMessage]], Awaitable[list[dict[str, Any]]]],
    ) -> list[dict[str, Any]]:
        """Redrive or drop letters; the result of each, and a refusal for each id in `asked` without a letter."""
        items: list[dict[str, Any]] = []
        for lot in letters.lots(places):
            done = await do(lot)
            self.open.closed(letters.group, lot, done)
            items += done
        return items + not_letters(letters.group, asked, [item["id"] for item in items])

    async def edit(self, name: str, edited: Edited) -> Change:
        letters = DeadLetters(self._core, name)
        lot = next(letters.lots(await letters.places_of({edited.id})), None)
        if lot is None:
            raise NotFound(f"{edited.id[:100]!r} is not among the dead letters of group {name[:100]!r}")
        letter = lot[0]
        if (await letters.are_closed([letter]))[0]:
            raise Conflict(
                "the letter was sent again or dropped before: what was sent cannot be changed", "letter_closed"
            )
        corrected, changed = rewriting.rewritten(letter, edited.changes, self._core.clock())
        effects = EFFECTS_AGAIN if edited.replay_effects else EFFECTS_KEPT

        async def do() -> Any:
            items = await letters.send_again([corrected], replay_effects=edited.replay_effects, force=edited.force)
            self.open.closed(name, [letter], items)
            return {"items": items, "changed": changed}

        return Change({"id": edited.id, "changed": changed, "effects": effects}, do)

    async def bounds(self, group: str) -> tuple[int, int, int]:
        return DeadLetters(self._core, group).bounds()

    async def send_next(self, spec: RedriveSpec, offset: int, most: int) -> tuple[list[dict[str, Any]], int] | None:
        letters = DeadLetters(self._core, spec.group)
        batch = [m for m in letters.read(offset, min(most, spec.wanted.at_once)) if m.offset < spec.until]
        if not batch:
            return None
        chosen = [m for m in batch if spec.wanted.matches(m)]
        if spec.drop:
            items = await letters.drop(chosen, spec.drop)
        else:
            items = await letters.send_again(chosen, replay_effects=spec.replay_effects, force=spec.force)
        self.open.closed(spec.group, chosen, items)
        # A job concerns open letters: dropped letters are left out of its results, like purged ones.
        return [item for item in items if item.get("code") != LETTER_DROPPED], batch[-1].offset + 1

    async def purge(self, name: str, before: str | int) -> Change:
        topic = self._core.queues.topic(dead_letter_topic(name))
        if topic is None:
            raise NotFound(f"group {name[:100]!r} has no dead letters")
        preview = purging.preview(self._core, topic, before)
        return Change(preview, lambda: purging.drop(self._core, topic, preview))


def not_letters(group: str, asked: Sequence[str] | None, present: Sequence[str]) -> list[dict[str, Any]]:
    """A refused item for each id in `asked` that is not among a group's dead letters."""
    detail = f"not among the dead letters of {dead_letter_topic(group)!r}"
    return [{"id": i, "status": 404, "detail": detail} for i in sorted(set(asked or ()) - set(present))]


def _shown(letter: StoredMessage, fate: Fate) -> dict[str, Any]:
    is_redriven, is_dropped = fate is Fate.REDRIVEN, fate is Fate.DROPPED
    state = {"dead_at": instant(letter.committed_us), "redriven": is_redriven, "dropped": is_dropped}
    return json_pulled(letter) | state


def _open_place(letter: StoredMessage, fate: Fate) -> Place | None:
    return place_of(letter) if fate is Fate.OPEN else None


def failure_row(failure: Failure) -> dict[str, Any]:
    """A failure group as the admin routes show it."""
    return {
        "fingerprint": failure.kind.fingerprint,
        "type": failure.kind.type or None,
        "place": failure.kind.place or None,
        "text": failure.kind.text,
        "count": failure.count,
        "open": failure.count - failure.closed,
        "first_at": instant(failure.first_us),
        "last_at": instant(failure.last_us),
        "topics": failure.topics,
        "example": {"id": failure.example_id, "reason": failure.example},
    }
