"""A search through dead letters in Kafka, part by part: between two parts other requests get their turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from notify.admin_api.dead_letters import AT_ONCE
from notify.kafka.redriven import Spot
from notify.server.groups import Chosen
from notify.server.groups.kafka.letters import Letter
from notify.server.jobs.letter_query import LOOKED_AT

PART_SECONDS = 2.0
"""How long a part reads letters, plus one call of Kafka's client."""


class Part:
    """The next letters: at most LOOKED_AT, read for PART_SECONDS."""

    def __init__(self, letters: Iterator[Letter], number: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`letters`: from `number` on. `monotonic`: a clock in seconds, which bounds the part."""
        self._letters = letters
        self._monotonic = monotonic
        self.next = number
        """The number from which the next part goes on."""
        self.is_over = False
        """Whether no letters are left."""

    def __iter__(self) -> Iterator[Letter]:
        deadline = self._monotonic() + PART_SECONDS
        for count, letter in enumerate(self._letters, 1):
            self.next = letter.number + 1
            yield letter
            if count == LOOKED_AT or self._monotonic() >= deadline:
                return
        self.is_over = True


class LetterSearch:
    """Looks for the letters that a redrive or drop chooses."""

    def __init__(self, chosen: Chosen, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._wanted = chosen.wanted
        self._missing = None if chosen.ids is None else set(chosen.ids)
        """The ids without an open letter so far; None: letters are chosen by conditions."""
        self._asked = frozenset(chosen.ids or ())
        self._most = min(chosen.most, AT_ONCE)
        self._next = chosen.offset
        self._is_over = False
        self.found: dict[Spot, str] = {}
        """The ids of the letters by place."""

    @property
    def has_ended(self) -> bool:
        return self._is_over or (len(self.found) >= self._most if self._missing is None else not self._missing)

    @property
    def next_offset(self) -> int:
        """The number from which the next request goes on; 0: nothing is left to look for."""
        return 0 if self._is_over or self._missing == set() else self._next

    def look(self, read: Callable[[int], Iterator[Letter]], is_closed: Callable[[Letter], bool]) -> None:
        """Look at the next part. `read` yields the letters from a number on."""
        part = Part(read(self._next), self._next, self._monotonic)
        for letter in part:
            if self._is_chosen(letter, is_closed(letter)):
                self.found[letter.spot] = letter.id
            if self.has_ended:
                break
        self._next, self._is_over = part.next, part.is_over

    def _is_chosen(self, letter: Letter, is_closed: bool) -> bool:
        if self._missing is None:
            return not is_closed and self._wanted.fits(letter.payload(), letter.dead_us)
        if letter.id not in self._asked:
            return False
        if not is_closed:  # a message that was sent again, and died again, has a closed letter before the open one
            self._missing.discard(letter.id)
        return True
