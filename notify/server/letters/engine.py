"""The protocol of a queue engine for dead letters; all else about letters is written once, over this."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from math import inf
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from notify.protocol.wire import Payload

LOOKED_AT_ONCE = 500
"""The most dead letters that are read without a pause: a search through all must not hold up other work."""
LOT_BYTES = 8 << 20
"""The most bytes of letters that are held to be closed, or looked at without a pause, plus one letter."""
LETTER_DROPPED = "dropped"
"""The code of a letter that is not sent again because it was dropped."""
WAS_DROPPED: Mapping[str, Any] = {
    "status": 410, "code": LETTER_DROPPED, "detail": "it was dropped: it is not sent again",
}  # fmt: skip
"""The result for a letter to redrive that was dropped before."""


class Change(NamedTuple):
    """A change that was checked but not made yet."""

    preview: Any
    """The change as a dry run shows it."""
    do: Callable[[], Awaitable[Any]]
    """Makes the change and returns its result."""


class Fate(Enum):
    """The state of a dead letter. One that is not open is closed: it was redriven or dropped, once and for all."""

    OPEN = auto()
    REDRIVEN = auto()
    DROPPED = auto()


class Letter(Protocol):
    """A dead letter. `size`: an estimate of its bytes in memory."""

    @property
    def number(self) -> int:
        """Its place among the letters of its group: numbers rise from letter to letter, with gaps."""
        ...

    @property
    def id(self) -> str: ...
    @property
    def dead_us(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_damaged(self) -> bool:
        """Whether its content cannot be read; only its number is used then."""
        ...

    def payload(self) -> Payload: ...
    def alone(self) -> Self:
        """This letter without its content: thousands of these fit into memory."""
        ...

    def shown(self, fate: Fate) -> dict[str, Any]:
        """The letter as the routes show it."""
        ...


L = TypeVar("L", bound=Letter)


@dataclass(slots=True)
class Look:
    """The letters that a search still looks for."""

    takes: Callable[[Any], bool]
    """Whether a letter, which is not damaged, is looked for."""
    most: int
    """The most letters to take,"""
    room: float = inf
    """and their bytes: the letter that reaches this bound is the last one."""
    until: float = inf
    """The number before which reading forwards ends."""
    at_once: int = LOOKED_AT_ONCE
    """How many letters may be compared without a pause."""
    looked_at: int = 0
    """How many letters the search has looked at."""


@dataclass(slots=True)
class Part(Generic[L]):
    """The letters that one call has looked at, of which it took some."""

    letters: list[L]
    next: int
    """The number from which the next part begins, or, backwards, before which it ends."""
    looked_at: int
    is_over: bool
    """Whether no letters are left."""


def look_at(
    letters: Iterable[L],
    number: int,
    look: Look,
    most: int,
    *,
    most_bytes: float = inf,
    is_late: Callable[[], bool] = lambda: False,
    backwards: bool = False,
) -> Part[L]:
    """Look at letters from a number on, or before it: at most `most` of them, `most_bytes` of their content plus one
    letter, and until `is_late`.
    """
    part: Part[L] = Part([], number, 0, False)
    size, room = 0, look.room
    for letter in islice(letters, most):
        if letter.number >= look.until:
            break
        part.looked_at += 1
        part.next = letter.number + (not backwards)
        size += letter.size
        if not letter.is_damaged and look.takes(letter):
            part.letters.append(letter)
            room -= letter.size
        if len(part.letters) >= look.most or room <= 0 or size >= most_bytes or is_late():
            return part
    part.is_over = part.looked_at < most
    return part


@dataclass(frozen=True, slots=True)
class Closing:
    """How letters are closed."""

    drop: str = ""
    """Who drops them, and why; empty: they are redriven."""
    replay_effects: bool = False
    """Whether handlers with an inbox take effect again."""
    force: bool = False
    """Whether to redrive although rows of the inbox may be purged."""


REDRIVE = Closing()


class Bounds(NamedTuple):
    """Where a group's letters are."""

    start: int
    """The number of the first letter."""
    end: int
    """The number after the last one."""
    most: int
    """The most letters that may be between them."""
    since: Any
    """Compares unequal after letters were removed: then counts begin again."""


class LetterEngine(Protocol[L]):
    """The dead letters of one queue engine. Methods raise Unavailable while the engine does not answer."""

    @property
    def most_looked_at(self) -> float:
        """The most letters that one request looks at."""
        ...

    @property
    def closes_alone(self) -> bool:
        """Whether only this server closes letters of its groups."""
        ...

    @property
    def rewrite(self) -> Callable[[L, Mapping[str, Any]], tuple[L, list[str]]] | None:
        """Makes (a letter with a person's changes, the names of the fields that differ), or raises InvalidRequest; None
        if this engine redrives letters only as they are."""
        ...

    async def counted(self, prefix: str) -> list[dict[str, Any]]:
        """Groups that have letters, with `group` and `count`, the number of open ones."""
        ...

    async def bounds(self, group: str, *, fresh: bool = False) -> Bounds:
        """`fresh`: with the letters of the last second."""
        ...

    async def read(self, group: str, number: int, look: Look) -> Part[L]:
        """The next part of the letters from a number on. Raises NotFound if the engine knows that there are none."""
        ...

    async def read_back(self, group: str, before: int, look: Look) -> Part[L]:
        """The part of the letters before a number (0: the end), the newest first."""
        ...

    async def fates(self, group: str, letters: Sequence[L]) -> list[Fate]: ...

    async def indexed(self, group: str, ids: Collection[str]) -> list[L] | None:
        """The letters of these messages, without content; None if this engine has no index of ids."""
        ...

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for the turn of a part of a search; it ends with the context."""
        ...

    async def check(self, group: str, how: Closing) -> None:
        """Raises InvalidRequest if this engine cannot close a group's letters in this way."""
        ...

    async def lot(self, group: str, letters: Sequence[L]) -> tuple[list[L], Sequence[L]]:
        """(the first of these letters with their content, those left for other calls): all of them may not fit into
        memory. Letters that are gone by now, as after a purge, are left out."""
        ...

    async def close(self, group: str, letters: Sequence[L], how: Closing) -> list[dict[str, Any]]:
        """Redrive or drop letters; the result of each, in order: `status` 201 (redriven) or 204 (dropped), 200 if that
        was done before, 410 for a letter to redrive that was dropped. Repeating it changes nothing."""
        ...

    async def purge(self, group: str, before: str | int) -> Change:
        """Raises NotFound, InvalidRequest."""
        ...
