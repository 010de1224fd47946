"""A search through the dead letters of a group, part by part: bounded in letters, in time and in its results' bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import Generic, TypeVar

from notify.server.jobs.dead_letters import READ_BYTES, DeadLetters, Fate
from notify.server.jobs.letter_query import LOOKED_AT, SEARCH_SECONDS, LetterQuery
from notify.storage.records import StoredMessage

MATCHING_AT_ONCE = 50
"""A part takes this many matching letters even if fewer are missing: those that are closed may be no results."""

T = TypeVar("T")


class LetterSearch(Generic[T]):
    """One search. It ends at `most` results or `most_bytes` of their payloads, at LOOKED_AT letters, after
    SEARCH_SECONDS, or with the last letter.
    """

    def __init__(
        self,
        letters: DeadLetters,
        wanted: LetterQuery,
        result: Callable[[StoredMessage, Fate], T | None],
        most: int,
        most_bytes: float = inf,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`result` makes the result for a letter that matches; None: the letter is left out. `monotonic`: a clock in
        seconds, which bounds the search."""
        self._letters = letters
        self._wanted = wanted
        self._result = result
        self._most = most
        self._most_bytes = most_bytes
        self._monotonic = monotonic
        self._bytes = self._looked_at = 0
        self._last: int | None = None
        """The offset of the letter that was looked at last."""
        self.results: list[T] = []
        self.is_over = False
        """Whether no letters are left."""

    async def forwards(self, offset: int) -> int:
        """Search from an offset on; the offset to continue from."""
        await self._through(self._letters.forwards(offset, self._wanted.at_once))
        return offset if self._last is None else self._last + 1

    async def backwards(self, before: int) -> int:
        """Search the letters before an offset (0: all letters), the newest first.

        Returns the offset before which to continue; 0 if no letters are left.
        """
        await self._through(self._letters.backwards(before))
        is_over = self.is_over or self._last is None or self._last <= self._letters.bounds()[0]
        return 0 if is_over else self._last or 0

    async def _through(self, letters: Iterator[StoredMessage]) -> None:
        deadline = self._monotonic() + SEARCH_SECONDS
        while not self._is_at_a_bound():
            async with self._letters.part_of_a_search():
                await self._look(letters)
            if self._monotonic() >= deadline:
                break

    def _is_at_a_bound(self) -> bool:
        return self.is_over or self._is_full() or self._looked_at >= LOOKED_AT

    def _is_full(self) -> bool:
        return len(self.results) >= self._most or self._bytes >= self._most_bytes

    async def _look(self, letters: Iterator[StoredMessage]) -> None:
        """Look at the next letters, and add the results of those that match."""
        matching: list[StoredMessage] = []
        room = max(self._most - len(self.results), MATCHING_AT_ONCE)
        most, size, came = min(self._wanted.at_once, LOOKED_AT - self._looked_at), 0, 0
        for letter in islice(letters, most):
            self._last = letter.offset
            came += 1
            size += len(letter.payload)
            if self._wanted.matches(letter):
                matching.append(letter)
            if len(matching) >= room or size >= READ_BYTES:
                break
        else:
            self.is_over = came < most
        self._looked_at += came
        for letter, fate in zip(matching, await self._letters.fates(matching), strict=True):
            result = self._result(letter, fate)
            if result is not None:
                self.results.append(result)
                self._bytes += len(letter.payload)
            if self._is_full():
                self._last, self.is_over = letter.offset, False
                return
