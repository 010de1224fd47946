"""A search through the dead letters of a group, part by part: bounded in letters, in time and in its results' bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from math import inf
from typing import Generic

from notify.server.letters.engine import LOT_BYTES, Fate, L, LetterEngine, Look, Part
from notify.server.letters.query import LetterQuery

SEARCH_SECONDS = 5.0
"""How long one request looks for dead letters, plus one part of the search; its answer says where to continue."""
MATCHING_AT_ONCE = 50
"""A part takes this many matching letters even if fewer open ones are missing: some may be closed."""


class LetterSearch(Generic[L]):
    """One search. It ends at `most` results or `most_bytes` of them, at the engine's bound of letters, after
    SEARCH_SECONDS, or with the last letter.
    """

    def __init__(
        self,
        engine: LetterEngine[L],
        group: str,
        wanted: LetterQuery,
        most: int,
        most_bytes: float = inf,
        *,
        to_close: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`to_close`: only open letters are results, without their content. `monotonic`: a clock in seconds, which
        bounds the search."""
        self._engine = engine
        self._group = group
        self._most = most
        self._room = most_bytes
        self._to_close = to_close
        self._monotonic = monotonic
        self._look = Look(wanted.matches, most, at_once=wanted.at_once)
        self._missing: set[str] | None = None
        self.results: list[tuple[L, Fate]] = []
        self.next = 0
        """The number from which the next search continues, or, backwards, before which it continues."""
        self.is_over = False
        """Whether nothing is left to look for."""

    async def forwards(self, number: int) -> None:
        """Search from a number on."""
        self.next = number
        await self._through(self._engine.read, by=1)

    async def backwards(self, before: int) -> None:
        """Search the letters before a number (0: all letters), the newest first."""
        self.next = before
        await self._through(self._engine.read_back, by=0)

    async def for_ids(self, ids: Collection[str], number: int) -> None:
        """Search the letters of these messages from a number on, until each has an open one.

        Closed ones are results, too: a message that was redriven and died again has a closed letter before its open
        one.
        """
        self.next, self._missing = number, set(ids)
        asked = frozenset(ids)
        self._look.takes = lambda letter: letter.id in asked
        await self._through(self._engine.read, by=1)
        self.is_over = self.is_over or not self._missing

    async def _through(self, read: Callable[[str, int, Look], object], by: int) -> None:
        deadline = self._monotonic() + SEARCH_SECONDS
        while not (self.is_over or self._is_full() or self._look.looked_at >= self._engine.most_looked_at):
            self._look.most, self._look.room = self._wanted_now(), min(self._room, LOT_BYTES)
            async with self._engine.turn():
                part: Part[L] = await read(self._group, self.next, self._look)  # type: ignore[misc]
                fates = await self._engine.fates(self._group, part.letters)
            self._take(part, fates, by)
            if self._monotonic() >= deadline:
                break

    def _wanted_now(self) -> int:
        if self._missing is not None:
            return len(self._missing)
        missing = self._most - len(self.results)
        return max(missing, MATCHING_AT_ONCE) if self._to_close else missing

    def _is_full(self) -> bool:
        if self._missing is not None:
            return not self._missing
        return len(self.results) >= self._most or self._room <= 0

    def _take(self, part: Part[L], fates: list[Fate], by: int) -> None:
        self._look.looked_at += part.looked_at
        self.next, self.is_over = part.next, part.is_over
        for letter, fate in zip(part.letters, fates, strict=True):
            if self._is_full():
                return
            if self._missing is not None:
                if fate is Fate.OPEN:
                    self._missing.discard(letter.id)
            elif self._to_close and fate is not Fate.OPEN:
                continue
            self.results.append((letter.alone() if self._to_close else letter, fate))
            self._room -= letter.size
            if self._is_full() and letter is not part.letters[-1]:
                self.next, self.is_over = letter.number + by, False
