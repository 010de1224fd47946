"""Dead letters of one queue engine, as administrators list, count, redrive, edit, drop and purge them."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

from notify.admin_api.dead_letters import AT_ONCE
from notify.admin_api.groups import EFFECTS_AGAIN, EFFECTS_KEPT
from notify.errors import Conflict, InvalidRequest, NotFound
from notify.protocol.limits import LIMITS
from notify.server.letters.engine import LETTER_DROPPED, LOT_BYTES, Bounds, Change, Closing, Fate, L, LetterEngine, Look
from notify.server.letters.failures import LetterCounts
from notify.server.letters.query import Chosen, Edited, JobSpec, LetterQuery
from notify.server.letters.search import LetterSearch
from notify.storage.names import dead_letter_topic

NO_EDIT = "over Kafka a dead letter is sent again unchanged: publish a corrected message, and drop the dead letter"


class Letters(Generic[L]):
    """The letters of one engine; the methods return the admin routes' answers, and raise the engine's errors."""

    def __init__(
        self, engine: LetterEngine[L], counts: LetterCounts[L], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`monotonic`: a clock in seconds, which bounds searches."""
        self._engine = engine
        self._counts = counts
        self._monotonic = monotonic

    async def counted(self, prefix: str, most: int) -> list[dict[str, Any]]:
        """Groups that have dead letters, with `group` and `count`, the largest count first."""
        rows = await self._engine.counted(prefix)
        return heapq.nlargest(most, rows, key=lambda row: (row["count"], row.get("redriven", 0)))

    async def listed(self, group: str, wanted: LetterQuery, number: int, most: int) -> dict[str, Any]:
        """The letters of a group that match, from a number on, and the number for the next call.

        There may be fewer than `most` although there are more.
        """
        search = self._listing(group, wanted, most)
        await search.forwards(number)
        return {"messages": _shown(search), "next_offset": search.next}

    async def newest(self, group: str, wanted: LetterQuery, before: int, most: int) -> dict[str, Any]:
        """The matching letters before a number (0: the end), the newest first, and the number for the next call (0: no
        more). There may be fewer than `most` although there are more.
        """
        search = self._listing(group, wanted, most)
        await search.backwards(before)
        return {"messages": _shown(search), "next_before": 0 if search.is_over else search.next}

    def _listing(self, group: str, wanted: LetterQuery, most: int) -> LetterSearch[L]:
        return LetterSearch(self._engine, group, wanted, most, LIMITS.reply_bytes, monotonic=self._monotonic)

    async def failures(self, group: str) -> dict[str, Any]:
        """The failure groups of a group's letters; `looked_at` of the `of` letters were counted."""
        return await self._counts.shown(group)

    async def drop(self, group: str, ids: tuple[str, ...], why: str, offset: int = 0) -> Change:
        """Drop the letters with these ids: they can no longer be redriven. `next_offset`: see `redrive`."""
        chosen = Chosen(ids, LetterQuery(), AT_ONCE, Closing(drop=why), offset)
        letters, next_offset = await self._chosen(group, chosen)
        preview = {"ids": [letter.id for letter in letters], "next_offset": next_offset}
        return Change(preview, lambda: self._carry_out(group, chosen, letters, next_offset))

    async def redrive(self, group: str, chosen: Chosen) -> Change:
        """In preview and result, `next_offset` is where the next call continues; 0: the list has ended. Raises
        NotFound."""
        await self._engine.check(group, chosen.how)
        letters, next_offset = await self._chosen(group, chosen)
        ids = [letter.id for letter in letters]
        preview = {"ids": ids, "effects": effects_of(chosen.how), "next_offset": next_offset}
        return Change(preview, lambda: self._carry_out(group, chosen, letters, next_offset))

    async def _chosen(self, group: str, chosen: Chosen) -> tuple[Sequence[L], int]:
        """(the chosen letters without content, the number from which the next request continues, or 0)."""
        if chosen.ids is not None:
            found = await self._engine.indexed(group, chosen.ids)
            if found is not None:
                return found, 0
        most = min(chosen.most, AT_ONCE)
        search = LetterSearch(self._engine, group, chosen.wanted, most, to_close=True, monotonic=self._monotonic)
        if chosen.ids is None:
            await search.forwards(chosen.offset)
        else:
            await search.for_ids(chosen.ids, chosen.offset)
        return [letter for letter, _ in search.results], 0 if search.is_over else search.next

    async def _carry_out(self, group: str, chosen: Chosen, letters: Sequence[L], next_offset: int) -> dict[str, Any]:
        """Close letters, lot by lot. The request that looked at the last letter refuses each id without one."""
        asked = chosen.ids if chosen.ids is not None else [letter.id for letter in letters]
        items: list[dict[str, Any]] = []
        while letters:
            lot, letters = await self._engine.lot(group, letters)
            items += await self._close(group, lot, chosen.how)
        if not next_offset:
            detail = f"not among the dead letters of {dead_letter_topic(group)!r}"
            missing = sorted(set(asked) - {item["id"] for item in items})
            items += [{"id": name, "status": 404, "detail": detail} for name in missing]
        return {"items": items, "next_offset": next_offset}

    async def _close(self, group: str, letters: Sequence[L], how: Closing) -> list[dict[str, Any]]:
        if not letters:
            return []
        items = await self._engine.close(group, letters, how)
        self._counts.closed(group, letters, items)
        return items

    async def edit(self, group: str, edited: Edited) -> Change:
        """Redrive a letter with other content. Raises NotFound, Conflict, InvalidRequest if the engine cannot."""
        engine = self._engine
        if engine.rewrite is None:
            raise InvalidRequest(NO_EDIT)
        found = await engine.indexed(group, {edited.id})
        lot = (await engine.lot(group, found[:1]))[0] if found else []
        if not lot:
            raise NotFound(f"{edited.id[:100]!r} is not among the dead letters of group {group[:100]!r}")
        if await engine.fates(group, lot) != [Fate.OPEN]:
            raise Conflict(
                "the dead letter was already sent again or dropped, so it can no longer be changed", "letter_closed"
            )
        corrected, changed = engine.rewrite(lot[0], edited.changes)

        async def do() -> Any:
            items = await engine.close(group, [corrected], edited.how)
            self._counts.closed(group, lot, items)
            return {"items": items, "changed": changed}

        return Change({"id": edited.id, "changed": changed, "effects": effects_of(edited.how)}, do)

    async def bounds(self, group: str) -> Bounds:
        """Where a group's letters are; a job closes them by these numbers. Raises Unavailable."""
        return await self._engine.bounds(group, fresh=True)

    async def close_next(self, spec: JobSpec, number: int, most: int) -> tuple[list[dict[str, Any]], int] | None:
        """Close the next letters that match, at most `most`, from a number on.

        Returns the result for each letter and the number to continue from; None if no letters are left. Repeating it
        closes no letter twice. Raises Unavailable.
        """
        look = Look(spec.wanted.matches, most, LOT_BYTES, spec.until, spec.wanted.at_once)
        part = await self._engine.read(spec.group, number, look)
        if not part.looked_at:
            return None
        items = await self._close(spec.group, part.letters, spec.how)
        # A job concerns open letters: dropped letters are left out of its results, like purged ones.
        return [item for item in items if item.get("code") != LETTER_DROPPED], part.next

    async def purge(self, group: str, before: str | int) -> Change:
        """Raises NotFound, InvalidRequest."""
        return await self._engine.purge(group, before)


def effects_of(how: Closing) -> str:
    """A sentence about a redrive and the effects that handlers with an inbox had."""
    return EFFECTS_AGAIN if how.replay_effects else EFFECTS_KEPT


def _shown(search: LetterSearch[Any]) -> list[dict[str, Any]]:
    return [letter.shown(fate) for letter, fate in search.results]
